"""Measure how much copies of loaded layers slow down the recompute that runs beside them.

One layer of an 8B model is computed while three are loaded, as if a quarter of a model is
recomputed. The product's loader copies, in its own thread and on its own stream. The bytes arrive
once all kernels of the layer are launched: so copies have to share a device that is busy.

Physics: a layer of 8,192 tokens has 32 MiB of KV, which takes 0.7 ms at 48 GB/s. The computed layer
takes 4 TFLOP, about 7 ms. So three copies are shorter than the compute. They delay it only by the
multiprocessors and the memory bandwidth that they take from it. The ways to copy:

    scatter    a copy to the device, then two scatters: the product's way for encoded KV
    kernel     SGLang's HiCache kernel reads page-locked memory: the product's way for plain KV
    dma        SGLang's copies by the device's copy engines, page by page, with K and V stored apart
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu import copies
from benchmarks.gpu.copies import Loads, Work
from cachetree import Span, Step
from sglang_droidspeak.request.load import Copies, Load, Loader

WIDE = 14336
"""Width of the MLP of an 8B model."""
CHUNK = 8192
"""Tokens of one forward, as in SGLang's chunked prefill."""
GOAL_PERCENT = 5.0
"""Percent of the layer's time that copies may add, if they are shorter than the layer."""
WAYS = ("scatter", "kernel", "dma")
Way = Callable[[int], object]
"""Function that copies one layer of a `Loads` on the current stream."""


class Layer:
    """Kernels of one layer over all tokens, chunk by chunk, with random weights."""

    def __init__(self, num_tokens: int) -> None:
        self._kv_width = copies.HEADS * copies.HEAD_DIM
        hidden = copies.HIDDEN
        sizes = {
            "qkv": (hidden, hidden + 2 * self._kv_width),
            "out": (hidden, hidden),
            "gate_up": (hidden, 2 * WIDE),
            "down": (WIDE, hidden),
        }
        self._weights = {name: _random(*size) for name, size in sizes.items()}
        self._e = _random(num_tokens, hidden)
        self._k, self._v = (_random(num_tokens, self._kv_width) for _ in range(2))

    def run(self) -> None:
        for start in range(0, len(self._e), CHUNK):
            self._run_chunk(slice(start, start + CHUNK))

    def _run_chunk(self, at: slice) -> None:
        """Compute as SGLang with FlashInfer does: one attention over the prefix, and one over the
        chunk. SGLang merges both; here we add them up."""
        e = self._e[at]
        widths = (copies.HIDDEN, self._kv_width, self._kv_width)
        q, self._k[at], self._v[at] = (_normal(e) @ self._weights["qkv"]).split(widths, dim=1)
        attended = _attention(q, self._k[at], self._v[at], is_causal=True)
        if at.start:
            before = slice(0, at.start)
            attended = attended + _attention(q, self._k[before], self._v[before], is_causal=False)
        e = e + attended @ self._weights["out"]
        gate, up = (_normal(e) @ self._weights["gate_up"]).chunk(2, dim=1)
        self._out = e + (F.silu(gate) * up) @ self._weights["down"]


def _random(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device="cuda") / size[0] ** 0.5


def _normal(e: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(e, (e.shape[-1],))


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool
) -> torch.Tensor:
    """Compute attention of `[tokens, heads * head_dim]`. Queries have more heads than keys."""
    heads = [it.unflatten(1, (-1, copies.HEAD_DIM)).transpose(0, 1)[None] for it in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads, is_causal=is_causal, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


class Arriving:
    """Source of pages for the product's loader. All its bytes count as arrived once `arrive` is
    called."""

    def __init__(self, way: Way, num_bytes: int) -> None:
        self.staging = SimpleNamespace(num_bytes=num_bytes, is_complete=False)
        self._way, self._num_bytes = way, num_bytes
        self._is_there = threading.Event()

    def arrive(self) -> None:
        self._is_there.set()

    def wait(self, _step: Step) -> None:
        self._is_there.wait()

    def copy(self, layer: int, _at: Span, _slots: torch.Tensor) -> int:
        self._way(layer)
        return self._num_bytes // copies.LAYERS


def loaded(loader: Loader, loads: Loads, way: Way, compute: Callable[[], object]) -> Iterator[None]:
    """Work (`copies.Work`) that computes a layer while the loader copies the other layers."""
    source: Any = Arriving(way, loads.num_bytes)
    plan: Any = SimpleNamespace(block=Span(0, 0))
    load = Load(plan=plan, source=source, at=Span(0, len(loads.slots)), slots=loads.slots)
    index = loader.start([load])
    yield
    compute()
    source.arrive()
    loader.counter.set_consumer(index)
    for layer in range(copies.LAYERS):
        loader.counter.wait_until(layer)
    yield
    loader.finish(index)
    if not load.is_good:
        raise RuntimeError("a layer was not copied; its error is above")


def ways_of(loads: Loads) -> dict[str, Way]:
    """Return the ways of copying that this machine has, by name."""
    from sglang_droidspeak.store.rows import DeviceRows, KernelRows, rows_of

    ways: dict[str, Way] = {"scatter": loads.by(DeviceRows(loads.pool, loads.coding))}
    rows: Any = rows_of(loads.pool, loads.coding)
    if isinstance(rows, KernelRows):
        ways["kernel"] = loads.by(rows)
    with contextlib.suppress(ImportError):
        from sgl_kernel.kvcacheio import transfer_kv_direct

        apart = loads.host.transpose(1, 2).contiguous().pin_memory()
        places, slots = torch.arange(len(loads.slots)), loads.slots.cpu()

        def by_dma(layer: int) -> None:
            into = [loads.pool.k_buffer[layer], loads.pool.v_buffer[layer]]
            transfer_kv_direct([*apart[layer]], into, places, slots, loads.page_tokens)

        ways["dma"] = by_dma
    return ways


def overlap(num_tokens: int) -> Iterator[dict[str, Any]]:
    """Measure all ways of copying in turns, with three numbers of tokens: a quarter of
    `num_tokens`, `num_tokens`, and four times as many."""
    results: dict[str, Any] = {}
    loader = Loader(copies.LAYERS, Copies(None, "cuda"))
    for length in (num_tokens // 4, num_tokens, 4 * num_tokens):
        loads, layer = Loads(length, pin=True), Layer(length)
        ways = ways_of(loads)
        results |= {name: "not usable here" for name in WAYS if name not in ways}
        for way in ways.values():
            loads.check(loaded(loader, loads, way, lambda: None))
        for name, value in _measured(loader, loads, layer, ways).items():
            results[f"{length}_{name}"] = value
        yield results
        del loads, layer, ways, way  # The next number of tokens needs the memory.
    loader.close()


def _measured(
    loader: Loader, loads: Loads, layer: Layer, ways: dict[str, Way]
) -> dict[str, float | str]:
    def work(way: Way, compute: Callable[[], object]) -> Work:
        return lambda: loaded(loader, loads, way, compute)

    works = [work(way, compute) for way in ways.values() for compute in (lambda: None, layer.run)]
    compute_ms, *by_way = copies.turns_ms(copies.plain(layer.run), *works)
    computed = statistics.median(compute_ms)
    results: dict[str, float | str] = {"compute_ms": round(computed, 3)}
    for name, alone_ms, both_ms in zip(ways, by_way[::2], by_way[1::2], strict=True):
        copies_ms = statistics.median(alone_ms)
        # A device's clock drifts: each turn's copies are compared with the same turn's compute.
        pairs = zip(both_ms, compute_ms, strict=True)
        added_ms = statistics.median(both - alone for both, alone in pairs)
        percent = 100 * added_ms / computed
        goal = "met" if percent <= GOAL_PERCENT else "missed"
        results |= {
            f"{name}_gb_per_s": round(loads.num_bytes / copies_ms / 1e6, 2),
            f"{name}_copies_ms": round(copies_ms, 3),
            f"{name}_exposed_ms_per_layer": round(added_ms / copies.LAYERS, 4),
            f"{name}_added_percent": round(percent, 2),
            f"{name}_goal": goal if copies_ms < computed else "copies take longer than the compute",
        }
    return results
