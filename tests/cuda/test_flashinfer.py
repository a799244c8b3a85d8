"""A block recomputed through SGLang's FlashInfer backend, with FlashInfer's own executable
references in place of its kernels: what is planned and asked for is the right attention.

The references compute in bfloat16, so tokens agree with the oracle to its precision.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import flashinfer
import pytest
import torch
from engine_on_cuda import PAGE, PEER, Part, fork, land, load, on_device, stored
from flashinfer.trace.templates.attention import gqa_paged_prefill_trace, gqa_ragged_prefill_trace
from flashinfer.trace.templates.cascade import merge_state_trace
from sglang.srt.environ import envs
from sglang.srt.layers.attention import flashinfer_backend
from test_families_on_cuda import model_of
from torch.utils._python_dispatch import _disable_current_modes
from virtual_cuda import VirtualCuda

from benchmarks.oracle import partial_prefill, prefill
from cachetree.ids import Kind, Span, Step
from profiles.random_models import random_prompt, shape, write_models

BLOCK = Span(1, 4)
NUM_PREFIX = 4 * PAGE
"""Number of prefix tokens, more than one forward takes: the second forward attends over the first
one's KV."""
TOKENS = random_prompt(NUM_PREFIX + 5, seed=1)
BFLOAT16 = 0.02


def here(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [it.cpu() for it in tensors]


class Wrapper:
    """Common part of FlashInfer's wrappers; calls must fit the real ones."""

    real: Any
    is_cuda_graph_enabled = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inspect.signature(self.real.__init__).bind(self, *args, **kwargs)

    def begin_forward(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(self.real.plan).bind(self, *args, **kwargs)
        self.plan = SimpleNamespace(**bound.arguments)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bound = inspect.signature(self.real.forward_return_lse).bind(self, *args, **kwargs)
        asked = {"causal": False, "sm_scale": None, **bound.arguments}
        with _disable_current_modes():  # The reference's loops are of no interest to the device.
            out, lse = self.compute(SimpleNamespace(**asked))
        return out.to("cuda", torch.float32), lse.to("cuda")

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward_return_lse(*args, **kwargs)[0]


class Ragged(Wrapper):
    real = flashinfer.BatchPrefillWithRaggedKVCacheWrapper

    def compute(self, call: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        assert call.causal
        qo, kv = here(self.plan.qo_indptr, self.plan.kv_indptr)
        return gqa_ragged_prefill_trace.reference(
            *here(call.q, call.k, call.v), qo, kv, call.sm_scale
        )


class Paged(Wrapper):
    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper

    def compute(self, call: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.plan.page_size == 1
        qo, kv, indices, last = here(
            self.plan.qo_indptr,
            self.plan.paged_kv_indptr,
            self.plan.paged_kv_indices,
            self.plan.paged_kv_last_page_len,
        )
        assert set(last.tolist()) == {1}
        if not call.causal:
            # The reference knows causal attention alone: as queries of one token it sees all keys.
            spans = [
                indices[kv[at] : kv[at + 1]]
                for at in range(len(qo) - 1)
                for _ in range(int(qo[at + 1] - qo[at]))
            ]
            qo = torch.arange(len(spans) + 1)
            kv = torch.tensor([0, *(len(of) for of in spans)]).cumsum(0)
            indices = torch.cat(spans)
        keys, values = (of[:, None] for of in here(*call.paged_kv_cache))
        (q,) = here(call.q)
        return gqa_paged_prefill_trace.reference(q, keys, values, qo, kv, indices, call.sm_scale)


class Decode(Wrapper):
    real = flashinfer.BatchDecodeWithPagedKVCacheWrapper


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = merge_state_trace.reference(*here(v_a, s_a, v_b, s_b))
    return out.to("cuda", torch.float32), lse.to("cuda")


def pack(runner: Any, _plan: Any, *, req_pool_indices, seq_lens, indptr, out, **_: Any) -> None:
    """Write the slots of each request one behind the other. Replaces SGLang's kernel."""
    table = runner.req_to_token_pool.req_to_token
    edges = indptr.tolist()
    pairs = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for at, (row, length) in enumerate(pairs):
        out[edges[at] : edges[at + 1]] = table[row, :length]


def load_for_flashinfer(model: Path) -> Any:
    runner = load(model)
    runner.kv_index_translator.pack_read_stream = partial(pack, runner)
    envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.set(4096)  # Nobody uses it, and its bytes are watched.
    return runner


NAMES = {
    "BatchPrefillWithRaggedKVCacheWrapper": Ragged,
    "BatchPrefillWithPagedKVCacheWrapper": Paged,
    "BatchDecodeWithPagedKVCacheWrapper": Decode,
    "_safe_merge_state": merge_state,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    config = shape("llama", layers=5, hidden=64, heads=2, kv_heads=1)
    sender, receiver = write_models(tmp_path_factory.mktemp("pair"), config, ["s", "r"])
    return sender, receiver


def test_a_block_equals_the_oracle(pair):
    differences = fork(partial(play, *pair), list[float])
    assert differences == pytest.approx([0.0] * 5, abs=BFLOAT16)


def play(sender: Path, receiver: Path) -> list[float]:
    """Return, for each layer, how far the prefix's KV is from the oracle's."""
    ids = torch.tensor([TOKENS[:NUM_PREFIX]])
    theirs = prefill(model_of(sender), ids)
    expected = partial_prefill(model_of(receiver), model_of(sender), ids, BLOCK)
    values = {Step(Kind.E, at): e[0] for at, e in enumerate(theirs.e)}
    values |= {Step(Kind.KV, at): stored(kv) for at, kv in enumerate(theirs.kv)}
    cuda = VirtualCuda()
    with (
        patch.multiple(flashinfer_backend, create=True, **NAMES),
        on_device(load_for_flashinfer(receiver), receiver, (1,), cuda, "flashinfer") as engine,
    ):
        slots = engine.slots(3 * PAGE, 5 * PAGE)
        request = engine.loading(slots[:NUM_PREFIX], BLOCK, cuda.page_locked(1 << 18), PEER)
        land(request.source.staging, {step: values[step] for step in request.plan.steps})
        outcomes = engine.run_with([request], Part(TOKENS, slots, NUM_PREFIX))
        assert outcomes == ["reused"]
        distances = engine.differences(slots[:NUM_PREFIX], [stored(kv) for kv in expected])
        engine.close()
    return distances


def test_a_plan_reads_its_lengths_back_before_it_writes_its_workspace():
    """The next plan's page-locked memory needs no fence of ours: by then, the stream has finished
    reading it."""
    source = inspect.getsource(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan)
    assert (
        0 < source.index('qo_indptr.to("cpu")') < source.index("_pin_memory_int_workspace_buffer")
    )
