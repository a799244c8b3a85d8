"""SGLang's queue around requests that are held back, and loads given up before they run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from permissive import made
from sglang.srt.managers.schedule_policy import SchedulePolicy
from test_waiting import PAGE, PLAN, FakeMeter, SilentCache, planner_of, request, waiting_on

from cachetree.clock import Deadline
from cachetree.errors import Cancelled, FetchError
from cachetree.ids import Kind, Location, Step
from cachetree.memory import Arena, Blocks, Staging, staged
from cachetree.planning import Patience, PrefillCost
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.labels import Labels
from sglang_droidspeak.request.meta_info import KEY, RequestProvenance
from sglang_droidspeak.request.queue import Queue
from sglang_droidspeak.request.source import Sources
from sglang_droidspeak.request.waiting import WaitingRequests
from sglang_droidspeak.store.pool import PoolPages

STEP_BYTES = 40
KV: Any = SimpleNamespace(page_size=PAGE)
E, FIRST_KV, LAST_KV = Step(Kind.E, 1), Step(Kind.KV, 0), Step(Kind.KV, 3)
SLOW = PrefillCost(token_s=3600.0, context_s=0.0)
"""A recompute that takes longer than any fetch."""


class Round:
    """A round of SGLang's scheduler, with some requests held back."""

    def __init__(self, queue: str, held: str, priorities: str = "") -> None:
        """Requests by their letters as they came, with a digit each where they have priorities."""
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

    def queued(self, rid: str) -> SimpleNamespace:
        """A request that comes after all others."""
        self._num_queued += 1
        time_stats = SimpleNamespace(wait_queue_entry_time=self._num_queued)
        priority = next(self._priorities, None)
        return SimpleNamespace(rid=rid, priority=priority and int(priority), time_stats=time_stats)

    def _look(self, queue: list[Any], _tree: object, *, is_decoding: bool) -> set[str]:
        self.planned = names(queue)
        return set(self.held)

    def run(self, admitted: str = "", retracted: str = "", fails: bool = False) -> str:
        """The queue afterwards. `retracted` is put where SGLang puts what it takes back."""

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
            return MagicMock() if admitted else None, running

        running = MagicMock(batch_is_full=False)
        self._queue.new_prefill(original, self.scheduler, running_batch=running)
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
def test_who_is_held_back_keeps_the_place(
    held: str, admitted: str, retracted: str, seen: str, left: str
) -> None:
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
    held: str, admitted: str, preempted: str, seen: str, left: str, could_run: str
) -> None:
    step = Round("abcd", held, priorities="13197")
    assert step.run(admitted, preempted) == left
    assert (step.planned, step.seen) == ("dbac", seen)
    assert "".join(step.passed_over) == could_run
    if preempted:
        step.run()
        assert step.planned == "xbac", "who was preempted goes by its priority again"


def test_nobody_is_lost_where_a_step_fails() -> None:
    step = Round("abcd", "ac")
    with pytest.raises(RuntimeError, match="a test"):
        step.run("b", fails=True)
    assert names(step.scheduler.waiting_queue) == "acd"


def test_a_retracted_request_waits_again_beside_another_and_is_told_once() -> None:
    """Of its second reading: its first answer was on its way, as with SGLang's overlap schedule."""
    outcomes: Counter[str] = Counter()
    labels = Labels(SimpleNamespace(count_outcome=lambda it, exact: outcomes.update([it])))  # type: ignore[arg-type]
    cache, taken, other = SilentCache(lambda: 0.0), request("taken"), request("other")
    taken.prefix_len = 0
    nothing = SimpleNamespace(exact=0, approximate=0)
    pool = SimpleNamespace(has_approximate=False, held=lambda *_: nothing)
    waiting, tree = waiting_on(cache, [], labels=labels, is_experiment=False, pool=pool), None
    assert waiting.look([taken], tree, is_decoding=False) == {"taken"}
    for step in PLAN.steps:
        cache.stagings[0].land(step, 40)
    assert waiting.look([taken, other], tree, is_decoding=False) == {"other"}
    keys = [page.hex() for page in prefixes.own_pages_of(taken, 4 * PAGE, PAGE)]
    assert waiting.take("taken", keys, torch.arange(4 * PAGE))
    (loading,) = waiting.start()
    waiting.admitted([taken])
    labels.note(taken, RequestProvenance(outcome="reused", reused_tokens=4 * PAGE))

    taken.is_retracted = True
    labels.report([taken])
    loading.settle()
    assert waiting.look([other, taken], tree, is_decoding=False) == {"other", "taken"}
    assert len(cache.stagings) == 3
    cache.stagings[2].fail(FetchError("a test"))
    assert waiting.look([other, taken], tree, is_decoding=False) == {"other"}
    assert not prefixes.is_approximate(taken)
    waiting.admitted([taken])
    taken.is_retracted = False
    for _ in range(2):
        labels.report([taken])
    assert outcomes == {"fallback: FetchError": 1}
    (told,) = taken.customized_info[KEY]
    assert told["exact"]
    waiting.clear()
    assert cache.memory.held_bytes == 0


def staging_of(memory: Arena) -> Staging:
    parts = dict.fromkeys(PLAN.steps, Blocks(1, STEP_BYTES))
    return staged(memory, parts, Deadline.after(60))


def test_what_the_pool_has_no_more_takes_no_slots() -> None:
    """SGLang may evict it while the request waits, until its slots are given."""
    in_pool = replace(PLAN, location=Location("pool:another"))
    locks = iter([None, PoolPages(torch.arange(4 * PAGE))])
    pool = SimpleNamespace(has_approximate=False, find=lambda *_: True, lock=lambda *_: next(locks))
    planner = planner_of(plan=in_pool, patience=Patience(saving_s=1e3))
    waiting = waiting_on(SilentCache(), [], planner=planner, pool=pool)
    req, tree = request(), None
    assert not waiting.look([req], tree, is_decoding=False), "nothing is to be fetched"
    keys = [page.hex() for page in prefixes.own_pages_of(req, 4 * PAGE, PAGE)]
    assert not waiting.take("r1", keys, torch.arange(4 * PAGE))
    assert not waiting.start()
    assert waiting.take("r1", keys, torch.arange(4 * PAGE))


def test_a_load_that_is_cancelled_before_it_starts_gives_its_memory_back() -> None:
    cache, req, tree = SilentCache(), request(), None
    waiting = waiting_on(cache, [], meter=FakeMeter(recompute=SLOW))
    assert waiting.look([req], tree, is_decoding=False)
    assert not waiting.cancel("r1"), "it has no slots yet"
    cache.stagings[0].land(E, STEP_BYTES)
    assert not waiting.look([req], tree, is_decoding=False)
    keys = [page.hex() for page in prefixes.own_pages_of(req, 4 * PAGE, PAGE)]
    assert waiting.take("r1", keys, torch.arange(4 * PAGE))
    assert not waiting.take("r1", keys, torch.arange(4 * PAGE)), "it has slots"
    assert not waiting.cancel("r2")
    assert cache.memory.held_bytes
    assert waiting.cancel("r1")
    assert cache.memory.held_bytes == 0
    assert isinstance(cache.stagings[0].error, Cancelled)
    assert not waiting.cancel("r1")
    assert not waiting.start()
    waiting.look([req], tree, is_decoding=False)
    assert len(cache.stagings) == 2, "it is planned anew"
    waiting.clear()


class Held:
    """One request whose fetch is under way, and whose recompute takes longer than any fetch."""

    def __init__(self) -> None:
        self.memory = Arena(1 << 20)
        self.staging = staging_of(self.memory)
        settings = SimpleNamespace(
            hicache_backend=None,
            fetch_deadline_s=60.0,
            max_stall_s=None,
            gate="none",
            min_tokens=1,
        )
        self.req = request()
        self._waiting = made(
            WaitingRequests,
            sources=Sources(
                SimpleNamespace(settings=settings, page_size=PAGE),
                SimpleNamespace(fetch=lambda *_: self.staging, link=lambda _location: None),
                SimpleNamespace(has_approximate=False),
                KV,
            ),
            meter=FakeMeter(
                recompute=SLOW,
                prefill=SimpleNamespace(knows=lambda _: True, seconds=lambda *_: 3600.0),
            ),
            planner=planner_of(patience=Patience(saving_s=3600.0)),
            in_flight=SimpleNamespace(follow=lambda *_: False, prune=lambda _waiting: None),
            ranks=Ranks(None),
        )

    def is_held(self) -> bool:
        return bool(self._waiting.look([self.req], None, is_decoding=False))

    def land(self, *steps: Step) -> None:
        for step in steps:
            self.staging.write(step, 0, memoryview(bytes(STEP_BYTES)))


def test_without_e_nothing_is_recomputed_however_fast_the_rest_arrives() -> None:
    it = Held()
    assert it.is_held()
    it.land(FIRST_KV, LAST_KV)
    time.sleep(0.001)
    assert it.is_held()
    it.land(E)
    assert not it.is_held()


def test_with_e_the_rest_may_arrive_beside_the_recompute() -> None:
    it = Held()
    assert it.is_held()
    it.land(E)
    assert not it.is_held()


def test_a_source_that_is_gone_leaves_no_hit_behind() -> None:
    """SGLang forgets a hit where it loads it, and where a request is aborted."""
    waiting, req, wrapper = MagicMock(), request(), SimpleNamespace(hit_markers={})
    queue = Queue(waiting, MagicMock(), MagicMock(), Ranks(None))

    def match(it: Any, _key: object, req: Any, result: object) -> object:
        it.hit_markers[req.rid] = "its pages"
        return result

    for has_source in (True, False):
        waiting.has_source.return_value = has_source
        assert queue.match(match, wrapper, None, req, "result") == "result"
        assert bool(wrapper.hit_markers) == has_source
