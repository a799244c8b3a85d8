"""Three real processes with a fault proxy between two of them. Counts say what each process
holds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from engine_parts import CPU, ENV, PAGE, Answer, Watcher, answer, eventually, prompt, whole_pages
from fault_proxy import Deed, FaultProxy, Strike, Towards, Via
from forked import ServerSpec
from processes import num_descriptors, num_threads, resident_bytes
from prometheus_client.parser import text_string_to_metric_families
from shelf import Shelf

from cachetree import Location
from cachetree.checkpoint.identity import read_model_identity
from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import Server, free_port, running

NUM_LAYERS = 10
NUM_TOKENS = 200
BLOCK = "2:4"
STEP_BYTES = whole_pages(NUM_TOKENS) * 256 * 4
"""Bytes of one step: E of 256 numbers, or KV of two heads of 64, in float32."""
NUM_FRAMES = 1 + NUM_LAYERS - 2
"""Number of frames of a fetch: E, and the KV of each layer outside the block."""
LINK_MB_S = 20.0
"""Rate of the worker's link. It sends in one frame what takes 10 ms, so each step is one frame, and
it still sends when it is killed or stopped."""
DEADLINE_S = 2.0
LOOK_S = 0.5
"""Seconds until the reader's scheduler looks again, on a busy machine."""
NOISE_S = 3.0
"""Seconds by which some full prefills exceed the median, on a busy machine."""
RECOVERY_S = 30.0
NUM_DOCUMENTS = 40
NUM_SLOTS = 2048
"""Slots of the reader, enough for a quarter of the prompts."""
AT_ONCE = 8
"""Number of documents that the author reads at once, each in one chunk. A step of one chunk is sent
in one frame."""
HOST_BYTES = 96 << 20
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
"""Environment in which SGLang compares used and free slots after each step, as it always does when
idle. A server that misses a slot ends."""
CAUSES = (
    "DeadlineExceeded",
    "ForwardWaitExceeded",
    "StaleEntry",
    "ProtocolError",
    "FetchError",
    "SlowLink",
)

Samples = dict[tuple[str, ...], float]
"""Values by name and label values."""


@dataclass(frozen=True)
class Document:
    tokens: list[int]
    alone: Answer
    """Answer by full prefill."""


@dataclass(frozen=True)
class Blow:
    """Outcome of a request, and its costs."""

    harm: Strike | Deed
    provenance: dict[str, Any]
    added_s: float

    @property
    def outcome(self) -> str:
        return self.provenance["outcome"]

    @property
    def queued_s(self) -> float:
        """Seconds for which the reader held the request back."""
        return self.provenance["queued_ms"] / 1000


@dataclass
class Rig:
    author: Server
    reader: Server
    shelf: Shelf
    page: str
    """Address of the worker's metrics."""
    model: str
    """Id of the only model."""
    proxy: FaultProxy
    """Proxy in front of the worker."""
    authors_proxy: FaultProxy
    """Proxy in front of the author. It is shut unless a test opens it, so that everything comes
    from the worker."""
    documents: Iterator[Document]
    """Documents without an end. The reader has forgotten a document when its turn comes again. It
    is never flushed, because a flush would hide memory that it has not given back."""
    alone_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Counts of all requests."""

    def ask(self, **controls: Any) -> tuple[dict[str, Any], float]:
        """Ask for an answer that has to equal full prefill's. Return provenance and seconds."""
        document = next(self.documents)
        controls = controls or {"block": BLOCK, "sender": self.model}
        begun_at_s = time.monotonic()
        reply = answer(self.reader, document.tokens, droidspeak=controls)
        seconds = time.monotonic() - begun_at_s
        provenance = reply.provenance
        self.outcomes[provenance["outcome"]] += 1
        assert reply.ids == document.alone.ids, provenance
        assert reply.logprobs == pytest.approx(document.alone.logprobs, abs=2e-4)
        if provenance["outcome"] == "reused":
            assert provenance["fetched_bytes"] == NUM_FRAMES * STEP_BYTES
        return provenance, seconds

    def is_well(self) -> bool:
        """Whether a fetch without a harm succeeds."""
        return self.ask()[0]["outcome"] == "reused"

    def measure_alone(self) -> None:
        """Measure the present state of the machine."""
        self.alone_s = statistics.median(self.ask(mode="off")[1] for _ in range(5))

    def recover(self) -> None:
        eventually(self.is_well, RECOVERY_S)

    def frames(self, proxy: FaultProxy) -> list[tuple[Towards, int, Via]]:
        """Return frames that each of three fetches had; the number of pings differs between
        fetches."""
        counts = []
        for _ in range(3):
            proxy.arm(None)
            assert self.is_well()
            ways = itertools.product(Towards, (Via.ZMQ, Via.DATA))
            counts.append({way: proxy.num_frames(*way) for way in ways})
        return [
            (towards, index, via)
            for towards, via in counts[0]
            for index in range(min(count[towards, via] for count in counts))
        ]

    def strike(self, harm: Strike | Deed, proxy: FaultProxy) -> Blow | None:
        """Have one fetch meet a harm. None if the fetch had fewer frames."""
        proxy.arm(harm)
        provenance, seconds = self.ask()
        has_struck = proxy.has_struck
        proxy.arm(None)
        blow = Blow(harm, provenance, seconds - self.alone_s)
        assert blow.queued_s <= DEADLINE_S + LOOK_S, blow
        assert blow.added_s <= DEADLINE_S + NOISE_S, blow
        kind, _, cause = blow.outcome.partition(": ")
        assert kind == "reused" or (kind == "fallback" and cause in CAUSES), blow
        return blow if has_struck else None

    def told(self) -> Samples:
        """Return the reader's metrics. Those of its cache are up to two seconds old."""
        return scraped(f"{self.reader.url}/metrics")

    def held(self) -> dict[str, float]:
        """Return counts that have to return to their start; SGLang counts slots, see `STRICT`."""
        pages = [self.page] if self.shelf.process.is_alive else []
        senders = [scraped(url) for url in (f"{self.author.url}/metrics", *pages)]
        counts = {
            name: sum(it[f"cachetree:{name}",] for it in senders)
            for name in ("held_bytes", "streams")
        }
        counts["staged"] = self.told()["cachetree:bytes", "staging"]
        for name, pid in self.pids().items():
            counts[f"{name}'s descriptors"] = num_descriptors(pid)
            counts[f"{name}'s threads"] = num_threads(pid)
        return counts

    def resident(self) -> dict[int, int]:
        """Return resident bytes, by process."""
        return {pid: resident_bytes(pid) for pid in self.pids().values()}

    def pids(self) -> dict[str, int]:
        servers = {"author": self.author, "reader": self.reader, "worker": self.shelf.process}
        return {name: process.pid for name, process in servers.items() if process.is_alive}


def scraped(url: str) -> Samples:
    text = requests.get(url, timeout=10).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextmanager
def rig_in(folder: Path, *, seed: int) -> Iterator[Rig]:
    config = shape("llama", layers=NUM_LAYERS, hidden=256, heads=4, kv_heads=2)
    (model,) = write_models(folder, config, ["both"], seed=5)
    address = Location(f"tcp://127.0.0.1:{free_port()}")
    author_address = Location(f"tcp://127.0.0.1:{free_port()}")
    page = f"127.0.0.1:{free_port()}"

    def worker(_life: int) -> dict[str, Any]:
        return {
            "family": {"model": str(model), "kv_dtype": "float32", "page_size": PAGE},
            "http": page,
            "cache": {
                "host_bytes": HOST_BYTES,
                "disk_path": str(folder / "disk"),
                "disk_bytes": 4 * HOST_BYTES,
                "keeps": [author_address],
                "worker": {"listen": address, "max_bytes_per_s": LINK_MB_S * 1e6},
            },
        }

    author = ServerSpec(
        model=model,
        name="author",
        options={**CPU, "enable-metrics": True, "chunked-prefill-size": AT_ONCE * NUM_TOKENS},
        droidspeak={
            "listen": author_address,
            "capture_layers": [2],
            "max_link_mb_s": LINK_MB_S,
            "host_gb": HOST_BYTES / (1 << 30),
        },
    )
    (folder / "logs").mkdir()
    shelf = Shelf(worker, folder / "logs")
    try:
        with (
            FaultProxy(address, seed=seed) as proxy,
            FaultProxy(author_address, seed=seed) as authors_proxy,
        ):
            authors_proxy.shut()
            reader = ServerSpec(
                model=model,
                name="reader",
                options={**CPU, "enable-metrics": True, "max-total-tokens": NUM_SLOTS},
                droidspeak={
                    "peers": [proxy.address, authors_proxy.address],
                    "gate": "none",
                    "host_gb": 0,
                    "shared_memory": False,  # So that the proxy meets all that is sent.
                    "fetch_deadline_s": DEADLINE_S,
                    "peer_cooldown_s": 0.5,
                    # On a busy machine a layer comes later than predicted, with no fault at all.
                    "forward_wait_s": DEADLINE_S,
                    # A second fetch would not fit if the first had leaked.
                    "staging_gb": 1.5 * NUM_FRAMES * STEP_BYTES / (1 << 30),
                },
            )
            env = {**ENV, **STRICT}
            with running(author, reader, folder=folder / "logs", env=env) as (a, r):
                eventually(shelf.process.is_ready, RECOVERY_S)
                rig = Rig(
                    author=a,
                    reader=r,
                    shelf=shelf,
                    page=f"http://{page}/metrics",
                    model=read_model_identity(model).model_id,
                    proxy=proxy,
                    authors_proxy=authors_proxy,
                    documents=itertools.cycle(read(a, Watcher(model, [address]), model, seed)),
                )
                for _ in range(9):
                    rig.recover()
                yield rig
    finally:
        shelf.kill()


def read(author: Server, watcher: Watcher, model: Path, seed: int) -> list[Document]:
    """Yield new documents that the worker has stored."""
    prompts = [prompt(NUM_TOKENS, seed=1000 * seed + index) for index in range(NUM_DOCUMENTS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda tokens: answer(author, tokens), prompts))
    try:
        for tokens in prompts:
            eventually(lambda tokens=tokens: watcher.num_pages(tokens, model) == NUM_TOKENS // PAGE)
    finally:
        watcher.close()
    return [Document(*it) for it in zip(prompts, answers, strict=True)]
