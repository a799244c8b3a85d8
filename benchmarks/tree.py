"""How fast and how small is our prefix tree, beside SGLang's two trees and a flat dict?

    python -m benchmarks.tree [--pages 1000000] [--models 1 8] [--memory-gib 6]

Prompts have 8K to 32K tokens and pages of 64; each begins with the first 0 to 80 % of an earlier
prompt. `--pages` distinct pages are cached for every model. We look up cached prompts (full), a
cached prefix of random length with a new tail (partial) and new prompts (miss).

Physics: a flat index pays one hash lookup, so about one cache miss, per page and model. A radix
tree over tokens compares 512 bytes per page. A tree over page hashes compares 16 bytes per page,
once for all models, and has a cost per node. The hash itself takes 16 bytes a page; a Python object
per page takes at least four times as much.

All contenders are built from the same prompts in one process, and look the same prompts up. Another
contender is first each time. The lengths that they return must be equal. Times are CPU time of this
thread with garbage collection off, minus the cost of reading the clock. Page hashes are made
before; the table has their cost in a row of its own. SGLang's trees read tokens and need no hashes.
A contender that would need more than `--memory-gib` is left out. For memory, a second process sends
every allocation through malloc: we report how many bytes the index adds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks import result
from benchmarks.allocated import allocated_bytes, counting
from benchmarks.prefix_indexes import (
    ESTIMATED_BYTES_PER_PAGE,
    NAMES,
    PrefixIndex,
    Prompt,
    make,
    newcomer_of,
)
from benchmarks.random_servers import rotated
from benchmarks.unbacked import FAMILY
from cachetree import Location
from cachetree.tree import page_hashes

PAGE = FAMILY.page_size
FAR = Location("tcp://far:1")
EVICTED_PAGES = 256
"""Number of pages to evict at once: 16K tokens."""


class Workload:
    """Prompts from a fixed seed. The same number of pages gives the same prompts."""

    def __init__(self, num_pages: int, num_samples: int) -> None:
        self._random = np.random.default_rng(0)
        self._all: list[np.ndarray] = []
        self.num_pages = 0
        while self.num_pages < num_pages:
            self._all.append(self._next())
        self.num_cached = len(self._all)
        """Number of cached prompts. The later prompts in `_all` are for inserts."""
        pages_each = num_pages // self.num_cached
        self.num_inserts = min(num_samples, max(10, self.num_cached // 4))
        self.num_evictions = min(num_samples, max(10, num_pages // 4 // EVICTED_PAGES))
        self.num_reserved_pages = self.num_pages + self.num_inserts * 2 * pages_each
        self.cached_pages = self.num_pages
        self._all += [self._next() for _ in range(self.num_inserts)]

    def _next(self) -> np.ndarray:
        num_tokens = int(self._random.integers(8192, 32769))
        head = np.empty(0, np.uint16)
        if self._all:
            earlier = self._all[self._random.integers(len(self._all))]
            cut = int(len(earlier) * self._random.uniform(0, 0.8)) // PAGE * PAGE
            head = earlier[: min(cut, num_tokens)]
        self.num_pages += num_tokens // PAGE - len(head) // PAGE
        return np.concatenate([head, self._tokens(num_tokens - len(head))])

    def _tokens(self, num: int) -> np.ndarray:
        return self._random.integers(0, 32000, num, dtype=np.uint16)

    def cached(self) -> Iterator[Prompt]:
        return (prompt_of(tokens) for tokens in self._all[: self.num_cached])

    def to_insert(self) -> Iterator[Prompt]:
        return (prompt_of(tokens) for tokens in self._all[self.num_cached :])

    def questions(self, kind: str, num: int) -> Iterator[Prompt]:
        for _ in range(num):
            tokens = self._all[self._random.integers(self.num_cached)]
            if kind == "partial":
                cut = int(len(tokens) * self._random.uniform(0.2, 0.8))
                tokens = np.concatenate([tokens[:cut], self._tokens(len(tokens) - cut)])
            elif kind == "miss":
                tokens = self._tokens(len(tokens))
            yield prompt_of(tokens)


def prompt_of(tokens: np.ndarray) -> Prompt:
    tokens = tokens[: len(tokens) // PAGE * PAGE]
    ids = array("q", tokens.astype(np.int64).tobytes())
    return Prompt(ids, page_hashes(ids, PAGE))


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Run a function; return its CPU microseconds in this thread, and its result."""
    begun_at_ns = time.thread_time_ns()
    result = run()
    return (time.thread_time_ns() - begun_at_ns) / 1000, result


def bytes_per_page(name: str, num_models: int, num_pages: int, num_samples: int) -> float:
    """Return the bytes that contender `name` allocates per cached page and model. Call it in the
    process that `counting` starts."""
    workload = Workload(num_pages, num_samples)
    # Fill caches of code that runs for the first time.
    for prompt in workload.questions("miss", 3):
        make(name, 1, 10_000).insert(0, prompt)
    gc.collect()
    before = allocated_bytes()
    index = make(name, num_models, workload.num_reserved_pages)
    for prompt in workload.cached():
        for model in range(num_models):
            index.insert(model, prompt)
    del prompt
    gc.collect()
    return (allocated_bytes() - before) / workload.cached_pages / num_models


Times = dict[str, dict[str, list[float]]]
"""Microseconds by operation and contender."""


def measure(names: list[str], num_models: int, workload: Workload, num_samples: int) -> Times:
    indexes = {name: make(name, num_models, workload.num_reserved_pages) for name in names}
    for prompt in workload.cached():
        for index in indexes.values():
            for model in range(num_models):
                index.insert(model, prompt)
    clock_us = statistics.median(timed(lambda: None)[0] for _ in range(1000))
    times: Times = {}

    def race(operation: str, turn: int, run: Callable[[PrefixIndex], Any]) -> dict[str, Any]:
        answers = {}
        for name in rotated(names, turn):
            spent_us, answers[name] = timed(lambda index=indexes[name]: run(index))
            times.setdefault(operation, {}).setdefault(name, []).append(spent_us - clock_us)
        return answers

    gc.collect()
    gc.disable()
    for kind in ("full", "partial", "miss"):
        for turn, prompt in enumerate(workload.questions(kind, num_samples)):
            answers = race(f"match {kind}", turn, lambda index, it=prompt: index.match(it))
            lengths = {name: tuple(indexes[name].lengths(answers[name])) for name in names}
            assert len(set(lengths.values())) == 1, f"the contenders disagree: {lengths}"
            spent_us, _ = timed(lambda it=prompt: page_hashes(it.tokens, PAGE))
            times.setdefault("hashing", {}).setdefault("page_hashes", []).append(spent_us)
    for turn, prompt in enumerate(workload.to_insert()):
        model = turn % num_models
        had = race("insert", turn, lambda index, it=prompt, m=model: index.insert(m, it))
        assert len(set(had.values())) == 1, f"the contenders had {had}"
        for other in range(num_models):
            if other != model:
                for index in indexes.values():
                    index.insert(other, prompt)
    evict(indexes, workload, times, clock_us)
    gc.enable()
    return times


def evict(
    indexes: dict[str, PrefixIndex], workload: Workload, times: Times, clock_us: float
) -> None:
    """Time evictions. A call counts only if it evicted pages: our tree evicts only once its budget
    is full."""
    for name, index in indexes.items():
        spent = times.setdefault("evict", {}).setdefault(name, [])
        for seed in range(100 * workload.num_evictions):
            newcomer = newcomer_of(EVICTED_PAGES, seed)
            spent_us, num_pages = timed(lambda it=index, new=newcomer: it.evict(new))
            index.settle()
            if num_pages:
                spent.append(spent_us - clock_us)
            if len(spent) == workload.num_evictions:
                break


def summary(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50_us": round(float(p50), 2), "p99_us": round(float(p99), 2), "n": len(values)}


def run(
    num_pages: int, num_models: int, args: argparse.Namespace, memory: ProcessPoolExecutor
) -> Iterator[dict[str, Any]]:
    """Measure all indexes that fit into memory, and yield a row for each."""
    workload = Workload(num_pages, args.samples)
    limit = args.memory_gib * 2**30 / num_models / num_pages
    names = [name for name in NAMES if ESTIMATED_BYTES_PER_PAGE.get(name, 250) <= limit]
    asked = (num_models, num_pages, args.samples)
    index_bytes_of = {name: memory.submit(bytes_per_page, name, *asked).result() for name in names}
    times = measure(names, num_models, workload, args.samples)
    hashing = summary(times.pop("hashing")["page_hashes"])
    for name in names:
        yield {
            "pages": num_pages,
            "models": num_models,
            "name": name,
            "times": {operation: summary(of[name]) for operation, of in times.items()},
            "bytes_per_page_and_model": round(index_bytes_of[name], 1),
            "hashing": hashing,
        }


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--pages", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--models", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--memory-gib", type=float, default=6)
    args = parser.parse_args()
    environment = result.here()
    with counting() as memory:
        rows = [
            row
            for pages in args.pages
            for models in args.models
            for row in run(pages, models, args, memory)
        ]
    result.write("tree", {"page_size": PAGE, "rows": rows}, environment, args.json)


if __name__ == "__main__":
    main()
