"""E that comes encoded is decoded on the device, and nobody waits for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from virtual_cuda import VirtualCuda

from cachetree.checkpoint.family import Codec, vector_bytes
from cachetree.ids import Kind, Location, ModelId, Span, Step
from cachetree.planning.plan import Plan
from sglang_droidspeak.request.source import Staged
from sglang_droidspeak.store.e_pool import EPool
from sglang_droidspeak.store.rows import Coding, ServerPool

PAGE, HIDDEN, HEAD_DIM = 16, 128, 64
PLAN = Plan(
    sender=ModelId("peer"),
    receiver=ModelId("here"),
    location=Location("tcp://peer"),
    pages=Span(1, 3),
    block=Span(1, 3),
    num_layers=4,
)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_encoded_e_is_decoded_on_the_device(codec: Codec) -> None:
    values, coding = torch.randn(2 * PAGE, HIDDEN), Coding(codec, HEAD_DIM)
    raw = bytearray(values.numel() // HEAD_DIM * vector_bytes(codec, HEAD_DIM, 4))
    coding.store(values, memoryview(raw))
    decoded = coding.load([memoryview(raw)], torch.empty(0, HIDDEN))
    with VirtualCuda() as cuda:
        runner: Any = SimpleNamespace(dtype=torch.float32, device="cuda")
        e_pool = EPool((1,), PAGE, Span(0, HIDDEN), runner)
        memory = cuda.page_locked(len(raw))
        memory[:] = raw
        step, edge = Step(Kind.E, 1), 3 * len(raw) // 4
        staging: Any = SimpleNamespace(
            sizes={step: len(raw)}, views=lambda it: {step: [memory[:edge], memory[edge:]]}[it]
        )
        source = Staged(PLAN, ServerPool(None, e_pool, coding, PAGE), staging)  # type: ignore[arg-type]
        rows = source.e(1, Span(2 * PAGE, 3 * PAGE))
        assert not cuda.stalls, cuda.stalls[0]
        assert rows.device.type == "cuda"
        assert torch.equal(rows.cpu(), decoded[PAGE:])
