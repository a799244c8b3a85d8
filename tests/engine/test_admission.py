"""Requests that load nothing report why. Loads take what SGLang and the device give them.

`test_waiting_machine` has the same rules under random events; these tests are quick.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from standins import (
    METER,
    NUM_PAGES,
    PAGE,
    PLAN,
    STORE,
    TREE,
    UNCOUNTED,
    WANTED,
    Asked,
    Pair,
    begin_load,
    counting_on,
    keys_of,
    look,
    planned_as,
    planner_of,
    planner_that,
    planner_without,
    request,
    waiting_with,
)

from cachetree.clock import Deadline
from cachetree.ids import Location, Span
from cachetree.names import ModelNames
from cachetree.planning import Patience
from cachetree.tier import Search
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import reusable_pages
from sglang_droidspeak.request.arrivals import NUM_NEXT
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.planner import Declined
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.start.config import at_rank
from sglang_droidspeak.store.pool import Held


@pytest.mark.parametrize(
    ("num_there", "is_fetched", "outcome"),
    [
        (NUM_PAGES, True, "on_device"),
        (NUM_PAGES - 1, True, "no_slots"),
        (NUM_PAGES - 1, False, "staging_full"),
    ],
)
def test_who_is_admitted_without_its_load_says_why_and_counts_its_wait(
    now, num_there, is_fetched, outcome
):
    """A request that finds all pages on the device has lost nothing by its plan."""
    cache, req = Asked(now), request(prefix_len=num_there * PAGE)
    if not is_fetched:
        cache.fetch = lambda *_: None  # type: ignore[method-assign,assignment,return-value]
    waiting, recorded = waiting_with(cache)
    assert bool(look(waiting, req)) == is_fetched
    waiting.pass_over([req.rid])
    now.now_s += 0.12345678
    waiting.admitted([req])
    assert recorded.by_rid[req.rid] == RequestProvenance(outcome=outcome, queued_ms=123.457)
    delays_s = [] if outcome == "on_device" else [pytest.approx(-0.12345678)]
    assert recorded.savings == delays_s
    assert cache.memory.lent_bytes == 0


def test_who_is_declined_says_why():
    for detail in ("by a test", ""):
        waiting, recorded = waiting_with(Asked(), planner=planner_without("no_profile", detail))
        assert not look(waiting, request())
        assert recorded.by_rid["r1"] == RequestProvenance(
            outcome="no_profile", detail=detail or None
        )
    waiting, recorded = waiting_with(Asked(), planner=planner_that(lambda *_: 1 / 0))
    assert not look(waiting, request())
    assert recorded.by_rid["r1"].outcome == "error"


@pytest.mark.parametrize(
    ("outcome", "before", "after", "is_anew"),
    [
        ("too_short", Held(2, 0), Held(1, 0), True),
        ("on_device", Held(2, 0), Held(1, 0), True),
        ("too_short", Held(2, 0), Held(2, 0), False),
        ("no_match", Held(2, 0), Held(1, 0), False),
        ("too_short", Held(1, 3), Held(1, 2), True),
        ("too_short", Held(1, 3), Held(0, 3), False),
        ("too_short", Held(3, 1), Held(3, 0), False),
    ],
)
def test_who_needs_no_plan_is_planned_again_once_the_device_lost_pages(
    outcome, before, after, is_anew
):
    """The request counts on the pages that it will read: approximate ones if they are more."""
    considered, plans = counting_on(before.exact, before.approximate or None), []
    planner = planner_that(
        lambda *_: plans.append(1) or Declined(outcome, considered=considered)  # type: ignore[func-returns-value]
    )
    cache, req = Asked(held=before), request()
    waiting, _ = waiting_with(cache, planner=planner)
    look(waiting, req)
    look(waiting, req)
    if outcome != "no_match":
        assert cache.where[-1] == ("r1", max(before.exact, before.approximate), TREE)
    cache.has = after
    look(waiting, req)
    assert len(plans) == 1 + is_anew


def test_each_step_looks_on_the_device_for_the_next_requests_only():
    declined = Declined("too_short", considered=counting_on(2))
    cache = Asked(held=Held(2, 0))
    waiting, _ = waiting_with(cache, planner=planner_that(lambda *_: declined))
    queue = [request(f"r{number}") for number in range(NUM_NEXT + 3)]
    look(waiting, *queue)
    cache.where.clear()
    look(waiting, *queue)
    assert cache.where == [(it.rid, 2, TREE) for it in queue[:NUM_NEXT]]


def test_a_request_that_was_declined_without_a_choice_is_not_planned_again():
    cache, req = Asked(held=Held(2, 0)), request()
    waiting, recorded = waiting_with(cache, planner=planner_without("too_short"))
    look(waiting, req)
    cache.has = Held(0, 0)
    look(waiting, req)
    assert len(recorded.notes) == 1


def test_a_request_is_planned_and_compared_with_its_queue_as_it_is():
    first, second = request("first"), request("second")
    seen: dict[str, list[Any]] = {it: [] for it in ("note", "meet", "plan", "follow")}
    decisions = [planned_as(PLAN), Declined("no_match")]

    def plan(*about: Any) -> Any:
        seen["plan"].append(about)
        return decisions[len(seen["plan"]) - 1]

    planner = planner_that(plan)
    planner.note, planner.meet = seen["note"].append, seen["meet"].append
    followers = SimpleNamespace(
        follow=lambda request, *rest: seen["follow"].append((request.req, *rest)),
        prune=lambda _waiting: None,
    )
    waiting, _ = waiting_with(Asked(), planner=planner, followers=followers)
    assert look(waiting, first, second) == {"first"}
    reqs = [first, second]
    assert seen["note"] == seen["meet"] == reqs
    assert seen["plan"] == [(it, reusable_pages(it, PAGE), TREE, 1) for it in reqs]
    assert seen["follow"] == [(*both, TREE) for both in zip(reqs, decisions, strict=True)]


def test_what_refuses_a_request_or_its_plan_is_its_outcome():
    planner = planner_of(**WANTED)
    planner.refusal = lambda _req: "weights_updated"
    waiting, recorded = waiting_with(Asked(), planner=planner)
    assert not look(waiting, request())
    assert recorded.by_rid["r1"].outcome == "weights_updated"
    exact = request()
    Labels(UNCOUNTED, ModelNames()).report([exact])
    waiting, recorded = waiting_with(Asked())
    assert not look(waiting, exact)
    assert recorded.by_rid["r1"].outcome == "off"


def test_a_new_request_with_an_old_id_is_planned_itself():
    cache = Asked()
    waiting, _ = waiting_with(cache)
    for _ in range(2):
        assert look(waiting, request()) == {"r1"}
    assert len(cache.fetched) == 2
    assert len(cache.stagings) == 2 and cache.stagings[0].error is not None


def test_a_request_is_planned_as_soon_as_each_store_has_answered():
    searches = [Search(Deadline.after(60)) for _ in range(2)]
    cache, req = Asked(), request()
    cache.search = lambda _pages: searches  # type: ignore[method-assign,assignment,return-value]
    prefixes.move(req, approximate=True)  # By its stay in the queue before a retraction.
    waiting, _ = waiting_with(cache, server=STORE, meter=METER)
    for search in searches:
        assert look(waiting, req) == {"r1"} and not cache.fetched
        assert not prefixes.is_approximate(req)
        search.end()
    assert look(waiting, req) == {"r1"} and cache.fetched


def test_a_request_reads_what_its_plan_loads_while_that_is_fetched():
    """The device has more exact KV than approximate KV, which the plan does not need."""
    cache, req = Asked(held=Held(2, 1)), request()
    waiting, _ = waiting_with(cache, planner=planner_of(**WANTED | {"is_experiment": False}))
    for _ in range(2):
        assert look(waiting, req) == {"r1"}
        assert prefixes.is_approximate(req)


def test_who_reads_approximate_kv_waits_for_no_other_request():
    followed: list[Any] = []
    followers = SimpleNamespace(
        follow=lambda request, *_: followed.append(request.req.rid), prune=lambda _waiting: None
    )
    for held in (Held(0, 3), Held(3, 0)):
        cache, planner = Asked(held=held), planner_without("no_match")
        waiting, _ = waiting_with(cache, planner=planner, followers=followers)
        look(waiting, request(f"{held.approximate}"))
    assert followed == ["0"]


def test_other_ranks_get_the_plan_and_what_it_counts_on_and_no_more():
    """Only the first rank asks again whether reuse pays."""
    pair, cache, req = Pair(), Asked(), request()
    planned = planned_as(PLAN, patience=Patience(saving_s=1.0), considered=counting_on(0))
    waiting, _ = waiting_with(cache, planner=planner_that(lambda *_: planned), ranks=pair.rank(0))
    look(waiting, req)
    ((rid, _, sent, _),) = msgspec.msgpack.decode(pair.shared[0])
    assert (rid, sent["considered"]) == ("r1", None)
    pair, caches = Pair(), [Asked(held=Held(2, 0)), Asked(held=Held(2, 0))]
    declined = Declined("too_short", considered=counting_on(2))
    planner = planner_that(lambda *_: declined)
    ranks = [
        waiting_with(cache, planner=planner, ranks=pair.rank(number))[0]
        for number, cache in enumerate(caches)
    ]
    reqs = [request(), request()]
    for _ in range(2):
        for waiting, req in zip(ranks, reqs, strict=True):
            look(waiting, req)
    assert caches[1].where == caches[0].where == [("r1", 2, TREE)]


@pytest.mark.parametrize(("held", "is_approximate"), [(Held(0, 3), True), (Held(1, 0), False)])
def test_all_ranks_read_what_the_first_rank_finds(held, is_approximate):
    pair = Pair()
    for number, has in enumerate((held, Held(0, 0))):
        req = request()
        prefixes.move(req, approximate=not is_approximate)
        planner = planner_without("no_match")
        waiting, _ = waiting_with(Asked(held=has), planner=planner, ranks=pair.rank(number))
        assert not look(waiting, req)
        assert prefixes.is_approximate(req) == is_approximate


def test_a_request_that_stays_exact_reads_no_approximate_kv():
    exact, other = request("exact"), request("other")
    Labels(UNCOUNTED, ModelNames()).report([exact])
    cache = Asked(held=Held(0, 3))
    waiting, _ = waiting_with(cache, planner=planner_without("no_match"))
    look(waiting, exact, other)
    assert [prefixes.is_approximate(it) for it in (exact, other)] == [False, True]
    assert cache.where == [("other", NUM_PAGES, TREE)]


def test_each_rank_fetches_its_own_shard():
    pair, req = Pair(), request()
    for number in range(2):
        cache = Asked()
        waiting, _ = waiting_with(cache, ranks=pair.rank(number))
        look(waiting, req)
        plan = replace(PLAN, location=Location(at_rank(PLAN.location, number)))
        assert cache.fetched == [(plan, reusable_pages(req, PAGE))]


def test_a_rank_that_fails_says_whose_request_it_cannot_serve(caplog):
    cache = Asked()
    cache.fetch = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    waiting, _ = waiting_with(cache)
    look(waiting, request())
    assert caplog.messages[0] == "request r1: this rank cannot do as planned"


@pytest.mark.parametrize("is_kept_out", [True, False])
@pytest.mark.parametrize("is_experiment", [True, False])
def test_what_others_may_not_read_stays_out_of_sglangs_tree(is_kept_out, is_experiment):
    """The extension lets nothing in that SGLang keeps out itself."""
    cache, req = Asked(), request(skip_radix_cache_insert=is_kept_out)
    planner = planner_of(**WANTED | {"is_experiment": is_experiment})
    waiting, _ = waiting_with(cache, planner=planner)
    look(waiting, req)
    begin_load(waiting, cache, req)
    assert req.skip_radix_cache_insert == (is_kept_out or is_experiment)


def test_approximate_tokens_are_those_read_and_those_loaded():
    """The second request reads two pages that the first has loaded, and loads two more."""
    cache, first, second = Asked(held=Held(0, 2)), request("first"), request("second")
    planner = planner_of(**WANTED | {"is_experiment": False})
    waiting, _ = waiting_with(cache, planner=planner)
    look(waiting, first)
    begin_load(waiting, cache, first)
    assert cache.namespaces == {prefixes.approximate_of(first)}
    later = planned_as(replace(PLAN, pages=Span(2, NUM_PAGES)))
    waiting, _ = waiting_with(cache, planner=planner_that(lambda *_: later))
    look(waiting, second)
    begin_load(waiting, cache, second, *keys_of(second)[2:])
    assert prefixes.num_approximate(second) == NUM_PAGES * PAGE
    assert cache.namespaces == {prefixes.approximate_of(it) for it in (first, second)}


def test_no_page_is_restored_but_those_of_the_plan_behind_its_head():
    """The plan recomputes a head of one page, page 1, and loads the two pages behind it."""
    plan = replace(PLAN, head=Span(1, 2), pages=Span(2, NUM_PAGES))
    cache, req = Asked(held=Held(1, 0)), request()
    waiting, _ = waiting_with(cache, planner=planner_that(lambda *_: planned_as(plan)))
    look(waiting, req)
    cache.land()
    look(waiting, req)
    keys = keys_of(req)
    assert [waiting.num_restorable(req.rid, it) for it in keys] == [0, 3, 2, 1]
    assert waiting.num_restorable("unknown", keys[1]) == 0
    assert waiting.step_tokens("unknown", PAGE) == 0
    assert not waiting.take("unknown", keys, torch.arange(0))
