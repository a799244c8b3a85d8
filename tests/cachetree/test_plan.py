"""Plans and spans: every layer loaded or recomputed exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetree.ids import LOCAL, ModelId, Span
from cachetree.plan import Kind, Plan, Step

S, R = ModelId("s"), ModelId("r")


def plan(block: Span, num_layers: int = 6, sender: ModelId = S) -> Plan:
    return Plan(
        sender=sender,
        receiver=R,
        location=LOCAL,
        pages=Span(0, 4),
        block=block,
        num_layers=num_layers,
    )


def test_steps_name_e_first_and_then_kv_in_layer_order() -> None:
    assert plan(Span(2, 4)).steps == (
        Step(Kind.E, 2),
        Step(Kind.KV, 0),
        Step(Kind.KV, 1),
        Step(Kind.KV, 4),
        Step(Kind.KV, 5),
    )


@pytest.mark.parametrize(
    ("block", "transition_layer", "is_exact"),
    [
        (Span(0, 0), None, False),
        (Span(3, 3), None, False),
        (Span(0, 3), None, False),
        (Span(3, 6), 3, False),
        (Span(0, 6), None, True),
    ],
)
def test_where_e_is_needed_and_what_is_exact(
    block: Span, transition_layer: int | None, is_exact: bool
) -> None:
    assert plan(block).transition_layer == transition_layer
    assert plan(block).is_exact is is_exact
    assert plan(block, sender=R).is_exact


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_every_layer_is_loaded_or_recomputed_exactly_once(
    num_layers: int, one: int, two: int
) -> None:
    start, stop = sorted((min(one, num_layers), min(two, num_layers)))
    it = plan(Span(start, stop), num_layers)
    assert sorted([*it.loaded_layers, *it.block]) == list(range(num_layers))
    assert [step.layer for step in it.steps if step.kind is Kind.KV] == list(it.loaded_layers)


def test_spans_are_half_open() -> None:
    span = Span(2, 5)
    assert (len(span), list(span)) == (3, [2, 3, 4])
    assert 2 in span and 5 not in span and "2" not in span
    assert span.intersection(Span(4, 9)) == Span(4, 5)
    assert len(span.intersection(Span(7, 9))) == 0
    for start, stop in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="start <= stop"):
            Span(start, stop)
