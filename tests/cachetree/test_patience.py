"""Seconds that a request waits for its fetch, by the bytes that have arrived."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetree.planning import FREE_LINK, Link, Patience

LINK = Link(byte_s=1e-3)
FOR_A_SECOND = Patience(saving_s=0.25, wait_s=1.0, link=LINK)
"""Patience for a fetch of a thousand bytes that takes a second."""


@pytest.mark.parametrize(
    ("num_landed", "limit_s"), [(0, 0.25), (100, 0.35), (500, 0.75), (1000, 1.25), (9000, 1.25)]
)
def test_it_may_be_late_by_what_it_saves(num_landed, limit_s):
    assert FOR_A_SECOND.limit_s(num_landed) == pytest.approx(limit_s)


def test_fetches_ahead_and_beside_do_not_make_a_fetch_late():
    """A fetch of 100 bytes shares the link with two others: 300 bytes of one and 50 bytes of the
    other are left. 200 bytes are ahead of it."""
    busy = replace(LINK, backlog=[300, 50], ahead=200, fixed_s=0.1)
    patience = replace(FOR_A_SECOND, link=busy)
    assert patience.limit_s(100) == pytest.approx(0.25 + 0.1 + 0.45)
    assert patience.limit_s(0) == pytest.approx(0.25 + 0.1)


def test_arrived_bytes_are_seen_frame_by_frame():
    patience = replace(FOR_A_SECOND, link=replace(LINK, frame_bytes=50))
    assert patience.limit_s(0) == pytest.approx(0.30)
    assert patience.limit_s(100) == pytest.approx(0.40)
    assert patience.limit_s(990) == pytest.approx(1.25)


def test_over_an_unknown_link_it_waits_for_what_it_saves():
    assert Patience(saving_s=0.25).limit_s(10**9) == 0.25


@given(st.lists(st.integers(1, 2000), max_size=4), st.integers(0, 500), st.integers(0, 200))
def test_the_more_has_come_the_longer_it_waits_up_to_what_its_wait_may_cost(
    backlog, ahead, frame_bytes
):
    link = replace(LINK, backlog=backlog, ahead=ahead, frame_bytes=frame_bytes)
    patience = replace(FOR_A_SECOND, link=link)
    limits = [patience.limit_s(it) for it in range(0, 1001, 50)]
    assert limits == sorted(limits)
    assert patience.saving_s <= limits[0]
    assert limits[-1] <= patience.most_s == 1.25


@given(st.lists(st.integers(1, 2000), max_size=4), st.integers(0, 500), st.integers(1, 999))
def test_at_a_steady_rate_the_rest_is_told_exactly(backlog, ahead, num_landed):
    """The prediction holds for any rate. Here the rate is a third of the expected one."""
    link = replace(LINK, backlog=backlog, ahead=ahead)
    elapsed_s, all_s = (3 * link.seconds(it) for it in (num_landed, 1000))
    assert link.rest_s(elapsed_s, num_landed, 1000) == pytest.approx(all_s - elapsed_s)


def test_the_frame_that_comes_now_does_not_count_as_late():
    link = replace(FREE_LINK, frame_bytes=100)
    assert link.rest_s(0.2, 100, 1000) == pytest.approx(0.2 * 800 / 200)
    assert link.rest_s(0.2, 950, 1000) == 0.0
