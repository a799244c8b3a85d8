"""E in a CUDA graph, and copies from host memory into KV slots, by the product's own classes.

Each part checks the copied bytes before it reports a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from cachetree import Span
from cachetree.checkpoint import Codec
from sglang_droidspeak.request.load import Copies
from sglang_droidspeak.store.e_pool import EPool
from sglang_droidspeak.store.rows import Coding, DeviceRows

HEADS, HEAD_DIM, HIDDEN, LAYERS = 8, 128, 4096, 4
"""The KV of an 8B model in bfloat16: 4 KiB per token and layer."""
REPEATS = 20


class Stack:
    """A stand-in for a model's layers, which passes E to callbacks."""

    def on_e(self, _layer: int, callback: Callable[..., None]) -> None:
        self.callbacks = [*getattr(self, "callbacks", ()), callback]

    def tell(self, slots: torch.Tensor, e: torch.Tensor) -> None:
        for callback in self.callbacks:
            callback(SimpleNamespace(out_cache_loc=slots), e)


def captured(num_tokens: int) -> dict[str, Any]:
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
    return {"wrong_rows": num_wrong}


class Loads:
    """Staged KV of some tokens, and the pool that receives it."""

    def __init__(self, num_tokens: int, *, pin: bool) -> None:
        size = (LAYERS, 2 * num_tokens, HEADS, HEAD_DIM)
        buffers = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        self.pool = SimpleNamespace(k_buffer=list(buffers[0]), v_buffer=list(buffers[1]))
        self.rows = DeviceRows(self.pool, Coding(Codec.NONE, HEAD_DIM))
        self.slots = torch.arange(0, 2 * num_tokens, 2, device="cuda")
        self.host = torch.empty(
            num_tokens, 2, HEADS, HEAD_DIM, dtype=torch.bfloat16, pin_memory=pin
        ).normal_()
        self.num_bytes = LAYERS * self.host.nbytes

    def run(self) -> None:
        raw = self.host.view(torch.uint8).flatten().numpy().data
        for layer in range(LAYERS):
            self.rows.write_from(layer, self.slots, raw)

    def check(self) -> None:
        torch.cuda.synchronize()
        written = torch.stack([self.pool.k_buffer[-1], self.pool.v_buffer[-1]], 1)[self.slots]
        if not torch.equal(written.cpu(), self.host):
            raise RuntimeError("the slots do not hold what was staged")


def pinned(num_tokens: int) -> dict[str, Any]:
    speeds = {}
    for name, pin in (("pinned", True), ("pageable", False)):
        loads = Loads(num_tokens, pin=pin)
        (ms,) = medians_ms(loads.run)
        loads.check()
        speeds[f"{name}_gb_per_s"] = round(loads.num_bytes / ms / 1e6, 2)
    return speeds


def overlap(num_tokens: int) -> dict[str, Any]:
    loads = Loads(num_tokens, pin=True)
    matrix = torch.randn(num_tokens, num_tokens, dtype=torch.bfloat16, device="cuda")

    def compute() -> None:
        for _ in range(8):
            matrix @ matrix

    def both() -> None:
        copies = Copies(None, "cuda")
        copies.begin(0)
        with copies.on_stream():
            loads.run()
            copies.record(0, 0)
        compute()
        copies.forward_waits(0, 0)

    copies_ms, compute_ms, both_ms = medians_ms(loads.run, compute, both)
    loads.check()
    share = (copies_ms + compute_ms - both_ms) / min(copies_ms, compute_ms)
    names = ("copies_ms", "compute_ms", "both_ms", "overlap")
    values = (copies_ms, compute_ms, both_ms, share)
    return {name: round(it, 3) for name, it in zip(names, values, strict=True)}


def medians_ms(*works: Callable[[], None]) -> list[float]:
    """Median milliseconds of each work on the current stream, by CUDA events. The works take turns,
    because a device's clock drifts; the first turn is not counted."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS + 1):
        for work, taken in zip(works, times, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            stop.record()
            stop.synchronize()
            taken.append(start.elapsed_time(stop))
    return [statistics.median(taken[1:]) for taken in times]
