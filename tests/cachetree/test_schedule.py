"""The schedule: the paper's example, and what must hold for any other."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule import Request, Resource, Timeline, Work, schedule
from cachetree.ids import Span
from cachetree.planning.plan import Strategy

ONES = (1.0,) * 10
PAPER = (
    # The paper's layers 4 to 10 are our [3, 10).
    Request(block=Span(3, 10), load=ONES, recompute=ONES, e_load=1.0, arrival=0.0),
    Request(block=Span(0, 3), load=ONES, recompute=ONES, e_load=1.0, arrival=2.0),
)


@pytest.mark.parametrize(
    ("strategy", "ttfts", "total"),
    [
        (Strategy.EVERYTHING_FIRST, (18.0, 29.0), 47.0),
        (Strategy.REUSED_FIRST, (11.0, 19.0), 30.0),
        (Strategy.PIPELINED, (8.0, 9.0), 17.0),
    ],
)
def test_the_papers_example(strategy: Strategy, ttfts: tuple[float, ...], total: float) -> None:
    timeline = schedule(PAPER, strategy)
    assert timeline.ttfts == ttfts
    assert timeline.total_ttft == total


def test_the_papers_pipeline_bar_by_bar() -> None:
    bars = {
        (task.request, task.work, task.layer): (task.start, task.stop)
        for task in schedule(PAPER, Strategy.PIPELINED).tasks
    }
    expected = {(0, Work.LOAD_E, 3): (0, 1)}
    expected |= {(0, Work.LOAD_KV, layer): (1 + layer, 2 + layer) for layer in range(3)}
    expected |= {(0, Work.RECOMPUTE, 3 + i): (1 + i, 2 + i) for i in range(7)}
    expected |= {(1, Work.LOAD_KV, 3 + i): (4 + i, 5 + i) for i in range(7)}
    expected |= {(1, Work.RECOMPUTE, i): (8 + i, 9 + i) for i in range(3)}
    assert bars == expected


def test_only_the_first_strategy_loads_what_it_recomputes() -> None:
    for strategy, num_loads in zip(Strategy, (21, 11, 11), strict=True):
        tasks = schedule(PAPER, strategy).tasks
        assert sum(task.resource is Resource.LINK for task in tasks) == num_loads


def test_the_forward_waits_for_each_layers_kv() -> None:
    request = Request(
        block=Span(1, 2), load=(1, 1, 4), recompute=(2, 2, 2), e_load=1, forward=(1, 1, 1)
    )
    timeline = schedule([request], Strategy.PIPELINED)
    starts = {(task.work, task.layer): task.start for task in timeline.tasks}
    # link: E 0-1, layer 0 1-2, layer 2 2-6; device: block 1-3, then 3, 4, and layer 2 at 6
    assert [starts[Work.FORWARD, layer] for layer in range(3)] == [3, 4, 6]
    assert timeline.ttfts == (7,)


def test_a_waiting_request_does_not_block_the_device() -> None:
    slow = Request(block=Span(0, 0), load=(10,), recompute=(1,), forward=(1,))
    quick = Request(block=Span(0, 1), load=(1,), recompute=(1,), arrival=1)
    assert schedule([slow, quick], Strategy.PIPELINED).ttfts == (11, 1)


def test_nothing_to_do_takes_no_time() -> None:
    assert schedule([], Strategy.PIPELINED) == Timeline(tasks=(), ttfts=())
    idle = Request(block=Span(0, 0), load=(), recompute=(), arrival=3)
    assert schedule([idle], Strategy.REUSED_FIRST).ttfts == (0.0,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block": Span(0, 3), "load": (1, 1), "recompute": (1, 1)},
        {"block": Span(0, 1), "load": (1, 1), "recompute": (1,)},
        {"block": Span(0, 1), "load": (1, 1), "recompute": (1, 1), "forward": (1,)},
    ],
)
def test_layers_must_agree(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="layers"):
        Request(**wrong)  # type: ignore[arg-type]


@st.composite
def some_requests(draw: st.DrawFn) -> list[Request]:
    num_layers = draw(st.integers(1, 6))
    durations = st.tuples(*[st.integers(1, 5)] * num_layers)
    return [
        Request(
            block=Span(*sorted(draw(st.tuples(*[st.integers(0, num_layers)] * 2)))),
            load=draw(durations),
            recompute=draw(durations),
            e_load=draw(st.integers(1, 5)),
            forward=draw(st.one_of(st.just(()), durations)),
            arrival=draw(st.integers(0, 9)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


@settings(deadline=None)
@given(some_requests(), st.sampled_from(Strategy))
def test_any_schedule_is_a_schedule(requests: list[Request], strategy: Strategy) -> None:
    timeline = schedule(requests, strategy)
    for resource in Resource:
        mine = [task for task in timeline.tasks if task.resource is resource]
        assert all(first.stop <= second.start for first, second in pairwise(mine))
    for index, request in enumerate(requests):
        mine = [task for task in timeline.tasks if task.request == index]
        stops = {(task.work, task.layer): task.stop for task in mine}
        starts = {(task.work, task.layer): task.start for task in mine}
        assert len(stops) == len(mine)
        assert min([request.arrival, *starts.values()]) == request.arrival
        have = {layer for work, layer in stops if work is not Work.LOAD_E}
        assert have == set(range(len(request.load)))  # loaded or recomputed, none forgotten
        recomputed = [layer for work, layer in stops if work is Work.RECOMPUTE]
        assert recomputed == list(request.block)
        if request.needs_e:
            assert (
                starts[Work.RECOMPUTE, request.block.start]
                >= stops[Work.LOAD_E, request.block.start]
            )
        for layer in range(len(request.forward)):
            kv = Work.RECOMPUTE if layer in request.block else Work.LOAD_KV
            assert starts[Work.FORWARD, layer] >= stops[kv, layer]
        assert timeline.ttfts[index] == max([*stops.values(), 0]) - request.arrival


@settings(deadline=None)
@given(some_requests())
def test_a_request_alone_never_waits_longer_when_pipelined(requests: list[Request]) -> None:
    everything, reused, pipelined = (schedule(requests[:1], s).total_ttft for s in Strategy)
    assert pipelined <= reused <= everything
    it = requests[0]
    if not it.forward:
        e_load = it.e_load if it.needs_e else 0
        loaded = sum(took for layer, took in enumerate(it.load) if layer not in it.block)
        recomputed = sum(it.recompute[layer] for layer in it.block)
        assert pipelined == e_load + max(loaded, recomputed)
        assert reused == e_load + loaded + recomputed
