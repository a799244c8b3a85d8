"""The page on break-even computes with the same formulas by which a server decides."""

from __future__ import annotations

import pytest

from cachetree import ModelId, Plan, Span
from cachetree.planning import Costs, Link, PrefillCost, times_of
from examples.break_even import Pair

PAGE = 16
PAIRS = [Pair(), Pair(tokens_per_s=40_000), Pair(block=1), Pair(block=31, kv_heads=1, head_dim=64)]


def predicted_s(pair: Pair, link: float) -> float:
    """Predict the seconds of one token as a server with these speeds, without fixed costs."""
    plan = Plan(
        sender=ModelId("s"),
        receiver=ModelId("r"),
        location="tcp://127.0.0.1:1",
        pages=Span(0, 1),
        block=Span(1, 1 + pair.block),
        num_layers=pair.layers,
    )
    costs = Costs(
        kv_page_bytes=PAGE * pair.kv_bytes // (pair.layers - pair.block),
        e_page_bytes=PAGE * pair.e_bytes,
        recompute=PrefillCost(token_s=pair.full_s / pair.layers, context_s=0.0),
        links={plan.location: Link(byte_s=1 / link)},
    )
    seconds = times_of(plan, PAGE, costs).ttft_s
    assert seconds is not None
    return seconds / PAGE


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("link", [1e8, 1.25e9, 1e11])
def test_reuse_takes_what_a_server_predicts(pair, link):
    assert pair.reuse_s(link) == pytest.approx(predicted_s(pair, link))


@pytest.mark.parametrize("pair", PAIRS)
def test_at_break_even_both_take_equally_long(pair):
    assert predicted_s(pair, pair.break_even()) == pytest.approx(pair.full_s)
    assert predicted_s(pair, 1.01 * pair.break_even()) < pair.full_s
