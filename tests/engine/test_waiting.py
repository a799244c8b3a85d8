"""A waiting request: inputs of its plan, its fetch, the length of its wait, and its load.

`test_waiting_machine` tests many waiting requests under random events.
"""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from standins import (
    METER,
    NUM_PAGES,
    OPTIONAL,
    PAGE,
    PLAN,
    SAVING_S,
    STORE,
    TREE,
    UNCOUNTED,
    WANTED,
    Asked,
    FakeMeter,
    Pair,
    begin_load,
    keys_of,
    look,
    planned_as,
    planner_of,
    planner_that,
    planner_without,
    request,
    server_with,
    waiting_with,
)

from cachetree.ids import Location, ModelId, Span
from cachetree.names import ModelNames
from cachetree.planning import Patience
from sglang_droidspeak.adapters.models import Owner
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import reusable_pages
from sglang_droidspeak.request.followers import Followers
from sglang_droidspeak.request.planner import UNMEASURED_S, Declined, Planned
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.request.request import Phase
from sglang_droidspeak.request.waiting import WaitingRequests
from sglang_droidspeak.store.pool import Held

# What it is planned with.


@pytest.mark.parametrize(("has_come", "left_s"), [(True, 1.0), (False, 0.25)])
def test_plan_whose_first_pages_the_device_lost_is_made_anew(now, has_come, left_s):
    """The new load begins behind the pages that are left. The total wait does not grow, unless the
    wait was over and the request has queued as all others do."""
    cache, req = Asked(now, held=Held(2, 0)), request()
    planner = planner_that(
        lambda *_: planned_as(
            replace(PLAN, pages=Span(cache.has.exact, NUM_PAGES)),
            is_experiment=True,
            patience=Patience(saving_s=1.0),
        )
    )
    waiting, recorded = waiting_with(cache, planner=planner)
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
    assert recorded.by_rid["r1"].outcome == "fallback: SlowLink"
    cache.has = Held(0, 0)
    assert not look(waiting, req)
    assert len(cache.fetched) == 2, "who has given up is not planned again"
    assert cache.memory.lent_bytes == 0


class Team:
    """Two models that may read each other's KV and have none yet. Stands for what leaders ask."""

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


def test_follower_waits_until_its_leader_is_gone_or_has_answered(now):
    """No other request keeps an aborted leader in the notes. No follower waits longer than reading
    saves."""
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


@pytest.mark.parametrize("decision", [planned_as(PLAN), Declined("no_match")])
def test_request_that_stays_exact_waits_for_no_leader_of_another_model(decision):
    team: Any = Team()
    waiting = waiting_in(team)
    leader, exact, other = (request(rid, rid) for rid in ("leads", "exact", "other"))
    Labels(UNCOUNTED, ModelNames()).report([exact])
    team.plan = lambda req, *_: decision if req is exact else Declined("no_match")
    assert look(waiting, leader, exact, other) == {"other"}


# What a store that does not advertise is asked for.


def asks(req: Any, cache: Asked, **parts: Any) -> bool:
    """Return whether the request waits for the store's answer."""
    req.sampling_params.custom_params = parts.pop("custom_params", None)
    waiting, _ = waiting_with(cache, **{"server": STORE, "meter": METER, **parts})
    return look(waiting, req) == {"r1"} and not cache.fetched


def test_store_is_asked_if_the_device_lacks_enough_pages():
    for num_held, is_enough in ((0, True), (2, True), (3, False)):
        req, cache = request(), Asked(held=Held(num_held, 0))
        assert asks(req, cache) == is_enough
        assert cache.searched == ([reusable_pages(req, PAGE)] if is_enough else [])
        assert cache.where[0] == ("r1", NUM_PAGES, TREE)


def test_request_that_may_reuse_nothing_asks_no_store():
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


def test_request_plans_without_a_store_that_raises():
    class Broken(Asked):
        def search(self, pages: Any) -> list[Any]:
            raise OSError("a test")

    cache = Broken()
    assert not asks(request(), cache)
    assert len(cache.fetched) == 1, "it was planned all the same"


@pytest.mark.parametrize("full_s", [0.5, None])
def test_request_waits_for_a_store_as_long_as_a_prefill_takes(now, full_s):
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


def test_wait_for_a_store_uses_up_the_wait_for_a_fetch(now):
    waiting, _ = waiting_with(Asked(now), server=STORE, planner=OPTIONAL, meter=METER)
    req = request()
    assert look(waiting, req) == {req.rid}
    waiting.pass_over([req.rid])
    now.now_s += SAVING_S + 1e-3
    assert not look(waiting, req), "and then it waits for no fetch"


# What it loads.


def test_plan_that_loads_nothing_is_ready_at_once():
    """All layers are computed anew from the receiver's own embeddings, without E."""
    planner = planner_of(plan=replace(PLAN, block=Span(0, 4)), patience=Patience(saving_s=0.0))
    req = request()
    waiting, _ = waiting_with(Asked(), planner=planner)
    assert not look(waiting, req)
    keys = keys_of(req)
    assert waiting.take(req.rid, keys, torch.arange(4 * PAGE))


def test_pages_of_the_pool_are_locked_when_they_are_taken():
    """The plan locks the pages for the request when it is made, in the tree of that moment."""
    cache, req, locked = Asked(), request(), []
    plan = replace(PLAN, location=Location("pool:x"))
    pages = SimpleNamespace(slots=torch.arange(NUM_PAGES * PAGE), release=lambda: None)
    pool = SimpleNamespace(
        has_approximate=False, lock=lambda *args: locked.append(args) or pages, held=cache.held
    )
    waiting, _ = waiting_with(cache, pool=pool, planner=planner_of(**WANTED | {"plan": plan}))
    assert not look(waiting, req)
    begin_load(waiting, cache, req)
    assert locked == [(plan, reusable_pages(req, PAGE), req, TREE)]


def test_request_that_stays_exact_loads_exact_kv():
    cache, req = Asked(), request()
    Labels(UNCOUNTED, ModelNames()).report([req])
    own = replace(PLAN, sender=PLAN.receiver)
    waiting, _ = waiting_with(cache, planner=planner_of(**WANTED | {"plan": own}))
    assert look(waiting, req)
    begin_load(waiting, cache, req)
    assert prefixes.num_approximate(req) == 0 and not prefixes.is_approximate(req)
    assert not req.skip_radix_cache_insert, "exact KV is kept, also of an experiment"


def test_loaded_approximate_pages_count_for_the_next_request():
    cache, first, second = Asked(held=Held(0, 3)), request("first"), request("second")
    waiting, _ = waiting_with(cache, planner=planner_of(**WANTED | {"is_experiment": False}))
    look(waiting, first)
    begin_load(waiting, cache, first)
    assert cache.loaded == reusable_pages(first, PAGE)
    assert prefixes.num_approximate(first) == len(cache.loaded) * PAGE
    waiting, _ = waiting_with(cache, planner=planner_without("no_match"))
    look(waiting, second)
    second.prefix_len = 3 * PAGE
    waiting.admitted([second])
    assert prefixes.num_approximate(second) == 3 * PAGE


def test_taken_request_knows_how_long_its_planning_took(now):
    def plan(*_: Any) -> Planned:
        now.now_s += 0.5
        return planned_as(PLAN)

    cache, req = Asked(now), request()
    waiting, _ = waiting_with(cache, planner=planner_that(plan))
    assert look(waiting, req) == {"r1"}
    now.now_s += 1.0
    taken, _ = begin_load(waiting, cache, req)
    assert (taken.match_s, taken.queued_s) == (pytest.approx(0.5), pytest.approx(1.5))


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
def test_load_beside_decoding_is_at_most_one_step(share, is_decoding, num_pages):
    """A step has 56 tokens, which are three and a half pages. One page is for the request's own
    tokens."""
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


def test_failure_of_the_first_rank_settles_all_ranks():
    """The other ranks have begun, and hear of the failure."""
    pair, caches = Pair(), [Asked(), Asked()]
    caches[0].fetch = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    for cache, least, outcome in zip(
        caches, (Phase.LOADING, Phase.SETTLED), ("error", "fallback: FetchError"), strict=True
    ):
        ranks = pair.rank(caches.index(cache))
        ranks.least = lambda mine, least=least: [min(it, least) for it in mine]
        waiting, recorded = waiting_with(cache, ranks=ranks)
        assert not look(waiting, request())
        assert recorded.by_rid["r1"].outcome == outcome
        assert cache.memory.lent_bytes == 0


@pytest.mark.parametrize("lacking", [0, 1])
def test_ranks_read_one_namespace_if_one_has_no_memory(lacking):
    """Only the next request in the queue looks for more KV at other peers."""
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


def test_only_the_first_rank_asks_a_store():
    for number in range(2):
        cache, req = Asked(), request()
        req.sampling_params.custom_params = None
        pair = Pair()
        pair.shared.append(msgspec.msgpack.encode([]))
        pair.least.append([])
        waiting, _ = waiting_with(cache, server=STORE, meter=METER, ranks=pair.rank(number))
        look(waiting, req)
        assert len(cache.searched) == (not number)
