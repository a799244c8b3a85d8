"""Two real servers and a relay between them, which serves the sender's entries at any rate.

The sender's entries are copied into the relay, and the sender stops. The receiver then reads them
over a link that the transport's own bandwidth cap paces.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.oracle import decode, partial_prefill
from benchmarks.random_servers import ENV, PAGE, family_of, options, rotated, write_random
from cachetree import (
    EMPTY_SPAN,
    Cache,
    CacheConfig,
    Deadline,
    Kind,
    PageHash,
    Plan,
    Span,
    Staging,
    Step,
    Worker,
    WorkerConfig,
)
from cachetree.planning import Strategy
from cachetree.tree import page_hashes
from profiles.compute.models import ModelSource, load_model
from profiles.random_models import random_prompt
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running

NUM_NEW = 24
NUM_LEARNING = 2
NUM_COMPARED = 8
"""Number of tokens of an answer that are compared."""


@dataclass(frozen=True)
class Sample:
    """Measurement of one request for one new token."""

    ttft_ms: float
    token: int
    provenance: Mapping[str, Any]

    @property
    def outcome(self) -> str:
        return self.provenance["outcome"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of two servers with randomly initialised models."""

    num_shared: int
    """Number of tokens in a document."""
    num_documents: int
    is_one_model: bool = False
    """True if both servers run the same weights."""
    dtype: str = "float32"
    codec: str = "none"
    sends: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the sender; `reads` has those of the receiver."""
    reads: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    sender: Server
    receiver: Server
    relay: Cache
    """Cache that holds the sender's entries and serves them through a paced link."""
    relay_address: str
    documents: Sequence[Sequence[int]]

    def prompt(self, document: int) -> list[int]:
        return [*self.documents[document], *random_prompt(NUM_NEW, seed=9000 + document)]

    def ask(self, document: int, controls: Mapping[str, str]) -> Sample:
        """Measure the TTFT of a new question about the document, with an empty cache in the
        receiver."""
        tokens = self.prompt(document)
        self.receiver.flush()
        started_s = time.perf_counter()
        reply = self.receiver.generate(
            tokens, max_new_tokens=1, droidspeak=controls, return_logprob=False
        )
        ttft_ms = 1000 * (time.perf_counter() - started_s)
        (provenance,) = reply["meta_info"]["droidspeak"]
        return Sample(ttft_ms, reply["output_ids"][0], provenance)


@contextmanager
def bench(folder: Path, setup: Setup) -> Iterator[Bench]:
    names = ["model"] if setup.is_one_model else ["sender", "receiver"]
    paths = write_random(folder, names)
    direct, relayed = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    sends = {"listen": direct, "host_gb": 4, "codec": setup.codec, **setup.sends}
    reads = {
        "peers": [direct, relayed],
        "gate": "none",
        "host_gb": 0,
        "codec": setup.codec,
        "fetch_deadline_s": 60,
        **setup.reads,
    }
    of_sglang = options(dtype=setup.dtype, max_total_tokens=8000, max_running_requests=4)
    specs = [
        ServerSpec(model=path, name=name, options=of_sglang, droidspeak=settings)
        for path, name, settings in (
            (paths[0], "sender", sends),
            (paths[-1], "receiver", reads),
        )
    ]
    family = family_of(paths[-1], setup.dtype, setup.codec)
    documents = [random_prompt(setup.num_shared, seed=i) for i in range(setup.num_documents)]
    with (
        running(*specs, folder=folder / "logs", env=ENV) as (s, r),
        Cache(family, CacheConfig(peers=(direct,), serves=False)) as relay,
    ):
        yield Bench(s, r, relay, relayed, documents)


def publish(testbed: Bench) -> None:
    """Have the sender read every document. Wait until it advertises all of their pages."""
    for document in testbed.documents:
        testbed.sender.generate(document, max_new_tokens=1)
        pages = page_hashes(document, PAGE)
        while not any(m.num_pages == len(pages) for m in testbed.relay.match(pages)):
            time.sleep(0.02)
    time.sleep(0.2)


def compare_outputs(testbed: Bench, controls: Mapping[str, str], block: Span) -> list[int]:
    """Compare the receiver's answer about the first document with an oracle's, and return the
    oracle's tokens. They are equal only in float32 without a codec."""
    sender, receiver = (
        load_model(ModelSource(path=each.spec.model)) for each in (testbed.sender, testbed.receiver)
    )
    ids, num_shared = torch.tensor([testbed.prompt(0)]), len(testbed.documents[0]) // PAGE * PAGE
    prefix = partial_prefill(receiver, sender, ids[:, :num_shared], block)
    wanted = decode(receiver, prefix, ids[:, num_shared:], NUM_COMPARED)
    testbed.receiver.flush()
    reply = testbed.receiver.generate(
        testbed.prompt(0),
        max_new_tokens=NUM_COMPARED,
        droidspeak=controls,
        sampling_params={"ignore_eos": True},
        timeout_s=600,
    )
    assert reply["meta_info"]["droidspeak"][0]["outcome"] == "reused", reply["meta_info"]
    got = reply["output_ids"][: len(wanted.sure)]
    assert wanted.sure, "the oracle itself is undecided; take another seed"
    assert got == wanted.sure, (controls, got, wanted.ids)
    return wanted.ids


def mirror(testbed: Bench, block: Span) -> None:
    """Copy the sender's entries into the relay, with the E at the start of `block`."""
    for document in testbed.documents:
        pages = page_hashes(document, PAGE)
        with fetched(testbed.relay, pages, block) as (plan, staging):

            def joined(kind: Kind, layer: int, staging: Staging = staging) -> memoryview:
                return memoryview(b"".join(staging.views(Step(kind, layer))))

            kv = [joined(Kind.KV, layer) for layer in range(plan.num_layers)]
            e = {layer: joined(Kind.E, layer) for layer in plan.transition_layers}
            assert testbed.relay.store(plan.sender, None, pages, kv, e)


@contextmanager
def fetched(
    cache: Cache, pages: Sequence[PageHash], block: Span = EMPTY_SPAN
) -> Iterator[tuple[Plan, Staging]]:
    """Fetch these pages at all layers, and E at the start of `block`. Only one model may have the
    pages."""
    (match,) = cache.match(pages)
    plan = Plan(
        sender=match.model,
        receiver=match.model,
        location=match.location,
        pages=Span(0, len(pages)),
        block=block,
        num_layers=cache.family.num_layers,
        strategy=Strategy.EVERYTHING_FIRST,
    )
    staging = cache.fetch(plan, pages, Deadline.after(60))
    assert staging is not None
    with staging:
        for step in plan.steps:
            staging.wait(step)
        yield plan, staging


@contextmanager
def paced(testbed: Bench, bytes_per_s: float, controls: Mapping[str, str]) -> Iterator[None]:
    """Serve the relay's entries at this rate. First send requests with `controls` until the
    receiver has found the relay."""
    config = WorkerConfig(listen=testbed.relay_address, max_bytes_per_s=bytes_per_s)
    worker = Worker(testbed.relay.tree, config)
    try:
        deadline = time.monotonic() + 30
        while testbed.ask(0, controls).outcome == "no_match":
            assert time.monotonic() < deadline, "the receiver did not find the relay"
            time.sleep(0.2)
        yield
    finally:
        worker.close()
        time.sleep(0.2)


def asked(
    testbed: Bench, arms: Mapping[str, Mapping[str, str]], num_learning: int = 1
) -> dict[str, list[Sample]]:
    """Ask about every document with each of `arms`, which are controls by name. The arms take turns
    to be first. The results leave out the first `num_learning` documents: the server learns its
    speeds from them."""
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    for document in range(len(testbed.documents)):
        for name in rotated(list(arms), document):
            samples[name].append(testbed.ask(document, arms[name]))
    return {name: of[num_learning:] for name, of in samples.items()}


def in_turns(testbed: Bench) -> dict[str, list[Sample]]:
    """Ask for full prefills and for the planner's choice in turns. Both must answer alike."""
    modes = {mode: {"mode": mode} for mode in ("off", "auto")}
    samples = asked(testbed, modes, NUM_LEARNING)
    for pair in zip(*samples.values(), strict=True):
        assert len({sample.token for sample in pair}) == 1, "exact reuse answers as a full prefill"
    return samples


def paired_ratio(
    samples: Mapping[str, Sequence[Sample]], one: str = "auto", of: str = "off"
) -> float:
    """Median ratio of TTFTs about the same document: controls `one` over controls `of`."""
    pairs = zip(samples[one], samples[of], strict=True)
    return statistics.median(a.ttft_ms / b.ttft_ms for a, b in pairs)


def counts(samples: Sequence[Sample]) -> dict[str, int]:
    """Count the samples of each outcome."""
    return dict(sorted(Counter(sample.outcome for sample in samples).items()))


def median(samples: Sequence[Sample], of: str | Callable[[Sample], float]) -> float:
    """Return the median over the samples. `of` is a function of a sample, or the name of a value in
    its provenance."""
    read = of if callable(of) else lambda it: it.provenance[of]
    return statistics.median(map(read, samples))


def ttft(sample: Sample) -> float:
    return sample.ttft_ms
