"""E per slot on a device. Writes inside a CUDA graph can be captured, and writes around a forward
do not make the host wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from virtual_cuda import VirtualCuda

from cachetree.ids import Span
from sglang_droidspeak.store.e_pool import EPool

HIDDEN, SLOTS = 64, 64


class Stack:
    """A stack of layers that passes E to callbacks."""

    def __init__(self) -> None:
        self.callbacks: dict[int, list] = {}

    def on_e(self, layer: int, callback) -> None:
        self.callbacks.setdefault(layer, []).append(callback)

    def forward(self, slots: torch.Tensor, e: dict[int, torch.Tensor], **batch: bool) -> None:
        forward_batch = SimpleNamespace(out_cache_loc=slots, **batch)
        for layer, value in e.items():
            for callback in self.callbacks.get(layer, ()):
                callback(forward_batch, value)


@pytest.fixture
def pool(cuda: VirtualCuda) -> tuple[EPool, Stack]:
    runner = SimpleNamespace(dtype=torch.float32, device="cuda")
    pool, stack = EPool((1, 3), SLOTS, Span(0, HIDDEN), runner), Stack()
    pool.capture_from(stack)
    return pool, stack


def test_e_is_written_inside_a_cuda_graph(cuda, pool):
    e_pool, stack = pool
    slots = torch.tensor([5, 6, 9], device="cuda")
    e = {layer: torch.randn(8, HIDDEN).to("cuda") for layer in range(4)}
    with cuda.capturing():
        stack.forward(slots, e)
    for layer in (1, 3):
        assert torch.equal(e_pool.e[layer][slots].cpu(), e[layer][:3].cpu())
    assert e_pool.valid.cpu().nonzero().flatten().tolist() == [5, 6, 9]


def test_each_rank_keeps_its_columns_and_all_of_them_e(cuda):
    runner = SimpleNamespace(dtype=torch.bfloat16, device="cuda")
    slots, e = torch.tensor([5, 6, 9], device="cuda"), torch.randn(8, HIDDEN).bfloat16()
    stored, num_bytes = [], []
    for columns in (Span(0, HIDDEN), Span(0, HIDDEN // 2), Span(HIDDEN // 2, HIDDEN)):
        rank, stack = EPool((1, 3), SLOTS, columns, runner), Stack()
        rank.capture_from(stack)
        stack.forward(slots, {layer: e.to("cuda") for layer in (1, 3)})
        num_bytes.append(sum(rows.nbytes for rows in rank.e.values()))
        stored.append([rank.e[layer][slots].cpu() for layer in (1, 3)])
    assert num_bytes == [2 * SLOTS * HIDDEN * 2, 2 * SLOTS * HIDDEN, 2 * SLOTS * HIDDEN]
    for whole, first, second in zip(*stored, strict=True):
        assert torch.equal(whole, e[:3])
        assert torch.equal(torch.cat([first, second], 1), whole)


def test_e_of_what_was_copied_is_taken_over_but_where_layers_have_run(pool):
    e_pool, stack = pool
    source, slots = (torch.arange(at, at + 4, device="cuda") for at in (0, 8))
    e = {layer: torch.full((4, HIDDEN), float(layer), device="cuda") for layer in (1, 3)}
    stack.forward(source[:2], e)
    stack.forward(slots, dict.fromkeys((1, 3), torch.zeros(4, HIDDEN, device="cuda")))
    e_pool.invalidate(slots)
    e_pool.adopt(source, slots, Span(0, 2))
    assert [e_pool.e[layer][9].unique().item() for layer in (1, 3)] == [0.0, 3.0]
    assert e_pool.valid[slots].tolist() == [True, True, False, False]


@pytest.mark.parametrize("has_own_e", [False, True])
def test_a_partial_prefill_writes_only_its_own_models_e_and_marks_none(pool, has_own_e):
    e_pool, stack = pool
    slots = torch.arange(4, device="cuda")
    ones = dict.fromkeys((1, 3), torch.ones(4, HIDDEN, device="cuda"))
    stack.forward(slots, ones, has_own_e=has_own_e)
    assert [e_pool.e[layer][2].unique().item() for layer in (1, 3)] == [float(has_own_e)] * 2
    assert not e_pool.valid.cpu().any()


def test_slots_lose_their_e_without_a_wait(cuda, pool):
    e_pool, stack = pool
    slots = torch.arange(16, device="cuda")
    stack.forward(slots, {3: torch.zeros(16, HIDDEN, device="cuda")})
    cuda.stalls.clear()
    e_pool.invalidate(slots[4:8])
    assert not cuda.stalls
    assert e_pool.num_pages_without(slots, 4) == 2
