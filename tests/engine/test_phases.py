"""The phases of a request: which follow on which, and what is held in them."""

from __future__ import annotations

from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standins import PAGE, PLAN, planned_as

from cachetree.ids import Span
from sglang_droidspeak.request.request import IllegalTransition, Phase, Request

SETTLED, SEEN, PLANNED, FETCHING, ARRIVING, READY, LOADING = Phase
FORTH = (SEEN, PLANNED, FETCHING, ARRIVING, READY, LOADING)
LEGAL = {
    *pairwise(FORTH),
    *((phase, SETTLED) for phase in FORTH),
    (FETCHING, PLANNED),  # Another rank has no memory for it.
    (ARRIVING, FETCHING),  # The rest comes slower than it did.
    (FETCHING, READY),
    (ARRIVING, LOADING),
    *((phase, phase) for phase in Phase),
}


class CountingSource:
    def __init__(self) -> None:
        self.num_released = 0
        self.staging = SimpleNamespace(num_landed_bytes=0)

    def release(self) -> None:
        self.num_released += 1


def request_in(phase: Phase) -> tuple[Request, CountingSource]:
    source: Any = CountingSource()
    it = Request(SimpleNamespace(rid="r1"))  # type: ignore[arg-type]
    if phase is SETTLED:
        it.settle()
    if phase >= PLANNED:
        it.take_up(planned_as(PLAN))
    if phase >= FETCHING:
        it.fetch(SimpleNamespace(of=lambda *_: source), None)  # type: ignore[arg-type]
    if phase >= ARRIVING:
        it.reach(ARRIVING)
    if phase >= READY:
        it.reach(READY)
    if phase >= LOADING:
        it.begin_load(Span(0, 4 * PAGE), torch.arange(4 * PAGE))
    assert it.phase is phase
    return it, source


@pytest.mark.parametrize(("before", "after"), product(Phase, Phase))
def test_what_does_not_follow_raises_and_changes_nothing(before: Phase, after: Phase) -> None:
    it, source = request_in(before)
    if (before, after) in LEGAL:
        it.reach(after)
        assert it.phase is after
        return
    with pytest.raises(IllegalTransition, match=f"r1: {before.name} to {after.name}"):
        it.reach(after)
    assert it.phase is before
    assert source.num_released == 0


@pytest.mark.parametrize("phase", Phase)
def test_who_settles_holds_no_source_and_released_it_once(phase: Phase) -> None:
    it, source = request_in(phase)
    for _ in range(2):
        it.settle()
    assert it.source is None
    assert source.num_released == (phase >= FETCHING)


def test_what_one_rank_cannot_hold_the_others_release() -> None:
    it, source = request_in(FETCHING)
    it.reach(PLANNED)
    assert (it.source, source.num_released) == (None, 1)


def test_without_memory_nothing_is_fetched_yet() -> None:
    it, _ = request_in(PLANNED)
    it.fetch(SimpleNamespace(of=lambda *_: None), None)  # type: ignore[arg-type]
    assert it.phase is PLANNED


def test_slots_are_given_to_no_request_that_is_not_ready() -> None:
    it, _ = request_in(FETCHING)
    with pytest.raises(IllegalTransition):
        it.begin_load(Span(0, 4 * PAGE), torch.arange(4 * PAGE))
    assert it.load is None
