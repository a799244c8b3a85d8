"""What a waiting request is planned with and asked for, how long it waits, and what it loads.

`test_waiting_machine` has what becomes of many of them, whatever happens.
"""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from request_parts import planned_as
from waiting_parts import (
    METER,
    NUM_PAGES,
    PAGE,
    PLAN,
    SAVING_S,
    STEP_BYTES,
    STORE,
    TREE,
    WANTED,
    Asked,
    FakeMeter,
    Now,
    keys_of,
    loading,
    look,
    planner_of,
    planner_that,
    planner_without,
    request,
    server_with,
    waiting_with,
)

from cachetree.errors import FetchError
from cachetree.ids import LOCAL, Location, ModelId, Span
from cachetree.names import ModelNames
from cachetree.planning import Link, Patience, PrefillCost
from cachetree.transport import Source
from sglang_droidspeak.adapters.models import Owner
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import reusable_pages
from sglang_droidspeak.request.followers import Followers
from sglang_droidspeak.request.planner import UNMEASURED_S, Declined, Planned
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.request.request import Phase
from sglang_droidspeak.request.waiting import WaitingRequests
from sglang_droidspeak.store.pool import Held

DEADLINE_S = 0.2
UNCOUNTED: Any = SimpleNamespace(count_outcome=lambda *_, **__: None)
OPTIONAL = planner_of(patience=Patience(saving_s=SAVING_S))
"""Chosen by the server, which predicts that it saves so much."""
WAIT_S, MARGIN_S, STEP_S = 0.12, 0.03, 0.0005
"""Predicted of a fetch of 120 bytes, too short for the rate to tell when it will end; and what it
saves."""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


# What it is planned with.


def test_each_new_request_is_planned_with_how_many_wait_beside_it() -> None:
    asked: list[Any] = []
    planner = planner_that(lambda *args: asked.append(args) or Declined("no_match"))
    waiting, told = waiting_with(Asked(), planner=planner)
    queue = [request(f"r{i}") for i in range(3)]
    look(waiting, queue[0])
    look(waiting, *queue)
    pages = reusable_pages(queue[0], PAGE)
    assert asked == [(req, pages, TREE, num) for req, num in zip(queue, (0, 2, 2), strict=True)]
    assert {rid: it.outcome for rid, it in told.by_rid.items()} == dict.fromkeys(
        ("r0", "r1", "r2"), "no_match"
    )


def test_who_is_planned_finds_the_links_as_busy_as_those_before_make_them() -> None:
    """Of all that come at once: each fetch is begun before the next request is planned."""
    cache, begun = Asked(), []
    planner = planner_of(**WANTED)
    plan, planner.plan = planner.plan, lambda *it: begun.append(len(cache.fetched)) or plan(*it)
    waiting, _ = waiting_with(cache, planner=planner)
    look(waiting, *(request(f"r{i}") for i in range(3)))
    assert begun == [0, 1, 2]


@pytest.mark.parametrize(("has_come", "left_s"), [(True, 1.0), (False, 0.25)])
def test_what_a_plan_stands_on_is_planned_anew_once_the_device_has_lost_it(
    now: Now, has_come: bool, left_s: float
) -> None:
    """What is loaded follows on what is there. It waits no longer in all, unless its wait was over
    and it has stood in the queue as all others do."""
    cache, req = Asked(now, held=Held(2, 0)), request()
    planner = planner_that(
        lambda *_: planned_as(
            replace(PLAN, pages=Span(cache.has.exact, NUM_PAGES)),
            is_experiment=True,
            patience=Patience(saving_s=1.0),
        )
    )
    waiting, told = waiting_with(cache, planner=planner)
    assert look(waiting, req) == {"r1"}
    waiting.pass_over(["r1"])
    now.now_s += 0.75
    if has_come:
        cache.land()
    assert bool(look(waiting, req)) != has_come
    now.now_s += 9 * has_come
    cache.has = Held(1, 0)
    assert look(waiting, req) == {"r1"}
    waiting.pass_over(["r1"])
    assert [plan.pages.start for plan, _ in cache.fetched] == [2, 1]
    assert waiting.num_restorable("r1", keys_of(req)[1]) == NUM_PAGES - 1
    now.now_s += left_s - 0.125
    assert look(waiting, req) == {"r1"}, "no more was lost"
    now.now_s += 0.25
    assert not look(waiting, req)
    assert told.by_rid["r1"].outcome == "fallback: SlowLink"
    cache.has = Held(0, 0)
    assert not look(waiting, req)
    assert len(cache.fetched) == 2, "who has given up is not planned again"
    assert cache.memory.lent_bytes == 0


class Team:
    """Two models that may read each other, and have nothing yet; stands for what leaders ask."""

    plan = staticmethod(lambda *_: Declined("no_match"))
    refusal = staticmethod(prefixes.refusal)
    demand = staticmethod(lambda *_: None)
    would_save_s = staticmethod(lambda *_, exactly: 0.0 if exactly else SAVING_S)
    remote = SimpleNamespace(reach=lambda *_: 0)

    def meet(self, req: Any) -> None:
        pass

    note = meet

    def owner_of(self, req: Any) -> Owner:
        return Owner(ModelId(f"model {req.lora_id}"), req.lora_id, None)

    def __len__(self) -> int:
        return 2


def waiting_in(team: Any) -> WaitingRequests:
    leaders = Followers(team, team, team, PAGE)
    return waiting_with(Asked(), planner=team, followers=leaders)[0]


def test_a_follower_waits_for_its_leader_until_that_is_gone_or_has_answered(now: Now) -> None:
    """Nobody else keeps an aborted leader; and none waits longer than reading saves."""
    for end in ("aborted", "answered", "late"):
        waiting, leader, follower = waiting_in(Team()), request("leads"), request("follows", "x")
        gone, queue = weakref.ref(leader), [leader, follower]
        for _ in range(2):
            assert look(waiting, *queue) == {"follows"}
            now.now_s += 100.0
        if end == "aborted":
            queue.remove(leader)
            del leader
        elif end == "answered":
            queue.remove(leader)
            leader.kv.holds_kv = True
            assert look(waiting, *queue) == {"follows"}, "it computes"
            leader.output_ids.append(7)
        else:
            waiting.pass_over(["follows"])
            now.now_s += SAVING_S + 1e-3
        assert not look(waiting, *queue)
        assert not look(waiting)
        if end == "aborted":
            gc.collect()
            assert gone() is None


@pytest.mark.parametrize("held", [Held(1, 3), Held(3, 1)])
def test_who_reads_approximate_kv_leaves_nothing_that_others_could_wait_for(held: Held) -> None:
    followed: list[Any] = []
    followers = SimpleNamespace(
        follow=lambda it, *_: followed.append(it.req), prune=lambda _waiting: None
    )
    planner, req = planner_without("no_match"), request()
    waiting, _ = waiting_with(Asked(held=held), planner=planner, followers=followers)
    look(waiting, req)
    assert followed == ([] if (held.approximate > held.exact) else [req])


@pytest.mark.parametrize("is_approximate", [False, True])
def test_what_was_told_to_be_exact_stays_so(is_approximate: bool) -> None:
    """A request that was retracted after its first tokens were sent is planned again."""
    cache, req = Asked(), request()
    labels = Labels(UNCOUNTED, ModelNames())
    prefixes.move(req, approximate=is_approximate)
    req.extend_end = 4 * PAGE
    labels.report([req])
    waiting, _ = waiting_with(cache, planner=planner_of(**WANTED | {"is_experiment": False}))
    held = look(waiting, req)
    assert bool(held) == prefixes.is_approximate(req) == is_approximate
    waiting.clear()


def test_what_was_told_to_be_exact_still_loads_exact_kv() -> None:
    cache, req = Asked(), request()
    Labels(UNCOUNTED, ModelNames()).report([req])
    own = replace(PLAN, sender=PLAN.receiver)
    waiting, _ = waiting_with(cache, planner=planner_of(**WANTED | {"plan": own}))
    assert look(waiting, req)
    loading(waiting, cache, req)
    assert prefixes.num_approximate(req) == 0 and not prefixes.is_approximate(req)
    assert not req.skip_radix_cache_insert, "exact KV is kept, also of an experiment"


def test_what_was_told_to_be_exact_reads_no_approximate_kv_of_the_device() -> None:
    req = request()
    Labels(UNCOUNTED, ModelNames()).report([req])
    waiting, _ = waiting_with(Asked(held=Held(1, 3)), planner=planner_without("no_match"))
    assert not look(waiting, req)
    assert not prefixes.is_approximate(req)


@pytest.mark.parametrize("found", [planned_as(PLAN), Declined("no_match")])
def test_what_was_told_to_be_exact_waits_for_nobody_whom_it_may_not_read(found: Any) -> None:
    team: Any = Team()
    waiting = waiting_in(team)
    leader, exact, other = (request(rid, rid) for rid in ("leads", "exact", "other"))
    Labels(UNCOUNTED, ModelNames()).report([exact])
    team.plan = lambda req, *_: found if req is exact else Declined("no_match")
    assert look(waiting, leader, exact, other) == {"other"}


@pytest.mark.parametrize("outcome", ["off", "no_match"])
def test_who_was_told_to_be_exact_is_told_why_it_reads_nothing(outcome: str) -> None:
    """Not by a plan, nor what earlier reuse has left on the device."""
    req = request()
    Labels(UNCOUNTED, ModelNames()).report([req])
    planned = planner_of(**WANTED | {"is_experiment": False})
    planner = planned if outcome == "off" else planner_without(outcome)
    waiting, told = waiting_with(Asked(held=Held(1, 3)), planner=planner)
    assert not look(waiting, req)
    assert told.by_rid["r1"].outcome == outcome
    assert not prefixes.is_approximate(req)


# What a store that does not advertise is asked for.


def asks(req: Any, cache: Asked, **parts: Any) -> bool:
    """Whether it waits for the store's answer."""
    req.sampling_params.custom_params = parts.pop("custom_params", None)
    waiting, _ = waiting_with(cache, **{"server": STORE, "meter": METER, **parts})
    return look(waiting, req) == {"r1"} and not cache.fetched


def test_a_store_is_asked_for_what_the_device_lacks_where_that_is_enough() -> None:
    for num_held, is_enough in ((0, True), (2, True), (3, False)):
        req, cache = request(), Asked(held=Held(num_held, 0))
        assert asks(req, cache) == is_enough
        assert cache.searched == ([reusable_pages(req, PAGE)] if is_enough else [])
        assert cache.where[0] == ("r1", NUM_PAGES, TREE)


def test_nobody_asks_a_store_for_what_is_not_to_be_reused() -> None:
    assert not asks(request(), Asked(), server=server_with())
    assert not asks(request(), Asked(), custom_params={"droidspeak": {"mode": "off"}})
    assert asks(request(), Asked(), custom_params={"droidspeak": {"mode": "auto"}})
    refused, cache = request(), Asked()
    refused.input_embeds = [[0.5]]
    assert not asks(refused, cache)
    assert not cache.searched
    planner, cache = planner_of(**WANTED), Asked()
    planner.refusal = lambda _req: "weights_updated"
    assert not asks(request(), cache, planner=planner)
    assert not cache.searched


def test_a_store_that_cannot_be_asked_is_not_waited_for() -> None:
    class Broken(Asked):
        def search(self, pages: Any) -> list[Any]:
            raise OSError("a test")

    cache = Broken()
    assert not asks(request(), cache)
    assert len(cache.fetched) == 1, "it was planned all the same"


@pytest.mark.parametrize("full_s", [0.5, None])
def test_a_store_is_waited_for_as_long_as_the_prefill_takes(now: Now, full_s: float | None) -> None:
    cache, req, asked = Asked(now, held=Held(1, 0)), request(), []
    prefill = SimpleNamespace(
        knows=lambda num_tokens: asked.append(num_tokens) or full_s is not None,
        seconds=lambda *_: full_s,
    )
    meter = FakeMeter(recompute=None, prefill=prefill)
    req.sampling_params.custom_params = None
    waiting, _ = waiting_with(cache, server=STORE, meter=meter)
    look(waiting, req)
    assert asked == [3 * PAGE]
    waiting.pass_over(["r1"])
    most_s = UNMEASURED_S if full_s is None else full_s
    now.now_s += most_s - 1e-3
    assert look(waiting, req) and not cache.fetched
    now.now_s += 2e-3
    assert look(waiting, req) and cache.fetched


def test_the_wait_for_an_answer_of_a_store_counts_as_well(now: Now) -> None:
    waiting, _ = waiting_with(Asked(now), server=STORE, planner=OPTIONAL, meter=METER)
    req = request()
    assert look(waiting, req) == {req.rid}
    waiting.pass_over([req.rid])
    now.now_s += SAVING_S + 1e-3
    assert not look(waiting, req), "and then it waits for no fetch"


# How long it waits.


def test_a_fetch_has_one_deadline_from_its_requests_first_sight() -> None:
    cache, req = Asked(time.monotonic), request()
    waiting, _ = waiting_with(cache, server=server_with(fetch_deadline_s=DEADLINE_S))
    before_s = time.monotonic()
    for _ in range(2):
        assert look(waiting, req) == {req.rid}
    (staging,) = cache.stagings
    assert before_s < staging.deadline.at_s - DEADLINE_S < time.monotonic()


def test_a_request_given_up_because_its_peer_is_gone_says_since_when(now: Now) -> None:
    cache, req = Asked(now), request()
    waiting, told = waiting_with(cache, planner=OPTIONAL)
    assert look(waiting, req) == {req.rid}
    waiting.pass_over([req.rid])
    now.now_s += 2 * SAVING_S
    since = "the peer is unreachable since 14:52:15: Connection reset by peer"
    cache.peers = (Source(address=PLAN.location, state="connecting", reason=since),)
    assert not look(waiting, req)
    ((_, note),) = told.notes
    assert (note.outcome, note.detail) == ("fallback: FetchError", f"{PLAN.location}: {since}")


@pytest.mark.parametrize(("location", "is_fetched"), [(PLAN.location, True), (LOCAL, False)])
def test_how_late_the_end_of_a_fetch_is_seen_is_told_once(
    location: Location, is_fetched: bool
) -> None:
    """Not of what lies in this server's own memory."""
    cache, req, told = Asked(), request(), []
    meter: Any = SimpleNamespace(recompute=None, noticed=told.append)
    planner = planner_of(
        plan=replace(PLAN, location=location), patience=Patience(saving_s=math.inf)
    )
    waiting, _ = waiting_with(cache, meter=meter, planner=planner)
    assert look(waiting, req) == {req.rid}
    (staging,) = cache.stagings
    cache.land()
    assert not told
    for _ in range(2):
        assert not look(waiting, req)
        assert len(told) == is_fetched
    for late_s in told:
        assert 0 <= late_s <= time.monotonic() - staging.completed_s


def test_what_has_come_is_planned_again_with_what_the_device_has() -> None:
    cache, req, asked = Asked(held=Held(2, 0)), request(), []
    demand: Any = object()
    planner = planner_of(patience=Patience(saving_s=1e3), considered=SimpleNamespace(demand=demand))
    planner.still_saves = lambda *args: asked.append(args) or True
    waiting, _ = waiting_with(cache, planner=planner)
    assert look(waiting, req) == {req.rid}
    assert not asked, "nothing has come"
    cache.land()
    assert not look(waiting, req)
    assert cache.where == [("r1", NUM_PAGES, TREE)]
    assert asked == [(PLAN, demand, Held(2, 0))]


def landed(now: Now, num_bytes: int, seconds: float, **parts: Any) -> tuple[Any, Any]:
    """A request of whose 120 bytes so many have come in so many seconds, in its turn at once."""
    cache, req = Asked(now, held=Held(1, 0)), request()
    waiting, told = waiting_with(cache, **parts)
    look(waiting, req)
    waiting.pass_over(["r1"])
    now.now_s += seconds
    (staging,) = cache.stagings
    for step in PLAN.steps:
        part = min(num_bytes, STEP_BYTES)
        num_bytes -= part
        if part:
            staging.land(step, part)
    return waiting, (req, told)


@pytest.mark.parametrize("wait_s", [0.0, 0.7])
@pytest.mark.parametrize(("most_s", "is_held"), [(0.91, True), (0.89, False)])
def test_the_rest_is_expected_at_the_rate_so_far(
    now: Now, most_s: float, is_held: bool, wait_s: float
) -> None:
    """60 of 120 bytes in 0.45 s: the rest takes as long, and all of it must come in time."""
    link = Link(byte_s=wait_s / 120)
    patience = Patience(saving_s=most_s - wait_s, wait_s=wait_s, link=link)
    planner = planner_of(**WANTED | {"patience": patience})
    meter = FakeMeter(recompute=PrefillCost(token_s=1e-9, context_s=0.0))
    waiting, (req, told) = landed(now, 60, 0.45, planner=planner, meter=meter)
    assert bool(look(waiting, req)) == is_held
    if not is_held:
        assert told.by_rid["r1"].outcome == "fallback: SlowLink"


def test_one_that_comes_too_late_at_its_rate_is_given_up_before(now: Now) -> None:
    cache, req = Asked(now), request()
    planner = planner_of(patience=Patience(saving_s=10.0))
    waiting, told = waiting_with(cache, planner=planner, meter=METER)
    assert look(waiting, req) == {req.rid}
    cache.stagings[0].land(PLAN.steps[0], 1)  # One of 120 bytes.
    now.now_s += 0.25
    assert look(waiting, req) == {req.rid}, "it waits its turn"
    waiting.pass_over([req.rid])
    assert not look(waiting, req)
    assert [it.outcome for _, it in told.notes] == ["fallback: SlowLink"]


@pytest.mark.parametrize(("token_s", "is_held"), [(9.7e-3, True), (1.0e-2, False)])
def test_the_rest_may_come_while_the_plans_tokens_are_recomputed(
    now: Now, token_s: float, is_held: bool
) -> None:
    """One layer of 48 tokens. E has come, and the rest takes 0.4725 s."""
    plan = replace(PLAN, pages=Span(1, 4))
    planner = planner_of(**WANTED | {"plan": plan})
    meter = FakeMeter(recompute=PrefillCost(token_s=token_s, context_s=0.0))
    waiting, (req, _) = landed(now, 60, 0.45, planner=planner, meter=meter)
    assert bool(look(waiting, req)) == is_held


def held_for(
    now: Now, came: Callable[[float], float], saving_s: float = MARGIN_S, times: float = 1.0
) -> tuple[float, bool]:
    """How long a request is held of whose fetch such a share has come after so many seconds, and
    whether it loads then; all of it so many times as long."""
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
def test_a_fetch_is_given_up_when_it_is_later_than_what_it_saves(now: Now, share: float) -> None:
    """It stalls at a share of its bytes: on time it is waited for, however long that takes."""
    waited_s, has_come = held_for(now, lambda after_s: min(after_s / WAIT_S, share))
    assert has_come == (share == 1.0)
    late_s = 0.0 if has_come else MARGIN_S
    assert waited_s == pytest.approx(share * WAIT_S + late_s, abs=4 * STEP_S)


@pytest.mark.parametrize("times", [1.0, 20.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("slower", [0.5, 1.0, 1.1, 1.2, 1.4, 3.0, 50.0])
def test_however_its_bytes_come_it_is_answered_within_twice_a_full_prefill(
    now: Now, slower: float, share: float, times: float
) -> None:
    """What reuse saves without its wait is less than one: so long it waits, and then takes one."""
    waited_s, has_come = held_for(now, lambda it: min(it / WAIT_S / slower, share), MARGIN_S, times)
    assert waited_s <= WAIT_S + MARGIN_S + 4 * STEP_S
    assert has_come == (share == 1.0 and slower <= 1.2)


def test_a_rate_that_is_too_low_is_seen_long_before(now: Now) -> None:
    """Of 2.4 seconds that it was to take, and takes three times as long."""
    waited_s, has_come = held_for(now, lambda it: it / WAIT_S / 3, MARGIN_S, times=20)
    assert not has_come
    assert 20 * waited_s == pytest.approx(0.2, abs=0.05)


def test_who_gives_up_says_so_in_the_log(now: Now, caplog: pytest.LogCaptureFixture) -> None:
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


# What it loads.


def test_a_plan_that_loads_nothing_is_ready_at_once() -> None:
    """All layers are computed anew: from the receiver's own embeddings, with no E."""
    planner = planner_of(plan=replace(PLAN, block=Span(0, 4)), patience=Patience(saving_s=0.0))
    req = request()
    waiting, _ = waiting_with(Asked(), planner=planner)
    assert not look(waiting, req)
    keys = keys_of(req)
    assert waiting.take(req.rid, keys, torch.arange(4 * PAGE))


def test_what_the_pool_has_is_locked_when_it_is_taken() -> None:
    """By the plan, for the request, in the tree of that moment."""
    cache, req, locked = Asked(), request(), []
    plan = replace(PLAN, location=Location("pool:x"))
    pages = SimpleNamespace(slots=torch.arange(NUM_PAGES * PAGE), release=lambda: None)
    pool = SimpleNamespace(
        has_approximate=False, lock=lambda *args: locked.append(args) or pages, held=cache.held
    )
    waiting, _ = waiting_with(cache, pool=pool, planner=planner_of(**WANTED | {"plan": plan}))
    assert not look(waiting, req)
    loading(waiting, cache, req)
    assert locked == [(plan, reusable_pages(req, PAGE), req, TREE)]


def test_approximate_pages_that_were_loaded_are_noted_and_count_for_whoever_finds_them() -> None:
    cache, first, second = Asked(held=Held(0, 3)), request("first"), request("second")
    waiting, _ = waiting_with(cache, planner=planner_of(**WANTED | {"is_experiment": False}))
    look(waiting, first)
    loading(waiting, cache, first)
    assert cache.loaded == reusable_pages(first, PAGE)
    assert prefixes.num_approximate(first) == len(cache.loaded) * PAGE
    waiting, _ = waiting_with(cache, planner=planner_without("no_match"))
    look(waiting, second)
    second.prefix_len = 3 * PAGE
    waiting.admitted([second])
    assert prefixes.num_approximate(second) == 3 * PAGE


@pytest.mark.parametrize("waited_s", [3.0, 12.0])
def test_a_taken_request_carries_on_what_is_known_of_it(now: Now, waited_s: float) -> None:
    def plan(*_: Any) -> Planned:
        now.now_s += 0.5
        return Planned(
            plan=PLAN, **WANTED | {"patience": Patience(saving_s=10.0), "is_experiment": False}
        )

    cache, req = Asked(now), request()
    waiting, _ = waiting_with(cache, planner=planner_that(plan))
    assert look(waiting, req) == {"r1"}
    now.now_s += 1.0
    waiting.pass_over(["r1"])
    now.now_s += waited_s
    taken, slots = loading(waiting, cache, req, *keys_of(req)[1:])
    load = taken.load
    assert (taken.req, load.plan, load.at) == (req, PLAN, Span(PAGE, 4 * PAGE))
    assert load.slots is slots
    assert taken.match_s == pytest.approx(0.5)
    assert taken.queued_s == pytest.approx(1.5 + waited_s)
    assert load.patience_s == pytest.approx(max(0.0, 10.0 - waited_s))
    assert not waiting.has_source("r1")


@pytest.mark.parametrize(
    ("share", "is_decoding", "num_pages"),
    [
        (1.0, True, 2),
        (1.0, False, 4),
        (0.75, True, 3),
        (0.5, True, 4),
        (0.0, True, 4),
        (9, True, 0),
    ],
)
def test_beside_who_decodes_no_more_is_loaded_than_a_step_recomputes(
    share: float, is_decoding: bool, num_pages: int
) -> None:
    """A step has 56 tokens, three and a half pages: one of these is for the request's own."""
    cache, req = Asked(), request()
    planner = planner_of(**WANTED | {"step_share": share})
    meter = FakeMeter(recompute=None, step_tokens=56)
    waiting, _ = waiting_with(cache, planner=planner, meter=meter)
    assert look(waiting, req, is_decoding=is_decoding) == {req.rid}
    cache.land()
    assert not look(waiting, req, is_decoding=is_decoding)
    pages = keys_of(req)
    assert waiting.num_restorable(req.rid, pages[0]) == num_pages
    assert waiting.step_tokens(req.rid, 3 * PAGE) == math.ceil(3 * PAGE * share)
    if num_pages < 4:
        assert waiting.take(req.rid, pages[: num_pages + 1], torch.arange(0)) is False
    if num_pages:
        assert waiting.take(req.rid, pages[:num_pages], torch.arange(0))
        (loading,) = waiting.start()
        assert loading.load.at == Span(0, num_pages * PAGE)


# Ranks.


class Pair:
    """Two ranks in one thread: the second hears what the first has shared, by its bytes."""

    def __init__(self) -> None:
        self._shared: list[bytes] = []

    def rank(self, number: int) -> Any:
        return SimpleNamespace(
            is_first=not number, rank=number, least=lambda values: values, share=self._share(number)
        )

    def _share(self, number: int) -> Any:
        def share(value: Any, kind: Any) -> Any:
            if number:
                return msgspec.msgpack.decode(self._shared.pop(0), type=kind)
            self._shared.append(msgspec.msgpack.encode(value))
            return value

        return share


def test_other_ranks_are_told_a_plan_and_not_what_it_was_chosen_by() -> None:
    """The first thinks again for all of them."""
    told: list[Any] = []
    ranks = SimpleNamespace(
        is_first=True, rank=0, share=lambda it, _kind: told.append(it) or it, least=lambda it: it
    )
    planner = planner_of(
        patience=Patience(saving_s=1e3), considered=SimpleNamespace(demand=object())
    )
    waiting, _ = waiting_with(Asked(), planner=planner, ranks=ranks)
    req = request()
    look(waiting, req)
    (((rid, _, planned, _),),) = told
    assert (rid, planned.plan, planned.demand) == (req.rid, PLAN, None)


def test_a_rank_does_as_the_first_one_decided_with_its_own_part() -> None:
    pair, reqs, caches = Pair(), [request("r1"), request("r1")], [Asked(), Asked()]
    planned = WANTED | {"is_experiment": False, "patience": Patience(saving_s=7.0)}
    planners: list[Any] = [
        planner_of(**planned),
        planner_that(None),  # type: ignore[arg-type]
    ]
    both = [
        waiting_with(cache, planner=planner, ranks=pair.rank(number))
        for number, (cache, planner) in enumerate(zip(caches, planners, strict=True))
    ]
    for (waiting, _), req in zip(both, reqs, strict=True):
        assert look(waiting, req) == {"r1"}
    theirs = replace(PLAN, location=Location("tcp://127.0.0.1:2"))
    assert [cache.fetched[0][0] for cache in caches] == [PLAN, theirs]
    assert caches[1].fetched[0][1] == reusable_pages(reqs[1], PAGE)
    assert prefixes.is_approximate(reqs[1])
    assert [waiting.step_tokens("r1", 8) for waiting, _ in both] == [4, 4]
    for (waiting, _), cache, req in zip(both, caches, reqs, strict=True):
        taken, _ = loading(waiting, cache, req)
        assert taken.load.patience_s == 7.0
    assert not reqs[1].skip_radix_cache_insert


def test_a_rank_keeps_an_experiment_to_itself_as_the_first_one_does() -> None:
    pair, reqs = Pair(), [request("r1"), request("r1")]
    for number, req in enumerate(reqs):
        cache = Asked()
        waiting, _ = waiting_with(cache, ranks=pair.rank(number))
        look(waiting, req)
        assert not prefixes.is_approximate(req)
        loading(waiting, cache, req)
        assert req.skip_radix_cache_insert


def test_where_the_first_rank_cannot_begin_all_prefill_in_full() -> None:
    """The others have begun, and hear that it is settled there."""
    pair, caches = Pair(), [Asked(), Asked()]
    caches[0].fetch = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    for cache, least, outcome in zip(
        caches, (Phase.LOADING, Phase.SETTLED), ("error", "fallback: FetchError"), strict=True
    ):
        ranks = pair.rank(caches.index(cache))
        ranks.least = lambda mine, least=least: [min(it, least) for it in mine]
        waiting, told = waiting_with(cache, ranks=ranks)
        assert not look(waiting, request())
        assert told.by_rid["r1"].outcome == outcome
        assert cache.memory.lent_bytes == 0


def test_a_rank_reads_where_the_first_one_does_without_a_plan() -> None:
    pair, reqs = Pair(), [request("r1"), request("r1")]
    for number, req in enumerate(reqs):
        cache = Asked(held=None if number else Held(1, 3))
        planner = planner_without("no_match")
        waiting, _ = waiting_with(cache, planner=planner, ranks=pair.rank(number))
        assert not look(waiting, req)
        assert prefixes.is_approximate(req)
        assert not cache.fetched


def test_ranks_look_in_the_same_place_for_one_that_waits_for_another() -> None:
    """It was retracted, and had read approximate KV. SGLang may sort and touch it by its place."""
    pair = Pair()
    planner = planner_without("no_profile")
    followers = SimpleNamespace(follow=lambda *_: True, prune=lambda _waiting: None)
    for number in range(2):
        req = request()
        prefixes.move(req, approximate=True)
        waiting, _ = waiting_with(
            Asked(held=Held(3, 1)), planner=planner, followers=followers, ranks=pair.rank(number)
        )
        assert look(waiting, req) == {"r1"}
        assert not prefixes.is_approximate(req)


def test_ranks_know_alike_that_the_device_has_still_what_a_request_counts_on() -> None:
    """Seen anew on one of them alone, it would wait there for what the others do not tell."""
    demand: Any = SimpleNamespace(first_page=2, first_approximate=None)
    considered: Any = SimpleNamespace(demand=demand)
    pair, plans = Pair(), [Declined("too_short", considered=considered)]
    for number in range(2):
        cache, req = Asked(), request()
        cache.held = lambda req, num_pages, _tree: Held(  # type: ignore[method-assign]
            min(num_pages, len(req.full_untruncated_fill_ids) // PAGE), 0
        )
        planner = planner_that(lambda *_: plans.pop())
        waiting, told = waiting_with(cache, planner=planner, ranks=pair.rank(number))
        assert [look(waiting, req) for _step in range(3)] == 3 * [set()]
        assert {it.outcome for it in told.by_rid.values()} == (set() if number else {"too_short"})
    assert not pair._shared


@pytest.mark.parametrize("lacking", [0, 1])
def test_ranks_of_which_one_has_no_memory_read_in_the_same_place(lacking: int) -> None:
    """Beyond the next in the queue nobody looks again where the others have more."""
    pair, arrivals, places = Pair(), [], []
    for number in range(2):
        cache, queue = Asked(held=Held(1, 3)), [request(f"r{i}") for i in range(9)]
        begin, cache.fetch = cache.fetch, lambda *_: None  # type: ignore[method-assign,assignment,return-value]
        ranks = pair.rank(number)
        ranks.least = lambda mine: [min(it, Phase.PLANNED) for it in mine]
        waiting, _ = waiting_with(
            cache, planner=planner_of(**WANTED | {"is_experiment": False}), ranks=ranks
        )
        look(waiting, *queue)
        cache.has = Held(3, 1)
        if number != lacking:
            cache.fetch = begin  # type: ignore[method-assign]
        look(waiting, *queue)
        arrivals.append(len(cache.fetched))
        places.append([prefixes.is_approximate(it) for it in queue])
    assert sorted(arrivals) == [0, 9]
    assert places == [4 * [False] + 5 * [True]] * 2


def test_only_the_first_rank_asks_a_store() -> None:
    for number in range(2):
        cache, req = Asked(), request()
        req.sampling_params.custom_params = None
        pair = Pair()
        pair._shared.append(msgspec.msgpack.encode([]))
        waiting, _ = waiting_with(cache, server=STORE, meter=METER, ranks=pair.rank(number))
        look(waiting, req)
        assert len(cache.searched) == (not number)
