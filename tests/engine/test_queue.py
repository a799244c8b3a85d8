"""SGLang's queue with requests that are held back, and with loads that are given up before they
run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from standins import (
    PAGE,
    PLAN,
    STEP_BYTES,
    WANTED,
    Asked,
    FakeMeter,
    keys_of,
    look,
    planner_of,
    request,
    waiting_with,
)

from cachetree.errors import Cancelled, FetchError
from cachetree.ids import Kind, Location, Step
from cachetree.names import ModelNames
from cachetree.planning import Patience, PrefillCost
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.meta_info import KEY, RequestProvenance
from sglang_droidspeak.request.queue import Queue
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.store.pool import PoolPages

E, FIRST_KV, LAST_KV = Step(Kind.E, 1), Step(Kind.KV, 0), Step(Kind.KV, 3)
SLOW = PrefillCost(token_s=3600.0, context_s=0.0)
"""A recompute that takes longer than any fetch."""


class Round:
    """A round of SGLang's scheduler, with some requests held back."""

    def __init__(self, queue: str, held: str, priorities: str = "") -> None:
        """Queue requests, each named by a letter, in their order of arrival. A digit for each is
        its priority."""
        self._num_queued, self._priorities = 0, iter(priorities)
        self.scheduler = SimpleNamespace(
            waiting_queue=[self.queued(rid) for rid in queue],
            tree_cache=None,
            chunked_req=None,
            get_num_allocatable_reqs=lambda _num, running_batch: 1,
            truncation_align_size=None,
            page_size=PAGE,
            enable_priority_scheduling=bool(priorities),
            enable_priority_preemption=False,
            priority_scheduling_preemption_threshold=10,
            schedule_low_priority_values_first=False,
            policy=SimpleNamespace(calc_priority=sort_by_priority),
            grammar_manager=SimpleNamespace(
                has_waiting_grammars=lambda: False,
                get_ready_grammar_requests=list,
                grammar_queue=[],
            ),
        )
        waiting = MagicMock()
        waiting.look.side_effect = self._look
        waiting.pass_over.side_effect = lambda rids: self.passed_over.extend(rids)
        self._queue = Queue(waiting, MagicMock(), MagicMock(), Ranks(None))
        self.held, self.planned, self.seen = held, "", ""
        self.passed_over: list[str] = []
        self.running = MagicMock(batch_is_full=False, reqs=[SimpleNamespace(priority=0)])

    def queued(self, rid: str) -> SimpleNamespace:
        """Add a request that comes after all others."""
        self._num_queued += 1
        time_stats = SimpleNamespace(wait_queue_entry_time=self._num_queued)
        priority = next(self._priorities, None)
        return SimpleNamespace(rid=rid, priority=priority and int(priority), time_stats=time_stats)

    def _look(self, queue: list[Any], _tree: object, *, is_decoding: bool) -> set[str]:
        self.planned = names(queue)
        return set(self.held)

    def run(self, admitted: str = "", retracted: str = "", fails: bool = False) -> str:
        """Return the queue after the round. Retracted requests are put back where SGLang puts
        them."""

        def original(scheduler: Any, **_: Any) -> Any:
            if scheduler.enable_priority_scheduling:
                sort_by_priority(scheduler.waiting_queue)
            self.seen = names(scheduler.waiting_queue)
            scheduler.waiting_queue = [
                req for req in scheduler.waiting_queue if req.rid not in admitted
            ]
            scheduler.waiting_queue += [self.queued(rid) for rid in retracted]
            if fails:
                raise RuntimeError("a test")
            is_batch = admitted or scheduler.chunked_req is not None
            return MagicMock() if is_batch else None, self.running

        self._queue.new_prefill(original, self.scheduler, running_batch=self.running)
        return names(self.scheduler.waiting_queue)


def sort_by_priority(queue: list[Any], _running: object = None) -> None:
    SchedulePolicy._sort_by_priority_and_fcfs(queue, priority_sign=-1)


def names(queue: list[Any]) -> str:
    return "".join(req.rid for req in queue)


@pytest.mark.parametrize(
    ("held", "admitted", "retracted", "seen", "left"),
    [
        ("", "", "", "abcd", "abcd"),
        ("a", "", "", "bcd", "abcd"),
        ("ac", "b", "", "bd", "acd"),
        ("ac", "bd", "", "bd", "ac"),
        ("abcd", "", "", "", "abcd"),
        ("bd", "a", "x", "ac", "bcdx"),
        ("a", "bcd", "xy", "bcd", "axy"),
    ],
)
def test_who_is_held_back_keeps_the_place(held, admitted, retracted, seen, left):
    step = Round("abcd", held)
    assert step.run(admitted, retracted) == left
    assert step.seen == seen


@pytest.mark.parametrize(
    ("held", "admitted", "preempted", "seen", "left", "could_run"),
    [
        ("", "d", "", "dbac", "bac", ""),
        ("d", "b", "", "bac", "dac", "d"),  # It comes first, though it came last.
        ("a", "d", "", "dbc", "bac", ""),  # One of a higher priority is being prefilled.
        ("da", "bc", "", "bc", "da", "d"),
        ("dbac", "", "", "", "dbac", "dbac"),
        ("b", "d", "x", "dac", "bacx", ""),
    ],
)
def test_priorities_decide_who_is_planned_and_who_could_have_run(
    held, admitted, preempted, seen, left, could_run
):
    step = Round("abcd", held, priorities="13197")
    assert step.run(admitted, preempted) == left
    assert (step.planned, step.seen) == ("dbac", seen)
    assert "".join(step.passed_over) == could_run
    if preempted:
        step.run()
        assert step.planned == "xbac", "who was preempted goes by its priority again"


def test_nobody_is_lost_where_a_step_fails():
    step = Round("abcd", "ac")
    with pytest.raises(RuntimeError, match="a test"):
        step.run("b", fails=True)
    assert names(step.scheduler.waiting_queue) == "acd"


@pytest.mark.parametrize(
    ("taken", "is_in_chunks", "is_full", "num_slots", "could_run"),
    [
        ("", False, False, 1, "ac"),  # Nothing was to be done.
        ("", False, True, 1, ""),  # There was no room,
        ("", False, False, 0, ""),  # which SGLang did not need to know,
        ("", False, False, -1, "a"),  # but for who would get it from one that decodes.
        ("", True, False, 1, ""),  # One that came before them is being prefilled,
        ("b", False, False, 1, "a"),  # or before c,
        ("b", True, False, 1, "a"),
        ("d", False, False, 0, "ac"),  # or after both.
        ("d", True, True, 1, "ac"),
    ],
)
def test_which_held_requests_a_step_could_have_taken(
    taken, is_in_chunks, is_full, num_slots, could_run
):
    step = Round("abcd", "ac")
    for req in step.scheduler.waiting_queue:
        req.priority = 20 if req.rid == "a" else 10
    step.scheduler.chunked_req = object() if is_in_chunks else None
    step.scheduler.get_num_allocatable_reqs = lambda _num, running_batch: num_slots
    step.scheduler.enable_priority_preemption = num_slots < 0
    step.running.batch_is_full = is_full
    assert step.run(taken) == "abcd".replace(taken, "")
    assert step.passed_over == list(could_run)


def test_a_retracted_request_waits_again_beside_another_and_is_told_once():
    """The second reading comes before the first answer is made, as in SGLang's overlap schedule."""
    outcomes: Counter[str] = Counter()
    metrics = SimpleNamespace(
        count_outcome=lambda it, **_: outcomes.update([it]), count_saving=lambda *_: None
    )
    labels = Labels(metrics, ModelNames())  # type: ignore[arg-type]
    cache, taken, other = Asked(), request("taken"), request("other")
    taken.prefix_len = 0
    planner = planner_of(**WANTED | {"is_experiment": False})
    waiting, _ = waiting_with(cache, labels=labels, planner=planner)
    assert look(waiting, taken) == {"taken"}
    cache.land()
    assert look(waiting, taken, other) == {"other"}
    assert waiting.take("taken", keys_of(taken), torch.arange(4 * PAGE))
    (loading,) = waiting.start()
    waiting.admitted([taken])
    labels.note(taken, RequestProvenance(outcome="reused", reused_tokens=4 * PAGE))

    taken.is_retracted = True
    labels.report([taken])
    loading.settle()
    assert look(waiting, other, taken) == {"other", "taken"}
    assert len(cache.stagings) == 3
    cache.stagings[2].fail(FetchError("a test"))
    assert look(waiting, other, taken) == {"other"}
    assert not prefixes.is_approximate(taken)
    waiting.admitted([taken])
    taken.is_retracted = False
    for _ in range(2):
        labels.report([taken])
    assert outcomes == {"fallback: FetchError": 1}
    (provenance,) = taken.customized_info[KEY]
    assert provenance["exact"]
    waiting.clear()
    assert cache.memory.lent_bytes == 0


def test_what_the_pool_has_no_more_takes_no_slots():
    """SGLang may evict the pages while the request waits, until the request gets their slots."""
    in_pool = replace(PLAN, location=Location("pool:another"))
    locks = iter([None, PoolPages(torch.arange(4 * PAGE))])
    pool = Asked()
    pool.lock = lambda *_: next(locks)  # type: ignore[attr-defined]
    planner = planner_of(plan=in_pool, patience=Patience(saving_s=1e3))
    waiting, _ = waiting_with(Asked(), planner=planner, pool=pool)
    req = request()
    assert not look(waiting, req), "nothing is to be fetched"
    keys = keys_of(req)
    assert not waiting.take("r1", keys, torch.arange(4 * PAGE))
    assert not waiting.start()
    assert waiting.take("r1", keys, torch.arange(4 * PAGE))


def test_a_load_that_is_cancelled_before_it_starts_gives_its_memory_back():
    cache, req = Asked(), request()
    waiting, _ = waiting_with(cache, meter=FakeMeter(recompute=SLOW))
    assert look(waiting, req)
    assert not waiting.cancel("r1"), "it has no slots yet"
    cache.stagings[0].land(E, STEP_BYTES)
    assert not look(waiting, req)
    keys = keys_of(req)
    assert waiting.take("r1", keys, torch.arange(4 * PAGE))
    assert not waiting.take("r1", keys, torch.arange(4 * PAGE)), "it has slots"
    assert not waiting.cancel("r2")
    assert cache.memory.lent_bytes
    assert waiting.cancel("r1")
    assert cache.memory.lent_bytes == 0
    assert isinstance(cache.stagings[0].error, Cancelled)
    assert not waiting.cancel("r1")
    assert not waiting.start()
    look(waiting, req)
    assert len(cache.stagings) == 2, "it is planned anew"
    waiting.clear()


class Held:
    """A request with a fetch under way, and with a recompute that takes longer than any fetch."""

    def __init__(self) -> None:
        self._cache, self._req = Asked(time.monotonic), request()
        planner = planner_of(patience=Patience(saving_s=3600.0))
        self._waiting, _ = waiting_with(
            self._cache, planner=planner, meter=FakeMeter(recompute=SLOW)
        )

    def is_held(self) -> bool:
        return bool(look(self._waiting, self._req))

    def land(self, *steps: Step) -> None:
        for step in steps:
            self._cache.stagings[0].write(step, 0, memoryview(bytes(STEP_BYTES)))


def test_without_e_nothing_is_recomputed_however_fast_the_rest_arrives():
    held = Held()
    assert held.is_held()
    held.land(FIRST_KV, LAST_KV)
    time.sleep(0.001)
    assert held.is_held()
    held.land(E)
    assert not held.is_held()


def test_with_e_the_rest_may_arrive_beside_the_recompute():
    held = Held()
    assert held.is_held()
    held.land(E)
    assert not held.is_held()


def test_a_source_that_is_gone_leaves_no_hit_behind():
    """SGLang forgets a hit where it loads it, and where a request is aborted."""
    waiting, req, wrapper = MagicMock(), request(), SimpleNamespace(hit_markers={})
    queue = Queue(waiting, MagicMock(), MagicMock(), Ranks(None))

    def match(tree: Any, _key: object, req: Any, result: object) -> object:
        tree.hit_markers[req.rid] = "its pages"
        return result

    for has_source in (True, False):
        waiting.has_source.return_value = has_source
        assert queue.match(match, wrapper, None, req, "result") == "result"
        assert bool(wrapper.hit_markers) == has_source
