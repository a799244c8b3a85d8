"""Fetches of waiting requests: how long they are waited for, and when they stop to pay.

`test_waiting_machine` tests many waiting requests under random events.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from standins import (
    METER,
    NUM_PAGES,
    OPTIONAL,
    PAGE,
    PLAN,
    SAVING_S,
    STEP_BYTES,
    TREE,
    WANTED,
    Asked,
    FakeMeter,
    Now,
    counting_on,
    look,
    planned_as,
    planner_of,
    planner_that,
    request,
    server_with,
    waiting_with,
)

from cachetree.errors import FetchError, StaleEntry
from cachetree.ids import LOCAL, Span
from cachetree.planning import Link, Patience, PrefillCost, recompute_s
from cachetree.planning.plan import Strategy
from cachetree.transport import Source
from sglang_droidspeak.request.arrivals import NUM_NEXT
from sglang_droidspeak.store.pool import Held

DEADLINE_S = 0.2
WAIT_S, MARGIN_S, STEP_S = 0.12, 0.03, 0.0005
"""Predicted seconds of a fetch of 120 bytes, seconds that it saves, and seconds between two looks
at the queue. The fetch is too short for its rate to tell when it will end."""


def test_fetch_deadline_counts_from_the_first_sight_of_its_request():
    cache, req = Asked(time.monotonic), request()
    waiting, _ = waiting_with(cache, server=server_with(fetch_deadline_s=DEADLINE_S))
    before_s = time.monotonic()
    for _ in range(2):
        assert look(waiting, req) == {req.rid}
    (staging,) = cache.stagings
    assert before_s < staging.deadline.at_s - DEADLINE_S < time.monotonic()


def test_request_without_its_peer_says_since_when_the_peer_is_gone(now):
    cache, req = Asked(now), request()
    waiting, recorded = waiting_with(cache, planner=OPTIONAL)
    assert look(waiting, req) == {req.rid}
    waiting.pass_over([req.rid])
    now.now_s += 2 * SAVING_S
    since = "the peer is unreachable since 14:52:15: Connection reset by peer"
    cache.peers = (Source(address=PLAN.location, state="connecting", reason=since),)
    assert not look(waiting, req)
    ((_, note),) = recorded.notes
    assert (note.outcome, note.detail) == ("fallback: FetchError", f"{PLAN.location}: {since}")


@pytest.mark.parametrize(("location", "is_fetched"), [(PLAN.location, True), (LOCAL, False)])
def test_delay_until_a_fetch_is_seen_to_end_is_noted_once(location, is_fetched):
    """Pages in this server's own memory do not count."""
    cache, req, delays_s = Asked(time.monotonic), request(), []
    meter: Any = SimpleNamespace(recompute=None, noticed=delays_s.append)
    planner = planner_of(
        plan=replace(PLAN, location=location), patience=Patience(saving_s=math.inf)
    )
    waiting, _ = waiting_with(cache, meter=meter, planner=planner)
    assert look(waiting, req) == {req.rid}
    (staging,) = cache.stagings
    cache.land()
    assert not delays_s
    for _ in range(2):
        assert not look(waiting, req)
        assert len(delays_s) == is_fetched
    for late_s in delays_s:
        assert 0 <= late_s <= time.monotonic() - staging.completed_s


def landed(now: Now, num_bytes: int, seconds: float, **parts: Any) -> tuple[Any, Any]:
    """Return a request of 120 bytes, of which `num_bytes` have come in `seconds`, at its first
    turn."""
    cache, req = Asked(now, held=Held(1, 0)), request()
    waiting, recorded = waiting_with(cache, **parts)
    look(waiting, req)
    waiting.pass_over(["r1"])
    now.now_s += seconds
    (staging,) = cache.stagings
    for step in PLAN.steps:
        part = min(num_bytes, STEP_BYTES)
        num_bytes -= part
        if part:
            staging.land(step, part)
    return waiting, (req, recorded)


@pytest.mark.parametrize("wait_s", [0.0, 0.7])
@pytest.mark.parametrize(("most_s", "is_held"), [(0.91, True), (0.89, False)])
def test_missing_bytes_are_expected_at_the_rate_so_far(now, most_s, is_held, wait_s):
    """60 of 120 bytes come in 0.45 s. The rest takes as long, and all bytes must come in time."""
    link = Link(byte_s=wait_s / 120)
    patience = Patience(saving_s=most_s - wait_s, wait_s=wait_s, link=link)
    planner = planner_of(**WANTED | {"patience": patience})
    meter = FakeMeter(recompute=PrefillCost(token_s=1e-9, context_s=0.0))
    waiting, (req, recorded) = landed(now, 60, 0.45, planner=planner, meter=meter)
    assert bool(look(waiting, req)) == is_held
    if not is_held:
        assert recorded.by_rid["r1"].outcome == "fallback: SlowLink"


def test_fetch_that_is_too_slow_is_given_up_once_its_request_could_run(now):
    cache, req = Asked(now), request()
    planner = planner_of(patience=Patience(saving_s=10.0))
    waiting, recorded = waiting_with(cache, planner=planner, meter=METER)
    assert look(waiting, req) == {req.rid}
    cache.stagings[0].land(PLAN.steps[0], 1)  # One of 120 bytes.
    now.now_s += 0.25
    assert look(waiting, req) == {req.rid}, "it waits its turn"
    waiting.pass_over([req.rid])
    assert not look(waiting, req)
    assert [it.outcome for _, it in recorded.notes] == ["fallback: SlowLink"]


@pytest.mark.parametrize(("token_s", "is_held"), [(9.7e-3, True), (1.0e-2, False)])
def test_missing_kv_may_come_during_the_recompute(now, token_s, is_held):
    """The plan recomputes one layer of 48 tokens. E has come, and the rest takes 0.4725 s."""
    plan = replace(PLAN, pages=Span(1, 4))
    planner = planner_of(**WANTED | {"plan": plan})
    meter = FakeMeter(recompute=PrefillCost(token_s=token_s, context_s=0.0))
    waiting, (req, _) = landed(now, 60, 0.45, planner=planner, meter=meter)
    assert bool(look(waiting, req)) == is_held


def held_for(now, came, saving_s=MARGIN_S, times=1.0):
    """Return how long a request is held, and whether it loads then. `came` gives the share of the
    fetch that has come, by seconds; `times` multiplies all times."""
    link = Link(byte_s=times * WAIT_S / 120, frame_bytes=1)
    patience = Patience(saving_s=times * saving_s, wait_s=times * WAIT_S, link=link)
    cache, req = Asked(now), request()
    waiting, _ = waiting_with(
        cache,
        planner=planner_of(patience=patience),
        meter=FakeMeter(recompute=PrefillCost(token_s=1e-9, context_s=0.0)),
    )
    begun_s, num_landed = now.now_s, 0
    while look(waiting, req):
        waiting.pass_over(["r1"])
        now.now_s += times * STEP_S
        num_due = int(120 * min(1.0, came((now.now_s - begun_s) / times)))
        for number, step in enumerate(PLAN.steps):
            before, after = (
                min(max(it - number * STEP_BYTES, 0), STEP_BYTES) for it in (num_landed, num_due)
            )
            if after > before:
                cache.stagings[0].land(step, after - before)
        num_landed = num_due
    return (now.now_s - begun_s) / times, waiting.has_source("r1")


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_fetch_that_stalls_is_given_up_once_it_saves_nothing(now, share):
    """The fetch stalls after a share of its bytes. Up to there it is on time and is waited for,
    however long that takes."""
    waited_s, has_come = held_for(now, lambda after_s: min(after_s / WAIT_S, share))
    assert has_come == (share == 1.0)
    late_s = 0.0 if has_come else MARGIN_S
    assert waited_s == pytest.approx(share * WAIT_S + late_s, abs=4 * STEP_S)


@pytest.mark.parametrize("times", [1.0, 20.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("slower", [0.5, 1.0, 1.1, 1.2, 1.4, 3.0, 50.0])
def test_no_fetch_makes_an_answer_later_than_two_full_prefills(now, slower, share, times):
    """Reuse without the wait saves less than one full prefill. The request waits at most as long as
    that, and then does a full prefill."""
    waited_s, has_come = held_for(now, lambda it: min(it / WAIT_S / slower, share), MARGIN_S, times)
    assert waited_s <= WAIT_S + MARGIN_S + 4 * STEP_S
    assert has_come == (share == 1.0 and slower <= 1.2)


def test_low_rate_of_a_long_fetch_is_seen_early(now):
    """The fetch was predicted to take 2.4 seconds, and takes three times as long."""
    waited_s, has_come = held_for(now, lambda it: it / WAIT_S / 3, MARGIN_S, times=20)
    assert not has_come
    assert 20 * waited_s == pytest.approx(0.2, abs=0.05)


def test_request_that_gives_up_logs_the_cause(now, caplog):
    caplog.set_level("INFO")
    planner = planner_of(**WANTED | {"patience": Patience(saving_s=0.25)})
    waiting, (req, _) = landed(now, 0, 0.5, planner=planner)
    look(waiting, req)
    cache, req = Asked(), request()
    waiting, _ = waiting_with(cache)
    look(waiting, req)
    cache.stagings[0].fail(FetchError("a test"))
    look(waiting, req)
    waiting, _ = waiting_with(Asked(), planner=planner_that(lambda *_: 1 / 0))
    look(waiting, req)
    assert caplog.messages == [
        "request r1: 0 of 120 bytes came in 0.500 s, and a full prefill is faster than the rest",
        "request r1: a test; it does a full prefill",
        "request r1: planning failed; it does a full prefill",
    ]


@pytest.mark.parametrize("strategy", [Strategy.PIPELINED, Strategy.REUSED_FIRST])
@pytest.mark.parametrize(("late_s", "is_held"), [(-0.01, True), (0.01, False)])
def test_a_recompute_hides_the_rest_of_a_fetch_only_beside_it(now, strategy, late_s, is_held):
    """60 of 120 bytes come in 0.45 s, and the rest takes as long. 0.4 s of it are recompute."""
    plan = replace(PLAN, strategy=strategy)
    recompute = PrefillCost(token_s=0.4 / (NUM_PAGES * PAGE), context_s=0.0)
    per_layer_s = recompute_s(plan, PAGE, recompute)
    hidden_s = per_layer_s if strategy is Strategy.PIPELINED else 0.0
    planner = planner_of(
        **WANTED | {"plan": plan, "patience": Patience(saving_s=0.9 - hidden_s - late_s)}
    )
    waiting, (req, _) = landed(now, 60, 0.45, planner=planner, meter=FakeMeter(recompute=recompute))
    assert bool(look(waiting, req)) == is_held


def test_a_fetch_that_breaks_is_named_by_its_error():
    cache, req = Asked(), request()
    waiting, recorded = waiting_with(cache)
    look(waiting, req)
    cache.stagings[0].fail(StaleEntry("a test"))
    assert not look(waiting, req)
    assert recorded.by_rid["r1"].outcome == "fallback: StaleEntry"


def test_the_next_requests_are_asked_at_each_step_whether_reuse_still_pays():
    """All are asked when their bytes have come. Then only those that may load next are asked."""
    cache, asked = Asked(held=Held(1, 0)), []
    planned = planned_as(PLAN, patience=Patience(saving_s=1.0), considered=counting_on(0))
    planner, pays = planner_that(lambda *_: planned), [True]
    planner.still_saves = lambda *about: asked.append(about) or pays[0]  # type: ignore[func-returns-value]
    waiting, recorded = waiting_with(cache, planner=planner)
    queue = [request(f"r{number}") for number in range(NUM_NEXT + 3)]
    look(waiting, *queue)
    for number in range(1, len(queue)):
        cache.land(number)
    assert not asked
    cache.where.clear()
    assert look(waiting, *queue) == {"r0"}
    assert asked == (len(queue) - 1) * [(PLAN, planned.demand, Held(1, 0))]
    assert cache.where == [(it.rid, NUM_PAGES, TREE) for it in queue[1:]]
    asked.clear()
    assert look(waiting, *queue) == {"r0"}
    assert len(asked) == NUM_NEXT
    pays[0] = False
    look(waiting, *queue)
    outcomes = {rid: it.outcome for rid, it in recorded.by_rid.items()}
    assert outcomes == {it.rid: "slower" for it in queue[1 : NUM_NEXT + 1]}


def test_reuse_that_stops_to_pay_while_bytes_come_is_given_up(now):
    plan = replace(PLAN, pages=Span(1, NUM_PAGES))
    optional = {"patience": Patience(saving_s=9.0), "considered": counting_on(1)}
    planned = planned_as(plan, is_experiment=True, **optional)
    planner = planner_that(lambda *_: planned)
    planner.still_saves = lambda *_: False
    meter = FakeMeter(recompute=PrefillCost(token_s=1.0e-3, context_s=0.0))
    waiting, (req, recorded) = landed(now, 60, 0.45, planner=planner, meter=meter)
    assert look(waiting, req)
    assert not recorded.notes, "while the rest takes longer than the recompute, nobody asks"
    meter.recompute = PrefillCost(token_s=1.0e-2, context_s=0.0)
    assert not look(waiting, req)
    assert recorded.by_rid["r1"].outcome == "slower"
