"""Two parts of the GPU benchmark: E in a CUDA graph, and copies of KV from host memory into slots.

`captured` counts rows of E that replays of a graph write wrongly. `pinned` checks the copied bytes
before it reports a time. Both run the product's code.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from cachetree import Span
from cachetree.checkpoint import Codec
from sglang_droidspeak.store.e_pool import EPool
from sglang_droidspeak.store.rows import Coding, DeviceRows, ServerPool

HEADS, HEAD_DIM, HIDDEN, LAYERS = 8, 128, 4096, 3
"""Sizes of an 8B model, and the number of loaded layers. The model's KV in bfloat16 has 4 KiB per
token and layer."""
PAGE = 64
REPEATS = 20


class Stack:
    """A stand-in for a model's layers, which passes E to callbacks."""

    def on_e(self, _layer: int, callback: Callable[..., None]) -> None:
        self.callbacks = [*getattr(self, "callbacks", ()), callback]

    def tell(self, slots: torch.Tensor, e: torch.Tensor) -> None:
        for callback in self.callbacks:
            callback(SimpleNamespace(out_cache_loc=slots), e)


def captured(num_tokens: int) -> Iterator[dict[str, Any]]:
    runner = SimpleNamespace(dtype=torch.bfloat16, device="cuda")
    pool, stack = EPool((1,), 2 * num_tokens, Span(0, HIDDEN), runner), Stack()
    pool.capture_from(stack)
    slots = torch.arange(num_tokens, device="cuda")
    e = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    stack.tell(slots, e)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stack.tell(slots, e)
    torch.cuda.synchronize()  # torch's sanitizer treats captured work as work that ran.
    num_wrong = 0
    for shift in (0, num_tokens):
        slots.copy_(torch.arange(num_tokens) + shift)
        e.copy_(torch.randn(num_tokens, HIDDEN))
        pool.invalidate(slots)
        graph.replay()
        num_wrong += int((pool.e[1][slots] != e).any(1).sum() + (~pool.valid[slots]).sum())
    yield {"wrong_rows": num_wrong}


class Loads:
    """Random KV of some tokens in host memory, and a pool of slots to load it into. Each page has
    consecutive slots; pages are in random order."""

    def __init__(self, num_tokens: int, *, pin: bool) -> None:
        size = (2, LAYERS, 2 * num_tokens, HEADS, HEAD_DIM)
        self._buffers = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
        k, v = self._buffers
        self.pool = SimpleNamespace(k_buffer=[*k], v_buffer=[*v])
        self.coding = Coding(Codec.NONE, HEAD_DIM)
        self.page_tokens = min(PAGE, num_tokens)
        num_pages = num_tokens // self.page_tokens
        pages = self.page_tokens * torch.randperm(2 * num_pages)[:num_pages, None]
        self.slots = (pages + torch.arange(self.page_tokens)).flatten().to("cuda")
        size = (LAYERS, num_tokens, 2, HEADS, HEAD_DIM)
        self.host = torch.empty(size, dtype=torch.bfloat16, pin_memory=pin)
        rows = torch.randint(
            1 << 14, size[1:], dtype=torch.int16
        )  # As bfloat16 these bits are finite numbers.
        for layer, host in enumerate(self.host.view(torch.int16)):
            torch.add(rows, layer, out=host)
        self.num_bytes = self.host.nbytes

    def by(self, rows: Any) -> Callable[[int], object]:
        """Return a function of a layer's number. It copies by `rows`, on the current stream."""
        pool: Any = ServerPool(rows, None, self.coding, self.page_tokens)
        staged = [it.view(torch.uint8).flatten().numpy().data for it in self.host]
        return lambda layer: pool.load(layer, self.slots, [staged[layer]])

    def check(self, steps: Iterator[None]) -> None:
        """Do the work. Raise RuntimeError if the slots then differ from the KV in host memory."""
        self._buffers.zero_()
        for _ in steps:
            pass
        torch.cuda.synchronize()
        if not torch.equal(self._buffers[:, :, self.slots].movedim(0, 2).cpu(), self.host):
            raise RuntimeError("the slots do not hold what was staged")


def pinned(num_tokens: int) -> Iterator[dict[str, Any]]:
    speeds = {}
    for name, pin in (("pinned", True), ("pageable", False)):
        loads = Loads(num_tokens, pin=pin)
        way = loads.by(DeviceRows(loads.pool, loads.coding))
        work = plain(lambda way=way: [way(layer) for layer in range(LAYERS)])
        loads.check(work())
        (times_ms,) = turns_ms(work)
        speeds[f"{name}_gb_per_s"] = round(loads.num_bytes / statistics.median(times_ms) / 1e6, 2)
        yield speeds


Work = Callable[[], Iterator[None]]
"""Function that queues work on the current stream, timed from its first `yield` to its second."""


def plain(run: Callable[[], object]) -> Work:
    def steps() -> Iterator[None]:
        yield
        run()
        yield

    return steps


def turns_ms(*works: Work) -> list[list[float]]:
    """Milliseconds that each work takes in each turn, by CUDA events. The works take turns, because
    a device's clock drifts. The first turn is not counted."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS + 1):
        for work, taken in zip(works, times, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            steps = work()
            next(steps)
            start.record()
            next(steps)
            stop.record()
            stop.synchronize()
            taken.append(start.elapsed_time(stop))
            next(steps, None)
    return [taken[1:] for taken in times]
