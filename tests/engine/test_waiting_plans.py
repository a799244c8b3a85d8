"""What a waiting request is planned with and asked for, and what it is told without a plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from request_parts import planned_as
from waiting_parts import (
    METER,
    NUM_PAGES,
    PAGE,
    PLAN,
    STORE,
    TREE,
    WANTED,
    Asked,
    FakeMeter,
    Now,
    keys_of,
    look,
    planner_of,
    planner_that,
    planner_without,
    request,
    server_with,
    waiting_with,
)

from cachetree.errors import FetchError
from cachetree.ids import Span
from cachetree.names import ModelNames
from cachetree.planning import Patience
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import reusable_pages
from sglang_droidspeak.request.labels import Labels
from sglang_droidspeak.request.planner import UNMEASURED_S, Declined
from sglang_droidspeak.store.pool import Held


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


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


@pytest.mark.parametrize("detail", ["", "1 of 2 peers not ready"])
def test_why_there_is_no_plan_is_said_in_words_too(detail: str) -> None:
    planner = planner_without("no_match", detail)
    waiting, told = waiting_with(Asked(), planner=planner)
    assert not look(waiting, request())
    assert (told.by_rid["r1"].outcome, told.by_rid["r1"].detail) == ("no_match", detail or None)


def test_what_goes_wrong_while_planning_costs_the_reuse_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def plan(*_: Any) -> Any:
        raise RuntimeError("a test")

    waiting, told = waiting_with(
        Asked(),
        planner=planner_that(plan),
    )
    assert not look(waiting, request())
    assert told.by_rid["r1"].outcome == "error"
    assert "request r1: planning failed; it does a full prefill" in caplog.messages


def test_a_refused_request_says_what_it_is_and_is_not_planned() -> None:
    req = request()
    req.session = object()
    waiting, told = waiting_with(Asked())
    assert not look(waiting, req)
    assert told.by_rid["r1"].outcome == "session"


def declined(outcome: str, num_held: int) -> Declined:
    """With so many exact pages on the device."""
    demand = SimpleNamespace(first_page=num_held, first_approximate=None)
    return Declined(outcome, considered=SimpleNamespace(demand=demand, matches=()))  # type: ignore[arg-type]


def test_what_the_device_loses_while_a_request_waits_is_planned_anew() -> None:
    answers = iter(["too_short", "no_match", "never"])
    planner = planner_that(lambda *_: declined(next(answers), cache.has.exact))
    cache, req = Asked(held=Held(NUM_PAGES, 0)), request()
    waiting, told = waiting_with(cache, planner=planner)
    for held, outcome in ((4, "too_short"), (4, "too_short"), (3, "no_match"), (0, "no_match")):
        cache.has = Held(held, 0)
        assert not look(waiting, req)
        assert told.by_rid["r1"].outcome == outcome


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
    assert cache.memory.held_bytes == 0


def test_who_was_settled_after_a_wait_and_is_planned_anew_may_wait_anew(now: Now) -> None:
    """As who has not waited for anything before it stood in the queue."""
    cache, req = Asked(now, held=Held(NUM_PAGES, 0)), request()
    planner = planner_that(
        lambda *_: (
            planned_as(
                replace(PLAN, pages=Span(cache.has.exact, NUM_PAGES)),
                patience=Patience(saving_s=1.0),
            )
            if cache.has.exact < NUM_PAGES
            else declined("too_short", NUM_PAGES)
        )
    )
    waiting, told = waiting_with(cache, planner=planner)
    assert not look(waiting, req)
    waiting._requests["r1"].runnable_s = now.now_s  # As one has it that was held a while.
    now.now_s += 9
    cache.has = Held(1, 0)
    assert look(waiting, req) == {"r1"}, "its fetch has just begun"
    assert "r1" not in told.by_rid or told.by_rid["r1"].outcome == "too_short"


def test_only_the_next_in_the_queue_are_looked_at_once_more() -> None:
    planner = planner_that(lambda *_: declined("too_short", NUM_PAGES))
    cache, queue = Asked(held=Held(NUM_PAGES, 0)), [request(f"r{i}") for i in range(9)]
    waiting, _ = waiting_with(cache, planner=planner)
    look(waiting, *queue)
    assert not cache.where  # The planner has counted.
    look(waiting, *queue)
    assert [rid for rid, _, _ in cache.where] == ["r0", "r1", "r2", "r3"]


def test_after_an_update_of_the_weights_nothing_is_planned() -> None:
    cache, first, second = Asked(), request("r1"), request("r2")
    planner = planner_of(**WANTED)
    waiting, told = waiting_with(cache, planner=planner)
    assert look(waiting, first) == {"r1"}
    planner.refusal = lambda _req: "weights_updated"
    waiting.clear()
    assert cache.memory.held_bytes == 0
    assert not look(waiting, first, second)
    assert {it.outcome for it in told.by_rid.values()} == {"weights_updated"}


@pytest.mark.parametrize(("outcome", "stays"), [("no_match", True), ("off", False)])
def test_without_a_plan_a_request_reads_the_longer_of_what_the_device_has(
    outcome: str, stays: bool
) -> None:
    """Unless it wants exact KV only, or has less of the other."""
    for held in (Held(1, 3), Held(3, 1)):
        cache, req = Asked(held=held), request()
        planner = planner_without(outcome)
        waiting, _ = waiting_with(cache, planner=planner)
        prefixes.move(req, approximate=True)
        look(waiting, req)
        assert prefixes.is_approximate(req) == (stays and (held.approximate > held.exact))
        assert cache.where == ([("r1", NUM_PAGES, TREE)] if stays else [])


@pytest.mark.parametrize("held", [Held(1, 3), Held(3, 1)])
def test_who_reads_approximate_kv_leaves_nothing_that_others_could_wait_for(held: Held) -> None:
    followed: list[Any] = []
    in_flight = SimpleNamespace(
        follow=lambda it, *_: followed.append(it.req), prune=lambda _waiting: None
    )
    planner, req = planner_without("no_match"), request()
    waiting, _ = waiting_with(Asked(held=held), planner=planner, in_flight=in_flight)
    look(waiting, req)
    assert followed == ([] if (held.approximate > held.exact) else [req])


def test_one_that_fails_reads_the_longer_of_what_the_device_has() -> None:
    cache, req = Asked(held=Held(1, 3)), request()
    waiting, _ = waiting_with(cache)
    assert look(waiting, req) == {"r1"}
    assert not prefixes.is_approximate(req)
    cache.stagings[0].fail(FetchError("a test"))
    assert not look(waiting, req)
    assert prefixes.is_approximate(req)
    assert cache.where == [("r1", NUM_PAGES, TREE)]


def test_one_without_memory_reads_the_longer_of_what_the_device_has() -> None:
    cache, req = Asked(held=Held(1, 3)), request()
    cache.fetch = lambda *_: None  # type: ignore[assignment,method-assign,return-value]
    waiting, _ = waiting_with(cache)
    assert not look(waiting, req)
    assert prefixes.is_approximate(req)
    assert cache.where == [("r1", NUM_PAGES, TREE)]


def test_of_those_without_memory_only_the_next_look_once_more() -> None:
    """Each step of the scheduler would be longer by all that wait."""
    cache, queue = Asked(held=Held(1, 3)), [request(f"r{i}") for i in range(9)]
    cache.fetch = lambda *_: None  # type: ignore[assignment,method-assign,return-value]
    waiting, _ = waiting_with(cache)
    look(waiting, *queue)
    asked = [rid for rid, _, _ in cache.where]
    assert asked == [it.rid for it in queue], "it has just been planned"
    cache.has = Held(3, 1)
    look(waiting, *queue)
    assert [rid for rid, _, _ in cache.where[9:]] == asked[:4]
    assert [prefixes.is_approximate(it) for it in queue] == 4 * [False] + 5 * [True]


def test_who_was_told_to_be_exact_is_told_why_it_reads_nothing() -> None:
    outcomes: list[Any] = []
    req = request()
    metrics = SimpleNamespace(count_outcome=lambda it, **_: outcomes.append(it))
    labels = Labels(metrics, ModelNames())  # type: ignore[arg-type]
    labels.report([req])
    cache = Asked(held=Held(1, 3))
    planner = planner_of(**WANTED | {"is_experiment": False})
    waiting, told = waiting_with(cache, planner=planner)
    assert not look(waiting, req)
    assert told.by_rid["r1"].outcome == "off"
    assert not prefixes.is_approximate(req)


def test_what_has_come_is_planned_again_with_what_the_device_has() -> None:
    cache, req = Asked(held=Held(2, 0)), request()
    planner = planner_of(
        **WANTED | {"is_experiment": False, "patience": Patience(saving_s=1e3)},
        considered=SimpleNamespace(demand=object()),
    )
    asked: list[Any] = []
    planner.still_saves = lambda _plan, _demand, held: asked.append(held) or True
    waiting, _ = waiting_with(cache, planner=planner)
    look(waiting, req)
    cache.land()
    assert not look(waiting, req)
    assert cache.where == [("r1", NUM_PAGES, TREE)]
    assert asked == [Held(2, 0)]


def test_of_those_that_could_run_only_the_next_are_planned_again() -> None:
    """Each step of the scheduler would be longer by all that wait."""
    cache, queue = Asked(), [request(f"r{i}") for i in range(10)]
    planner = planner_of(
        **WANTED | {"is_experiment": False, "patience": Patience(saving_s=1e3)},
        considered=SimpleNamespace(demand=object()),
    )
    planner.still_saves = lambda *_: cache.has.exact < NUM_PAGES
    waiting, told = waiting_with(cache, planner=planner)
    look(waiting, *queue)
    cache.land()
    assert not look(waiting, *queue)
    asked = [rid for rid, _, _ in cache.where]
    assert asked == [f"r{i}" for i in range(10)], "it has just come"
    look(waiting, *queue)
    assert [rid for rid, _, _ in cache.where[10:]] == asked[:4]
    cache.has = Held(NUM_PAGES, 0)
    look(waiting, *queue)
    assert {rid: it.outcome for rid, it in told.by_rid.items()} == dict.fromkeys(
        asked[:4], "slower"
    )
    look(waiting, *queue)
    assert len(told.by_rid) == 8, "they are the next now"


def test_memory_is_asked_for_again_up_to_the_first_for_which_there_is_none() -> None:
    cache, queue = Asked(), [request(f"r{i}") for i in range(10)]
    asked: list[Any] = []
    cache.fetch = lambda *_: asked.append(_)  # type: ignore[assignment,method-assign]
    waiting, _ = waiting_with(cache)
    look(waiting, *queue)
    asked.clear()
    look(waiting, *queue)
    assert len(asked) == 1
    begin = type(cache).fetch
    cache.fetch = lambda *told: (  # type: ignore[method-assign]
        begin(cache, *told) if len(cache.fetched) < 6 else None
    )
    assert look(waiting, *queue) == {f"r{i}" for i in range(6)}, "more than are the next"


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
