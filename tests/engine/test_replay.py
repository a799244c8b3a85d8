"""Prefix tokens of some rows of a batch, computed as a batch of their own."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.eplb import expert_distribution as experts

from cachetree import Span
from sglang_droidspeak.engine import replay
from sglang_droidspeak.engine.replay import _extending, prepared


def test_embeddings_of_other_rows_are_not_taken_along():
    """SGLang puts requests with embeddings for some tokens into a batch with requests that have
    tokens alone."""
    batch = SimpleNamespace(
        reqs=[
            SimpleNamespace(full_untruncated_fill_ids=[9] * 4),
            SimpleNamespace(full_untruncated_fill_ids=[5, 6, 7, 8]),
        ],
        req_pool_indices_cpu=torch.tensor([1, 2]),
        input_embeds=torch.ones(8, 3),
        replace_embeds=torch.ones(2, 3),
        replace_positions=torch.tensor([0, 1]),
    )
    table = torch.arange(12).view(3, 4)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=table))
    replay = _extending(batch, [(1, Span(1, 3))], runner)
    assert replay.input_ids.tolist() == [6, 7]
    assert replay.out_cache_loc.tolist() == [9, 10]
    assert replay.input_embeds is replay.replace_embeds is replay.replace_positions is None
    assert batch.input_embeds is not None, "SGLang's own batch is as it was"


def test_a_recording_of_experts_has_none_of_a_recompute(monkeypatch):
    """SGLang's models name the layer in which they are. No model does so here, and a recording
    would raise."""
    recorder: Any = object.__new__(experts._ExpertDistributionRecorderReal)
    recorder._disable_all, recorder._recording = False, True
    recorder._current_layer_idx = recorder._current_debug_name = experts.Withable()
    recorder._accumulator = SimpleNamespace(get_single_pass_gatherer_key=lambda _name: "primary")
    gatherer: Any = object.__new__(experts._SelectExpertsSinglePassGatherer)
    gatherer._expert_location_metadata = SimpleNamespace(num_physical_experts=4)
    gatherer._data = torch.zeros(2, 4, dtype=torch.int)
    recorder._single_pass_gatherers = {"primary": gatherer}
    monkeypatch.setattr(replay, "get_global_expert_distribution_recorder", lambda: recorder)
    model = SimpleNamespace(override=lambda **_: nullcontext())
    monkeypatch.setattr(replay, "get_model", lambda: model)
    runner: Any = SimpleNamespace(
        model=SimpleNamespace(shared_experts_config=None),
        _prepare_eager_forward_batch=lambda _batch: None,
    )
    attention = SimpleNamespace(init_forward_metadata=lambda _batch: None)
    batch: Any = SimpleNamespace(moe_num_token_non_padded=None)
    chosen = torch.zeros(3, 2, dtype=torch.int32)
    with prepared(batch, runner, attention):
        recorder.on_select_experts(chosen)
    assert not gatherer._data.any()
    with recorder.with_current_layer(1):
        recorder.on_select_experts(chosen)
    assert gatherer._data.sum() == 6
