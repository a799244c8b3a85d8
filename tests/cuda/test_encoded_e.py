"""Encoded E is decoded on the device, and no thread waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from virtual_cuda import VirtualCuda

from cachetree.checkpoint import codecs
from cachetree.checkpoint.family import Codec, vector_bytes
from cachetree.ids import Kind, Location, ModelId, Span, Step
from cachetree.planning.plan import Plan
from sglang_droidspeak.request.source import Staged
from sglang_droidspeak.store.e_pool import EPool
from sglang_droidspeak.store.rows import Coding, DeviceRows, ServerPool

PAGE, HIDDEN, HEAD_DIM = 16, 128, 64
PLAN = Plan(
    sender=ModelId("peer"),
    receiver=ModelId("here"),
    location=Location("tcp://peer"),
    pages=Span(1, 3),
    block=Span(1, 3),
    num_layers=4,
)


@pytest.fixture(autouse=True)
def _unprepared() -> None:
    codecs._hadamard.cache_clear()


def a_pool(coding: Coding) -> DeviceRows:
    pool: Any = SimpleNamespace(k_buffer=[torch.empty(0, device="cuda")])
    return DeviceRows(pool, coding)


@pytest.mark.parametrize("codec", Codec)
def test_e_that_lies_in_two_runs_is_decoded_and_joined_on_the_device(codec):
    values, coding = torch.randn(2 * PAGE, HIDDEN), Coding(codec, HEAD_DIM)
    raw = bytearray(values.numel() // HEAD_DIM * vector_bytes(codec, HEAD_DIM, 4))
    coding.store(values, memoryview(raw))
    decoded = coding.load(memoryview(raw), torch.empty(0, HIDDEN))
    with VirtualCuda() as cuda:
        runner: Any = SimpleNamespace(dtype=torch.float32, device="cuda")
        e_pool = EPool((1,), PAGE, Span(0, HIDDEN), runner)
        memory = cuda.page_locked(len(raw))
        memory[:] = raw
        step, edge = Step(Kind.E, 1), 3 * len(raw) // 4
        staging: Any = SimpleNamespace(
            sizes={step: len(raw)}, views=lambda it: {step: [memory[:edge], memory[edge:]]}[it]
        )
        source = Staged(PLAN, ServerPool(a_pool(coding), e_pool, coding, PAGE), staging)
        cuda.stalls.clear()
        rows = torch.empty(PAGE, HIDDEN, device="cuda")
        source.read_e(1, Span(2 * PAGE, 3 * PAGE), rows)
        assert not cuda.stalls, cuda.stalls[0]
        assert rows.device.type == "cuda"
        assert torch.equal(rows.cpu(), decoded[PAGE:])


def test_a_ranks_columns_of_e_need_not_be_whole_heads():
    values = torch.randn(3, HEAD_DIM // 2)
    loaded = Coding(Codec.NONE, HEAD_DIM).load(memoryview(values.numpy()).cast("B"), values)
    assert torch.equal(loaded, values)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_two_streams_may_encode_and_decode(codec):
    """No fence orders the first encoding of an offload and the first decoding of a load."""
    values = torch.randn(4, HEAD_DIM)
    with VirtualCuda() as cuda:
        offloads, loads = torch.cuda.Stream(), torch.cuda.Stream()
        stored = codecs.encode(codec, values).pin_memory()
        with torch.cuda.stream(offloads):
            codecs.encode(codec, torch.zeros(4, HEAD_DIM, device="cuda"))
        with torch.cuda.stream(loads):
            received = stored.to("cuda", non_blocking=True)
            decoded = codecs.decode(codec, received, torch.float32)
        assert not cuda.races, cuda.races[0]
        assert torch.equal(decoded.cpu(), codecs.decode(codec, stored, torch.float32))
