"""The schedule: the paper's example, and properties of every other schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule import PAPER, Request, ttfts
from cachetree.ids import Span
from cachetree.planning.plan import Strategy


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy.EVERYTHING_FIRST, [18.0, 29.0]),
        (Strategy.REUSED_FIRST, [11.0, 19.0]),
        (Strategy.PIPELINED, [8.0, 9.0]),
    ],
)
def test_the_papers_example(strategy, expected):
    assert ttfts(PAPER, strategy) == expected
    assert ttfts(PAPER[::-1], strategy) == expected[::-1]


def test_a_request_that_waits_for_its_e_does_not_block_the_device():
    sizes = {"num_layers": 2, "load": 10.0, "e_load": 5.0}
    slow = Request(block=Span(1, 2), recompute=1.0, **sizes)
    quick = Request(block=Span(0, 2), recompute=3.0, arrival=1.0, **sizes)
    # link: E 0-5, a layer 5-15; device: the second request's block 1-4, the first one's 5-6
    assert ttfts([slow, quick], Strategy.PIPELINED) == [15.0, 3.0]
    assert ttfts([slow, quick], Strategy.REUSED_FIRST) == [16.0, 18.0]


def test_a_free_device_takes_the_first_request_of_those_that_are_ready():
    busy = Request(block=Span(0, 1), num_layers=1, load=1.0, recompute=5.0, e_load=1.0)
    first = Request(block=Span(1, 2), num_layers=2, load=1.0, recompute=2.0, e_load=3.0)
    later = Request(
        block=Span(0, 1), num_layers=1, load=1.0, recompute=2.0, e_load=1.0, arrival=1.0
    )
    # device: the first block until 5; of the two that are ready then, the later one since 1
    assert ttfts([busy, first, later], Strategy.PIPELINED) == [5.0, 7.0, 8.0]


def test_nothing_to_do_takes_no_time():
    assert ttfts([], Strategy.PIPELINED) == []
    busy, idle = (
        Request(block=Span(0, 0), num_layers=it, load=9.0, recompute=0.0, e_load=1.0, arrival=it)
        for it in (1, 0)
    )
    assert ttfts([busy, idle], Strategy.PIPELINED) == [9.0, 0.0]


@st.composite
def some_requests(draw: st.DrawFn) -> list[Request]:
    num_layers, durations = draw(st.integers(1, 6)), st.integers(1, 5)
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        block = Span(*sorted(draw(st.tuples(*[st.integers(0, num_layers)] * 2))))
        requests.append(
            Request(
                block=block,
                num_layers=num_layers,
                load=draw(durations),
                recompute=draw(durations) * len(block),
                e_load=draw(durations),
                arrival=draw(st.integers(0, 9)),
            )
        )
    return requests


@settings(deadline=None)
@given(some_requests())
def test_a_request_alone_takes_what_its_parts_take(requests):
    alone = requests[0]
    (everything,), (reused,), (pipelined,) = (ttfts([alone], strategy) for strategy in Strategy)
    e_load = alone.e_load if alone.block.start > 0 and len(alone.block) else 0
    loaded = alone.load * sum(layer not in alone.block for layer in range(alone.num_layers))
    assert everything == e_load + alone.load * alone.num_layers + alone.recompute
    assert reused == e_load + loaded + alone.recompute
    assert pipelined == e_load + max(loaded, alone.recompute)


@settings(deadline=None)
@given(some_requests(), st.sampled_from(Strategy))
def test_link_and_device_do_one_thing_at_a_time(requests, strategy):
    """Link and device have had time for all work of all requests when the last request ends."""
    predicted = ttfts(requests, strategy)
    for request, ttft in zip(requests, predicted, strict=True):
        assert [ttft] >= ttfts([request], strategy)
    first = min(it.arrival for it in requests)
    last = max(it.arrival + ttft for it, ttft in zip(requests, predicted, strict=True))
    of_device = sum(it.recompute for it in requests)
    of_link = sum(it.e_time + it.kv_time(strategy) for it in requests)
    both = of_device + of_link
    assert last - first >= (max(of_device, of_link) if strategy is Strategy.PIPELINED else both)
