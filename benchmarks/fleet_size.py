"""How much memory and CPU do many workers cost one engine that reads from all of them?

    python -m benchmarks.fleet_size [--workers 25 50 100 200] [--pages 1000000]

`--pages` is the number of pages that the largest fleet advertises. A smaller fleet advertises
proportionally fewer, so that each worker has the same number in every fleet. Each worker has its
own tree, full of prompts of 64 pages. All workers have one of these prompts in common. A worker's
adverts say which pages it has. As between real processes, they pass through its `Advertiser`, the
wire's encoding and the engine's `RemoteView` of it. Only the sockets are left out.

First each worker sends its snapshot: we count the bytes that the engine allocates for it. Then the
fleet runs for `--seconds`. Each worker stores one new prompt a second in place of its oldest. We
count the messages that reach the engine, their bytes, and the CPU time to read them. Last we look
up prompts that one worker has, that all workers have, and that no worker has. We count the CPU time
with garbage collection off, and compare each answer with the workers' own trees.

Physics: each worker names each of its pages to the engine once, so memory and messages are linear
in the number of workers. If no worker has the prompt, a lookup reads a dict once. If all workers
have it, the lookup names each of them. The costs of all engines of a fleet add up to the square of
its size: for many hosts, use a shared storage. Each size runs in its own process. The benchmark
fails if a figure grows with an exponent above 1.25 from the smallest to the largest fleet. The
limit is not 1, because the data of a lookup outgrows the processor's caches.
"""

from __future__ import annotations

import gc
import math
import time
from random import Random
from typing import Any

import numpy as np

from benchmarks import result
from benchmarks.allocated import allocated_bytes, counting
from benchmarks.unbacked import FAMILY, Unbacked
from cachetree import KV, CacheTree, Location, ModelId, PageHash, Part
from cachetree.transport.advertise import Advertiser, RemoteView
from cachetree.transport.wire import Entries, decode_to_peer, encode

MODEL = ModelId("m")
PAGE_BYTES = FAMILY.num_layers * FAMILY.kv_page_bytes + FAMILY.e_page_bytes
PROMPT_PAGES = 64
MAX_PENDING = 10_000
MAX_EXPONENT = 1.25
NOT_JUDGED = frozenset(
    {"workers", "pages", "cpu_share", "one_p99_us", "all_p99_us", "nobody_p99_us"}
)
"""Figures without a limit on their growth: the fleet's sizes, and times that other work on the
machine disturbs."""


class SimulatedWorker:
    """A worker's tree, its `Advertiser` to the engine, and the engine's view of the worker."""

    def __init__(self, number: int, num_pages: int, engine: CacheTree) -> None:
        num_bytes = num_pages * PAGE_BYTES
        self.tree = CacheTree(FAMILY, host_bytes=num_bytes, memory=Unbacked())
        self.prompts: list[list[PageHash]] = []
        self._num_prompts = num_pages // PROMPT_PAGES
        self._random = Random(number)
        self._view = RemoteView(engine, Location(f"tcp://10.0.{number >> 8}.{number & 255}:1"))
        self._advertiser: Advertiser | None = None

    def store(self, prompt: list[PageHash] | None = None) -> None:
        """Store a prompt, by default a new one, in place of the worker's oldest."""
        prompt = prompt or prompt_of(self._random)
        for part in (KV, Part(1)):
            reservation = self.tree.reserve(MODEL, None, prompt, part)
            assert reservation is not None
            reservation.commit()
        self.prompts.append(prompt)
        del self.prompts[: -self._num_prompts]

    def tell(self) -> list[bytes]:
        """Return the encoded messages that bring the engine's view up to date."""
        if self._advertiser is None:
            self._advertiser = Advertiser(self.tree, MAX_PENDING, lambda: None, time.monotonic)
        return [encode(it) for it in iter(self._advertiser.next, None)]

    def deliver(self, messages: list[bytes]) -> None:
        """Apply the worker's messages to the engine's view."""
        assert self._advertiser is not None
        for message in messages:
            advert = decode_to_peer(memoryview(message))
            self._view.apply(advert)
            if isinstance(advert, Entries):
                self._advertiser.learned()


def prompt_of(random: Random) -> list[PageHash]:
    return [PageHash(random.randbytes(16)) for _ in range(PROMPT_PAGES)]


def run(num_workers: int, num_pages: int, seconds: int, num_lookups: int) -> dict[str, Any]:
    """Build a fleet of one size and measure it."""
    engine = CacheTree(FAMILY, host_bytes=0)
    pages_each = num_pages // num_workers // PROMPT_PAGES * PROMPT_PAGES
    workers = [SimulatedWorker(it, pages_each, engine) for it in range(num_workers)]
    common = prompt_of(Random(-1))
    for worker in workers:
        for _ in range(pages_each // PROMPT_PAGES - 1):
            worker.store()
        worker.store(common)
    snapshots = [it.tell() for it in workers]
    gc.collect()
    before = allocated_bytes()
    for worker, messages in zip(workers, snapshots, strict=True):
        worker.deliver(messages)
    gc.collect()
    memory = allocated_bytes() - before
    gc.disable()
    num_told = num_bytes = 0
    spent_s = 0.0
    for _ in range(seconds):
        for worker in workers:
            worker.store()
            messages = worker.tell()
            num_told += len(messages)
            num_bytes += sum(map(len, messages))
            begun_s = time.thread_time()
            worker.deliver(messages)
            spent_s += time.thread_time() - begun_s
    return {
        "workers": num_workers,
        "pages": sum(it.tree.num_pages for it in workers),
        "memory_bytes": memory,
        "messages_per_s": num_told / seconds,
        "bytes_per_s": num_bytes / seconds,
        "cpu_share": spent_s / seconds,
        **lookups(engine, workers, common, num_lookups),
    }


def lookups(
    engine: CacheTree, workers: list[SimulatedWorker], common: list[PageHash], num: int
) -> dict[str, float]:
    """Return percentiles of lookup times in microseconds. Each answer must agree with the workers'
    own trees."""
    random, percentiles = Random(7), {}
    asked = {
        "one": lambda: random.choice(
            [it for it in random.choice(workers).prompts if it is not common]
        ),
        "all": lambda: common,
        "nobody": lambda: prompt_of(random),
    }
    for name, ask in asked.items():
        spent_us = []
        for _ in range(num):
            prompt = ask()
            begun_ns = time.thread_time_ns()
            matches = engine.match(prompt)
            spent_us.append((time.thread_time_ns() - begun_ns) / 1000)
            holders = [it for it in workers if it.tree.has(MODEL, prompt[-1])]
            assert sorted(it.num_pages for it in matches) == [PROMPT_PAGES] * len(holders)
        for percent in (50, 99):
            percentiles[f"{name}_p{percent}_us"] = float(np.percentile(spent_us, percent))
    return percentiles


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the power of the number of workers with which each figure grows, from the first row to
    the last."""
    first, last = rows[0], rows[-1]
    growth = math.log(last["workers"] / first["workers"])
    return {
        name: round(math.log(last[name] / first[name]) / growth, 2)
        for name in first
        if name not in NOT_JUDGED
    }


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[25, 50, 100, 200])
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--lookups", type=int, default=2000)
    args = parser.parse_args()
    environment = result.here()
    rows = []
    for size in args.workers:
        asked = (size, args.pages * size // args.workers[-1], args.seconds, args.lookups)
        with counting() as process:
            rows.append(process.submit(run, *asked).result())
    results = {"rows": rows, "exponents": exponents(rows)}
    result.write("fleet_size", results, environment, args.json)
    steep = {name: it for name, it in results["exponents"].items() if it > MAX_EXPONENT}
    if steep:
        raise SystemExit(f"faster than linear: {steep}")


if __name__ == "__main__":
    main()
