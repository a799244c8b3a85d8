"""How much sooner does the first token come when the prefix is another model's, and what limits it?

    python benchmarks/partial_prefill.py [--documents 7] [--dtype float32] [--codec none]

Two real servers with randomly initialised models of 12 layers × 768 and a 2,000-token document;
the receiver loads nine layers from the sender over loopback and recomputes three, [4, 7).

Physics: a full prefill computes 12 layers for every token. The recompute computes two of them and
the K and V projections of the third, about 2.1/12 of the work, so the ideal is that share of the
full prefill plus the forward over the new tokens, which attends over the prefix in every layer. On
top of that comes overhead: matching, fetching, copying into slots, scheduling. Each server computes
with one thread, so that on two cores the other one moves the bytes. The contenders are interleaved
on the same documents, and their answers are compared before their times: the block of all layers
must give the tokens of the full prefill.

The second part puts a paced link (the transport's own bandwidth cap) between the two and compares
what the paper compares: everything loaded first, only the reused layers loaded first, and loads
and recompute pipelined; with what `schedule.py` predicts from the measured parts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import result
from rich.console import Console
from rich.table import Table
from schedule import Request, schedule

from cachetree import (
    Cache,
    CacheConfig,
    Deadline,
    Family,
    Kind,
    Plan,
    Span,
    Step,
    Worker,
    WorkerConfig,
)
from cachetree.checkpoint import Codec, read_model_identity
from cachetree.planning import Strategy
from cachetree.tree import page_hashes
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running

NUM_LAYERS = 12
HIDDEN = 768
BLOCK = Span(4, 7)
PAGE = 16
NUM_SHARED = 2000
NUM_NEW = 24
CONDITIONS: Mapping[str, Mapping[str, str]] = {
    "full_prefill": {"mode": "off"},
    "full_reuse": {"block": "none"},
    "block": {"block": f"{BLOCK.start}:{BLOCK.stop}"},
    "all_layers": {"block": "all"},
}
STRATEGIES = (Strategy.EVERYTHING_FIRST, Strategy.REUSED_FIRST, Strategy.PIPELINED)
console = Console(width=100)


@dataclass(frozen=True)
class Sample:
    """One request for one new token."""

    ttft_ms: float
    token: int
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Bench:
    sender: Server
    receiver: Server
    relay: Cache
    """Holds what the sender stored, to serve it again through a paced link."""
    relay_address: str
    documents: Sequence[Sequence[int]]

    def ask(self, document: int, controls: Mapping[str, str]) -> Sample:
        """TTFT of the document with a new question, nothing of it in the receiver's own cache."""
        tokens = [*self.documents[document], *random_prompt(NUM_NEW, seed=9000 + document)]
        self.receiver.flush()
        started_s = time.perf_counter()
        reply = self.receiver.generate(
            tokens, max_new_tokens=1, droidspeak=controls, return_logprob=False
        )
        ttft_ms = 1000 * (time.perf_counter() - started_s)
        (provenance,) = reply["meta_info"]["droidspeak"]
        return Sample(ttft_ms, reply["output_ids"][0], provenance)


@contextmanager
def bench(folder: Path, dtype: str, codec: str, num_documents: int) -> Iterator[Bench]:
    config = shape("llama", layers=NUM_LAYERS, hidden=HIDDEN, heads=12, kv_heads=12)
    sender_path, receiver_path = write_models(folder, config, ["sender", "receiver"])
    options = {
        "dtype": dtype,
        "page-size": PAGE,
        "max-total-tokens": 4 * NUM_SHARED,
        "max-running-requests": 4,
        "chunked-prefill-size": 4096,
        "sleep-on-idle": True,
        "device": "cpu",
    }
    direct, relayed = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    sender = ServerSpec(
        model=sender_path,
        name="sender",
        options=options,
        droidspeak={
            "listen": direct,
            "capture_layers": [BLOCK.start],
            "host_gb": 4,
            "codec": codec,
        },
    )
    receiver = ServerSpec(
        model=receiver_path,
        name="receiver",
        options=options,
        droidspeak={
            "peers": [direct, relayed],
            "gate": "off",
            "host_gb": 0,
            "codec": codec,
            "fetch_deadline_s": 60,
            "forward_wait_s": 2,
        },
    )
    family = Family.of(
        read_model_identity(receiver_path),
        model_dtype=dtype,
        kv_dtype=dtype,
        page_size=PAGE,
        codec=Codec(codec),
        tp_size=1,
        tp_rank=0,
    )
    documents = [random_prompt(NUM_SHARED, seed=i) for i in range(num_documents)]
    with (
        console.status("starting two servers"),
        running(sender, receiver, folder=folder / "logs", env={"OMP_NUM_THREADS": "1"}) as (s, r),
        Cache(family, CacheConfig(peers=(direct,), serves=False)) as relay,
    ):
        yield Bench(s, r, relay, relayed, documents)


def publish(it: Bench) -> None:
    """Have the sender read every document, and wait until its pages are on offer."""
    for document in it.documents:
        it.sender.generate(document, max_new_tokens=1)
        pages = page_hashes(document, PAGE)
        while not any(m.num_pages == len(pages) for m in it.relay.match(pages)):
            time.sleep(0.02)
    time.sleep(0.2)


def speed(it: Bench) -> dict[str, list[Sample]]:
    """Every condition on every document, interleaved; the first document warms up."""
    samples: dict[str, list[Sample]] = {name: [] for name in CONDITIONS}
    for document in range(len(it.documents)):
        for name, controls in CONDITIONS.items():
            sample = it.ask(document, controls)
            wanted = "off" if name == "full_prefill" else "reused"
            assert sample.provenance["outcome"] == wanted, (name, sample.provenance)
            if document:
                samples[name].append(sample)
    for full, again in zip(samples["full_prefill"], samples["all_layers"], strict=True):
        assert full.token == again.token, "all layers recomputed must answer as a full prefill"
    return samples


def mirror(it: Bench) -> None:
    """Copy the sender's entries into the relay."""
    for document in it.documents:
        pages = page_hashes(document, PAGE)
        (match,) = it.relay.match(pages)
        plan = Plan(
            sender=match.model,
            receiver=match.model,
            location=match.location,
            pages=Span(0, len(pages)),
            block=BLOCK,
            num_layers=NUM_LAYERS,
            strategy=Strategy.EVERYTHING_FIRST,
        )
        staging = it.relay.fetch(plan, pages, Deadline.after(60))
        assert staging is not None
        with staging:
            for step in plan.steps:
                staging.wait(step)
            kv = [staging.view(Step(Kind.KV, layer)) for layer in range(NUM_LAYERS)]
            e = {BLOCK.start: staging.view(Step(Kind.E, BLOCK.start))}
            assert it.relay.store(match.model, None, pages, kv, e)


@contextmanager
def paced(it: Bench, bytes_per_s: float) -> Iterator[None]:
    """Serve the relay's entries at that rate until the receiver knows all of them."""
    config = WorkerConfig(listen=it.relay_address, max_bytes_per_s=bytes_per_s)
    worker = Worker(it.relay.tree, config)
    try:
        deadline = time.monotonic() + 30
        while it.ask(0, CONDITIONS["full_reuse"]).provenance["outcome"] != "reused":
            assert time.monotonic() < deadline, "the receiver did not find the relay"
            time.sleep(0.2)
        yield
    finally:
        worker.close()
        time.sleep(0.2)


def throttled(it: Bench, bytes_per_s: float) -> dict[Strategy, list[Sample]]:
    samples: dict[Strategy, list[Sample]] = {strategy: [] for strategy in STRATEGIES}
    with paced(it, bytes_per_s):
        for document in range(min(4, len(it.documents))):
            for strategy in STRATEGIES:
                controls = {**CONDITIONS["block"], "strategy": strategy.value}
                sample = it.ask(document, controls)
                assert sample.provenance["outcome"] == "reused", sample.provenance
                samples[strategy].append(sample)
    for triple in zip(*samples.values(), strict=True):
        assert len({sample.token for sample in triple}) == 1, "strategies must agree"
    return samples


def median(samples: Sequence[Sample], of: Callable[[Sample], float]) -> float:
    return statistics.median(of(sample) for sample in samples)


def ttft(sample: Sample) -> float:
    return sample.ttft_ms


def field(name: str) -> Callable[[Sample], float]:
    return lambda sample: sample.provenance[name]


def report_speed(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    parts = ("match_ms", "queued_ms", "fetch_ms", "load_ms", "recompute_ms", "forward_ms")
    table = Table(title=f"TTFT, {NUM_SHARED} shared + {NUM_NEW} new tokens, medians in ms")
    for column in ("condition", "TTFT", "× faster", *(part[:-3] for part in parts)):
        table.add_column(column, justify="left" if column == "condition" else "right")
    full_ms = median(samples["full_prefill"], ttft)
    summary: dict[str, Any] = {}
    for name, of in samples.items():
        ms = median(of, ttft)
        values = {part: median(of, field(part)) for part in parts}
        summary[name] = {"ttft_p50_ms": ms, "speedup": full_ms / ms, **values}
        cells = [f"{values[part]:.1f}" for part in parts]
        table.add_row(name, f"{ms:.0f}", f"{full_ms / ms:.2f}", *cells)
    console.print(table)
    forward_ms = summary["block"]["forward_ms"]
    share = share_computed()
    ideal_ms = full_ms * share + forward_ms
    summary["ideal_ms"] = ideal_ms
    summary["over_ideal"] = summary["block"]["ttft_p50_ms"] / ideal_ms
    console.print(
        f"ideal {ideal_ms:.0f} ms = full prefill × {NUM_LAYERS * share:.2f}/{NUM_LAYERS} + forward "
        f"{forward_ms:.0f} ms; the block takes {summary['over_ideal']:.2f} of it"
    )
    return summary


def share_computed() -> float:
    """Multiplications of the block's full layers and its last K and V, of those of all layers."""
    mlp = HIDDEN * 8 // 3 // 64 * 64
    kv = 2 * HIDDEN * HIDDEN
    layer = kv + 2 * HIDDEN * HIDDEN + 3 * HIDDEN * mlp + HIDDEN * NUM_SHARED
    return (len(BLOCK) - 1 + kv / layer) / NUM_LAYERS


def report_throttled(rate: float, samples: Mapping[Strategy, Sequence[Sample]]) -> dict[str, Any]:
    first = samples[Strategy.REUSED_FIRST]
    fetch_ms = median(first, field("fetch_ms"))
    recompute_ms = median(first, field("recompute_ms"))
    base_ms = median(first, ttft) - fetch_ms - recompute_ms
    table = Table(title=f"link paced to {rate / 1e6:.0f} MB/s, medians in ms")
    for column in ("strategy", "TTFT", "predicted", "fetch", "recompute"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    summary: dict[str, Any] = {"mb_per_s": rate / 1e6}
    for strategy, of in samples.items():
        ms = median(of, ttft)
        predicted_ms = base_ms + predict(strategy, fetch_ms, recompute_ms)
        summary[strategy.value] = {"ttft_p50_ms": ms, "predicted_ms": predicted_ms}
        fetched, recomputed = (median(of, field(f"{part}_ms")) for part in ("fetch", "recompute"))
        table.add_row(
            strategy.value,
            f"{ms:.0f}",
            f"{predicted_ms:.0f}",
            f"{fetched:.0f}",
            f"{recomputed:.0f}",
        )
    console.print(table)
    pipelined_ms = summary["pipelined"]["ttft_p50_ms"]
    hidden_ms = fetch_ms + recompute_ms + base_ms - pipelined_ms
    summary["speedup"] = summary["everything_first"]["ttft_p50_ms"] / pipelined_ms
    summary["hidden"] = hidden_ms / min(fetch_ms, recompute_ms)
    console.print(
        f"pipelined is {summary['speedup']:.2f}× faster than everything first and hides "
        f"{100 * summary['hidden']:.0f} % of the smaller of fetch and recompute"
    )
    return summary


def predict(strategy: Strategy, fetch_ms: float, recompute_ms: float) -> float:
    """The pure schedule's TTFT of one such request, from the measured parts."""
    kv_row, e_row = 2.0, 1.0
    unit_ms = fetch_ms / (kv_row * (NUM_LAYERS - len(BLOCK)) + e_row)
    request = Request(
        block=BLOCK,
        load=(kv_row * unit_ms,) * NUM_LAYERS,
        recompute=(recompute_ms / len(BLOCK),) * NUM_LAYERS,
        e_load=e_row * unit_ms,
    )
    return schedule([request], strategy).ttfts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--codec", default="none", choices=["none", "int8", "fp8", "int4"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    environment = result.here()
    with (
        tempfile.TemporaryDirectory() as folder,
        bench(Path(folder), args.dtype, args.codec, args.documents) as it,
    ):
        publish(it)
        summary: dict[str, Any] = {"speed": report_speed(speed(it))}
        mirror(it)
        it.sender.stop()
        time.sleep(0.5)
        rows_moved = 2 * (NUM_LAYERS - len(BLOCK)) + 1
        bytes_moved = rows_moved * HIDDEN * NUM_SHARED * (4 if args.dtype == "float32" else 2)
        balanced = bytes_moved / (summary["speed"]["block"]["recompute_ms"] / 1000)
        summary["throttled"] = [
            report_throttled(rate, throttled(it, rate))
            for rate in (balanced / 2, balanced, balanced * 2)
        ]
    summary |= {"dtype": args.dtype, "codec": args.codec}
    result.write("partial_prefill", summary, environment, args.json)


if __name__ == "__main__":
    main()
