"""Loads and offloads run SGLang's copy kernels; codecs take no more memory than was counted."""

from __future__ import annotations

import inspect
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from virtual_cuda import IllegalAddress, Kernels, VirtualCuda

from cachetree.checkpoint import codecs
from cachetree.checkpoint.family import Codec, vector_bytes
from cachetree.ids import Kind, Span, Step
from sglang_droidspeak.request.load import Copies, Load, Loader
from sglang_droidspeak.store import rows as rows_module
from sglang_droidspeak.store.rows import (
    Coding,
    DeviceRows,
    KernelRows,
    ServerPool,
    rows_of,
    temporary_bytes,
)

HEADS, DIM, LAYERS, SLOTS = 2, 64, 3, 32
TOKEN_BYTES = 2 * HEADS * DIM * 2
STORED = torch.arange(12 * 2 * HEADS * DIM).bfloat16().view(12, 2, HEADS, DIM)


def a_pool(dim: int = DIM, codec: Codec = Codec.NONE) -> tuple[Any, ServerPool]:
    size = (LAYERS, SLOTS, HEADS, dim)
    k, v = (torch.randn(size).bfloat16().to("cuda") for _ in range(2))
    kv, coding = SimpleNamespace(k_buffer=[*k], v_buffer=[*v]), Coding(codec, dim)
    return kv, ServerPool(rows_of(kv, coding), None, coding, 4)  # type: ignore[arg-type]


def kv_of(kv: Any, layer: int, slots: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return torch.stack([it[layer][slots].cpu() for it in (kv.k_buffer, kv.v_buffer)], 1)


def test_stand_ins_have_the_kernels_parameters():
    from sglang_droidspeak.engine import transfer

    for name in transfer.__all__:
        ours = inspect.signature(getattr(Kernels, name)).parameters
        theirs = inspect.signature(getattr(transfer, name)).parameters
        assert [it for it in theirs if it in ours] == [it for it in ours if it != "self"]
        needed = {it.name for it in theirs.values() if it.default is inspect.Parameter.empty}
        assert needed <= ours.keys()


def test_load_of_one_run_is_one_kernel_and_allocates_nothing(cuda):
    kv, pool = a_pool()
    slots = torch.tensor([*range(8, 16), *range(3, 7)], device="cuda")
    memory = cuda.page_locked(12 * TOKEN_BYTES)
    memory[:] = STORED.view(torch.uint8).numpy().tobytes()
    cuda.allocations.clear()
    cuda.stalls.clear()
    assert pool.load(1, slots, [memory]) == memory.nbytes
    assert cuda.kernels == ["transfer_hicache_one_layer"]
    assert (cuda.allocations, cuda.stalls) == ([], [])
    assert torch.equal(kv_of(kv, 1, slots), STORED)
    assert not kv_of(kv, 0, slots).equal(STORED)


def test_load_in_parts_or_from_pageable_memory_fills_its_slots(cuda, monkeypatch):
    """A fetch without room in the staging uses pageable memory, which no kernel can read."""
    monkeypatch.setattr(KernelRows, "most_tokens", 5)
    kv, pool = a_pool()
    slots = torch.arange(20, 32, device="cuda")
    memory = cuda.page_locked(8 * TOKEN_BYTES)
    raw = STORED.view(torch.uint8).numpy().tobytes()
    memory[:] = raw[: memory.nbytes]
    pool.load(0, slots, [memory, memoryview(bytearray(raw[memory.nbytes :]))])
    assert len(cuda.kernels) == 2, "8 tokens, of which 5 fit one"
    assert torch.equal(kv_of(kv, 0, slots), STORED)


def test_kernel_that_reads_pageable_memory_fails(cuda):
    kv, _ = a_pool()
    place = torch.zeros(1, dtype=torch.int64, device="cuda")
    flat = kv.k_buffer[0].view(SLOTS, -1)
    host = torch.zeros(1, HEADS * DIM, dtype=torch.bfloat16)
    with pytest.raises(IllegalAddress):
        Kernels(cuda).transfer_hicache_one_layer(flat, flat, place, host, host, place)


@pytest.mark.parametrize("edges", [(12,), (4, 12)])
@pytest.mark.parametrize("is_kernel", [True, False])
def test_offload_is_one_kernel_for_each_run_of_all_layers(cuda, edges, is_kernel):
    kv, pool = a_pool()
    if not is_kernel:
        pool = ServerPool(DeviceRows(kv, pool.coding), None, pool.coding, 4)  # type: ignore[arg-type]
    slots = torch.tensor([*range(5), *range(16, 23)], device="cuda")
    torn = dict.fromkeys(range(LAYERS), (0, *edges)) | {2: (0, 12)}
    targets = {
        Step(Kind.KV, layer): [
            cuda.page_locked((stop - start) * TOKEN_BYTES) for start, stop in pairwise(of)
        ]
        for layer, of in torn.items()
    }
    cuda.stalls.clear()
    pool.store(targets, slots)
    for step, runs in targets.items():
        cuda.on_host(reads=runs)
        stored = torch.frombuffer(bytearray(b"".join(runs)), dtype=torch.bfloat16)
        assert torch.equal(stored.view_as(STORED), kv_of(kv, step.layer, slots))
    assert not cuda.races, cuda.races[0]
    assert [it.why for it in cuda.stalls if it.line] == ["synchronize"], "once for all layers"
    assert cuda.kernels == ["transfer_hicache_all_layer"] * (is_kernel * len(edges))


@pytest.mark.parametrize(("dim", "codec"), [(24, Codec.NONE), (DIM, Codec.INT8)])
def test_odd_rows_and_encoded_rows_are_copied_without_kernels(cuda, dim, codec):
    """The lanes of a kernel cannot share a row of 24 values a head."""
    kv, pool = a_pool(dim, codec)
    assert type(pool.rows) is DeviceRows
    slots = torch.arange(4, device="cuda")
    size = HEADS * 2 * (vector_bytes(codec, dim, 2) if codec is not Codec.NONE else 2 * dim)
    target = cuda.page_locked(4 * size)
    pool.store({Step(Kind.KV, layer): [target] for layer in range(LAYERS)}, slots)
    pool.load(0, slots + 8, [target])
    first, last = kv_of(kv, 0, slots + 8), kv_of(kv, LAYERS - 1, slots)
    torch.testing.assert_close(first, last, rtol=0, atol=0.05 * (codec is not Codec.NONE))
    assert cuda.kernels == []


# Streams.


class Staged:
    """A source with one page-locked row for each layer."""

    def __init__(self, cuda: VirtualCuda, pool: ServerPool, *, is_complete: bool) -> None:
        self.staging = SimpleNamespace(num_bytes=4 * TOKEN_BYTES, is_complete=is_complete)
        self._memory, self._pool = cuda.page_locked(4 * TOKEN_BYTES), pool
        self.streams: list[Any] = []

    def wait(self, _step: object) -> None:
        """Return at once: all bytes are there."""

    def copy(self, layer: int, _at: Span, slots: torch.Tensor) -> int:
        self.streams.append(torch.cuda.current_stream())
        return self._pool.load(layer, slots, [self._memory])


@pytest.mark.parametrize("is_complete", [True, False])
def test_batch_has_one_event_a_layer_and_is_timed_if_no_byte_is_missing(
    cuda, monkeypatch, is_complete
):
    forwards, events, timed = torch.cuda.Stream(priority=0), torch.cuda.Event, []

    def made(*, enable_timing: bool = False) -> Any:
        timed.append(enable_timing)
        return events()

    monkeypatch.setattr(torch.cuda, "Event", made)
    _, pool = a_pool()
    sources = [Staged(cuda, pool, is_complete=is_complete) for _ in range(2)]
    loader = Loader(LAYERS, Copies(forwards, "cuda"))
    slots, plan = torch.arange(4, device="cuda"), SimpleNamespace(block=Span(0, 0))
    loads = [
        Load(plan=plan, source=it, at=Span(0, 4), slots=slots)  # type: ignore[arg-type]
        for it in sources
    ]
    loader.finish(loader.start(loads))
    loader.close()
    assert timed.count(False) == LAYERS
    assert timed.count(True) == 2 * is_complete
    assert [it.copy_s for it in loads] == [0.0005 if is_complete else None] * 2
    (stream,) = {id(it): it for source in sources for it in source.streams}.values()
    assert stream.priority < forwards.priority, "a lower number goes first"


# The device's memory.


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_memory_of_codecs_is_what_was_counted(cuda, monkeypatch, codec):
    codecs._hadamard.cache_clear()
    for name in ("_LOADED_TOKENS", "_PIECE_TOKENS"):
        monkeypatch.setattr(rows_module, name, 16)
    monkeypatch.setattr(DeviceRows, "most_tokens", 16)
    _, pool = a_pool(codec=codec)
    slots, values = torch.arange(SLOTS, device="cuda"), 2 * HEADS * DIM
    e = torch.empty(SLOTS, values, dtype=torch.bfloat16, device="cuda")
    memory = cuda.page_locked(SLOTS * 2 * HEADS * vector_bytes(codec, DIM, 2))
    took = []
    for work in (
        lambda: pool.load(0, slots, [memory]),
        lambda: pool.coding.fill(e, [memory]),
        lambda: pool.rows.read(slots, [[memory]]),
    ):
        before = cuda.peak_bytes = cuda.live_bytes
        work()
        took.append(cuda.peak_bytes - before)
    counted = temporary_bytes(codec, torch.bfloat16, values, values)
    assert sum(took) <= counted <= 1.2 * sum(took), (took, counted)
