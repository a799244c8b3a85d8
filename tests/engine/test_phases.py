"""The phases of a request: their order, and the resources that a request holds in each."""

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
    request = Request(SimpleNamespace(rid="r1"))  # type: ignore[arg-type]
    if phase is SETTLED:
        request.settle()
    if phase >= PLANNED:
        request.take_up(planned_as(PLAN))
    if phase >= FETCHING:
        request.fetch(SimpleNamespace(of=lambda *_: source), None)  # type: ignore[arg-type]
    if phase >= ARRIVING:
        request.reach(ARRIVING)
    if phase >= READY:
        request.reach(READY)
    if phase >= LOADING:
        request.begin_load(Span(0, 4 * PAGE), torch.arange(4 * PAGE))
    assert request.phase is phase
    return request, source


@pytest.mark.parametrize(("before", "after"), product(Phase, Phase))
def test_what_does_not_follow_raises_and_changes_nothing(before, after):
    request, source = request_in(before)
    if (before, after) in LEGAL:
        request.reach(after)
        assert request.phase is after
        return
    with pytest.raises(IllegalTransition, match=f"r1: {before.name} to {after.name}"):
        request.reach(after)
    assert request.phase is before
    assert source.num_released == 0


@pytest.mark.parametrize("phase", Phase)
def test_who_settles_holds_no_source_and_released_it_once(phase):
    request, source = request_in(phase)
    for _ in range(2):
        request.settle()
    assert request.source is None
    assert source.num_released == (phase >= FETCHING)


def test_what_one_rank_cannot_hold_the_others_release():
    request, source = request_in(FETCHING)
    request.reach(PLANNED)
    assert (request.source, source.num_released) == (None, 1)


def test_without_memory_nothing_is_fetched_yet():
    request, _ = request_in(PLANNED)
    request.fetch(SimpleNamespace(of=lambda *_: None), None)  # type: ignore[arg-type]
    assert request.phase is PLANNED


def test_slots_are_given_to_no_request_that_is_not_ready():
    request, _ = request_in(FETCHING)
    with pytest.raises(IllegalTransition):
        request.begin_load(Span(0, 4 * PAGE), torch.arange(4 * PAGE))
    assert request.load is None
