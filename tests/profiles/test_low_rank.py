"""Refreshing in low rank gives what the receiver's own projection of the sender's E gives."""

from __future__ import annotations

import pytest
import torch
from low_rank_factors import AdapterFactors, Factors, change, refresh
from rounding import assert_differ_by_rounding
from shipped import DATA, WEIGHTS

from cachetree.ids import EMPTY_SPAN
from profiles.compute.layered import LayeredModel
from profiles.compute.models import ModelSource, load_pair
from profiles.oracle import partial_prefill, prefill
from tools.pairs.questions import read_documents

BASE = WEIGHTS / "foundation"
PAIRS = [
    ("sender_lora", "receiver_lora"),
    ("slim_lora", "tables_lora"),
    ("slim_lora", None),
    (None, "slim_lora"),
]


def factors(name: str | None, layer: int, projection: str) -> Factors | None:
    return None if name is None else AdapterFactors(WEIGHTS / name).of(layer, projection)


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_every_layer_is_the_oracles(sender: str | None, receiver: str | None) -> None:
    theirs, ours = (
        ModelSource(path=BASE, adapter=None if it is None else WEIGHTS / it)
        for it in (sender, receiver)
    )
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "cache_dir": None}
    pair = load_pair(theirs, ours, **options)
    prefix = torch.tensor([read_documents(DATA / "train.jsonl", pair.tokenizer)[0].prefix])
    sent = prefill(pair.sender, prefix)
    layers = range(pair.num_layers)
    expected = partial_prefill(pair.receiver, pair.sender, prefix, EMPTY_SPAN, refreshed=layers)
    positions = torch.arange(prefix.shape[1])[None]
    rotary = pair.receiver.model.rotary_emb(sent.e[0], position_ids=positions)
    moved = 0.0
    for layer in layers:
        with torch.no_grad():
            x = LayeredModel(pair.receiver).layers[layer].input_layernorm(sent.e[layer])
        changes = [
            change(factors(sender, layer, it), factors(receiver, layer, it))
            for it in ("k_proj", "v_proj")
        ]
        k, v = (None if it is None else it.expand(it.reduce(x)) for it in changes)
        keys, values = refresh(sent.kv[layer], k, v, rotary)
        for got, wanted in zip((keys, values), expected[layer], strict=True):
            assert_differ_by_rounding(got, wanted, terms=x.shape[-1])
        moved += float((values - sent.kv[layer][1]).abs().max())
    assert moved > 0.1, "the adapters change nothing: what is compared?"


def test_adapters_that_share_a_need_its_rank_alone() -> None:
    torch.manual_seed(0)
    a, x = torch.randn(4, 32), torch.randn(1, 7, 32)
    ours, theirs = Factors(a, torch.randn(16, 4)), Factors(a.clone(), torch.randn(16, 4))
    shared = change(theirs, ours)
    assert shared is not None and shared.a.shape == (4, 32)
    apart = change(Factors(a + 1e-6, theirs.b), ours)
    assert apart is not None and apart.a.shape == (8, 32)
    expected = x @ (ours.b @ ours.a - theirs.b @ theirs.a).T
    for found in (shared, apart):
        assert_differ_by_rounding(found.expand(found.reduce(x)), expected, terms=32)


def test_what_neither_adapter_touches_stays() -> None:
    assert change(None, None) is None
    kv = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    rotary = torch.randn(1, 7, 8), torch.randn(1, 7, 8)
    assert refresh(kv, None, None, rotary) == kv
    assert AdapterFactors(WEIGHTS / "slim_lora").of(0, "k_proj") is None
