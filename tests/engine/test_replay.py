"""Prefix tokens of some rows of a batch, as a batch of their own."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from cachetree import Span
from sglang_droidspeak.engine.replay import _extending


def test_embeddings_of_other_rows_are_not_taken_along() -> None:
    """SGLang batches who brings embeddings for some tokens with who has tokens alone."""
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
