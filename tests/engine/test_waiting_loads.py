"""What a planned request loads and how long it waits for it; on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from waiting_parts import (
    METER,
    NUM_PAGES,
    PAGE,
    PLAN,
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
    waiting_with,
)

from cachetree.errors import FetchError
from cachetree.ids import Location, Span
from cachetree.planning import Link, Patience, PrefillCost
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import reusable_pages
from sglang_droidspeak.request.planner import Declined, Planned
from sglang_droidspeak.request.request import Phase
from sglang_droidspeak.store.pool import Held


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


def test_a_fetch_is_of_the_prompts_pages() -> None:
    cache, req = Asked(), request()
    waiting, _ = waiting_with(cache)
    look(waiting, req)
    assert cache.fetched == [(PLAN, reusable_pages(req, PAGE))]


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


@pytest.mark.parametrize("was_skipped", [False, True])
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("is_experiment", [False, True])
def test_only_an_experiments_approximate_kv_is_kept_from_the_tree(
    is_experiment: bool, is_exact: bool, was_skipped: bool
) -> None:
    plan = replace(PLAN, sender=PLAN.receiver) if is_exact else PLAN
    assert plan.is_exact == is_exact
    cache, req = Asked(), request()
    req.skip_radix_cache_insert = was_skipped
    planner = planner_of(**WANTED | {"plan": plan, "is_experiment": is_experiment})
    waiting, _ = waiting_with(cache, planner=planner)
    look(waiting, req)
    loading(waiting, cache, req)
    assert req.skip_radix_cache_insert == (was_skipped or (is_experiment and not is_exact))


def test_of_the_rest_of_a_plan_so_much_can_be_loaded() -> None:
    cache, req = Asked(), request()
    waiting, _ = waiting_with(cache)
    look(waiting, req)
    keys = keys_of(req)
    assert [waiting.num_restorable("r1", key) for key in keys] == [4, 3, 2, 1]
    assert waiting.num_restorable("r1", "00" * 32) == 0
    assert waiting.num_restorable("another", keys[0]) == 0
    assert waiting.step_tokens("r1", 3) == 2
    assert waiting.step_tokens("another", 3) == 0


def test_a_plan_that_was_not_carried_out_is_its_requests() -> None:
    cache, first, second = Asked(), request("r1"), request("r2")
    waiting, told = waiting_with(cache)
    look(waiting, first, second)
    first.prefix_len = 0
    waiting.admitted([first])
    assert {rid: it.outcome for rid, it in told.by_rid.items()} == {"r1": "no_slots"}


# How long it waits.


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


WAIT_S, SAVING_S = 0.12, 0.03
"""Predicted of a fetch of 120 bytes; too short for the rate to tell when it will end."""
STEP_S = 0.0005


def held_for(
    now: Now, came: Callable[[float], float], saving_s: float = SAVING_S, times: float = 1.0
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


def test_a_fetch_that_is_on_time_is_waited_for_beyond_what_it_saves(now: Now) -> None:
    waited_s, has_come = held_for(now, lambda after_s: after_s / WAIT_S)
    assert has_come
    assert waited_s == pytest.approx(WAIT_S, abs=4 * STEP_S)
    assert waited_s > SAVING_S


def test_one_of_which_nothing_comes_is_waited_for_as_long_as_it_saves(now: Now) -> None:
    waited_s, has_come = held_for(now, lambda _after_s: 0.0)
    assert not has_come
    assert waited_s == pytest.approx(SAVING_S, abs=4 * STEP_S)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_one_that_stalls_is_given_up_when_it_is_later_than_what_it_saves(
    now: Now, share: float
) -> None:
    waited_s, has_come = held_for(now, lambda after_s: min(after_s / WAIT_S, share))
    assert not has_come
    assert waited_s == pytest.approx(share * WAIT_S + SAVING_S, abs=4 * STEP_S)


@pytest.mark.parametrize("times", [1.0, 20.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("slower", [0.5, 1.0, 1.1, 1.2, 1.4, 3.0, 50.0])
def test_however_its_bytes_come_it_is_answered_within_twice_a_full_prefill(
    now: Now, slower: float, share: float, times: float
) -> None:
    """What reuse saves without its wait is less than one: so long it waits, and then takes one."""
    waited_s, has_come = held_for(now, lambda it: min(it / WAIT_S / slower, share), SAVING_S, times)
    assert waited_s <= WAIT_S + SAVING_S + 4 * STEP_S
    assert has_come == (share == 1.0 and slower <= 1.2)


def test_a_rate_that_is_too_low_is_seen_long_before(now: Now) -> None:
    """Of 2.4 seconds that it was to take, and takes three times as long."""
    waited_s, has_come = held_for(now, lambda it: it / WAIT_S / 3, SAVING_S, times=20)
    assert not has_come
    assert 20 * waited_s == pytest.approx(0.2, abs=0.05)


def test_how_long_it_was_held_is_told_in_thousandths_of_a_millisecond(now: Now) -> None:
    waiting, (req, told) = landed(now, 0, 0.5)
    now.now_s += 1.23456e-5
    waiting.clear()
    cache = Asked(now)
    waiting, told = waiting_with(cache)
    look(waiting, req)
    now.now_s += 0.0001234567
    cache.stagings[0].fail(FetchError("a test"))
    assert not look(waiting, req)
    assert told.by_rid["r1"].queued_ms == 0.123


def test_who_gives_up_says_so_in_the_log(now: Now, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    planner = planner_of(**WANTED | {"patience": Patience(saving_s=0.25)})
    waiting, (req, _) = landed(now, 0, 0.5, planner=planner)
    look(waiting, req)
    assert caplog.messages == [
        "request r1: 0 of 120 bytes came in 0.500 s, and a full prefill is faster than the rest"
    ]


def test_a_fetch_that_fails_is_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    cache, req = Asked(), request()
    waiting, _ = waiting_with(cache)
    look(waiting, req)
    cache.stagings[0].fail(FetchError("a test"))
    look(waiting, req)
    assert caplog.messages == ["request r1: a test; it does a full prefill"]


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
        assert cache.memory.held_bytes == 0


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
    in_flight = SimpleNamespace(follow=lambda *_: True, prune=lambda _waiting: None)
    for number in range(2):
        req = request()
        prefixes.move(req, approximate=True)
        waiting, _ = waiting_with(
            Asked(held=Held(3, 1)), planner=planner, in_flight=in_flight, ranks=pair.rank(number)
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
