"""Plans and spans: every layer is loaded or recomputed exactly once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetree.ids import LOCAL, Kind, ModelId, Span, Step
from cachetree.planning.plan import Plan

S, R = ModelId("s"), ModelId("r")


def plan(block: Span, num_layers: int = 6, sender: ModelId = S, **more: Any) -> Plan:
    return Plan(
        sender=sender,
        receiver=R,
        location=LOCAL,
        pages=Span(0, 4),
        block=block,
        num_layers=num_layers,
        **more,
    )


def test_steps_name_e_first_and_then_kv_in_layer_order():
    assert plan(Span(2, 4)).steps == (
        Step(Kind.E, 2),
        Step(Kind.KV, 0),
        Step(Kind.KV, 1),
        Step(Kind.KV, 4),
        Step(Kind.KV, 5),
    )


@pytest.mark.parametrize(
    ("block", "transition_layers", "is_exact"),
    [
        (Span(0, 0), (), False),
        (Span(3, 3), (), False),
        (Span(0, 3), (), False),
        (Span(3, 6), (3,), False),
        (Span(0, 6), (), True),
    ],
)
def test_plan_says_where_it_needs_e_and_whether_it_is_exact(block, transition_layers, is_exact):
    assert plan(block).transition_layers == transition_layers
    assert plan(block).is_exact is is_exact
    assert plan(block, sender=R).is_exact


@pytest.mark.parametrize(
    ("block", "first_difference", "is_exact"),
    [
        (Span(4, 6), 4, True),
        (Span(2, 6), 4, True),
        (Span(5, 6), 4, False),
        (Span(2, 5), 4, False),
        (Span(0, 0), 5, False),
        (Span(0, 0), 6, True),
        (Span(0, 0), 0, False),
    ],
)
def test_exact_from_the_first_layer_that_differs(block, first_difference, is_exact):
    assert plan(block, first_difference=first_difference).is_exact is is_exact
    assert not plan(block, first_difference=first_difference, is_lossy=True).is_exact


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_every_layer_is_loaded_or_recomputed_exactly_once(num_layers, one, two):
    start, stop = sorted((min(one, num_layers), min(two, num_layers)))
    made = plan(Span(start, stop), num_layers)
    assert sorted([*made.loaded_layers, *made.block]) == list(range(num_layers))
    assert [step.layer for step in made.steps if step.kind is Kind.KV] == list(made.loaded_layers)


def test_spans_are_half_open():
    span = Span(2, 5)
    assert (len(span), list(span)) == (3, [2, 3, 4])
    assert 2 in span and 5 not in span and "2" not in span
    for start, stop in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="start <= stop"):
            Span(start, stop)
