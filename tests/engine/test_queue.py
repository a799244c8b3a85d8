"""SGLang's queue around requests that are held back, and loads given up before they run."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from permissive import made
from test_waiting import PAGE, PLAN, request

from cachetree.clock import Deadline
from cachetree.errors import Cancelled
from cachetree.memory.budget import Budget, BudgetedStaging
from cachetree.memory.staging import pageable
from cachetree.planning.plan import Kind, Step
from sglang_droidspeak.linker import DroidSpeakLinker
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.job import Job
from sglang_droidspeak.request.waiting import WaitingRequests

STEP_BYTES = 40


class Round:
    """One round of SGLang's scheduler, with some requests held back."""

    def __init__(self, queue: str, held: str) -> None:
        self.queue = [SimpleNamespace(rid=rid) for rid in queue]
        self.scheduler = SimpleNamespace(
            waiting_queue=list(self.queue),
            tree_cache=None,
            chunked_req=None,
            grammar_manager=SimpleNamespace(
                has_waiting_grammars=lambda: False,
                get_ready_grammar_requests=list,
                grammar_queue=[],
            ),
        )
        self.linker = MagicMock()
        self.linker._waiting.look.return_value = set(held)
        self.seen = ""

    def run(self, admitted: str = "", retracted: str = "", fails: bool = False) -> str:
        """The queue afterwards. `retracted` is put where SGLang puts what it takes back."""

        def original(scheduler: Any, **_: Any) -> Any:
            self.seen = names(scheduler.waiting_queue)
            scheduler.waiting_queue = [
                req for req in scheduler.waiting_queue if req.rid not in admitted
            ]
            scheduler.waiting_queue += [SimpleNamespace(rid=rid) for rid in retracted]
            if fails:
                raise RuntimeError("a test")
            return MagicMock(), MagicMock()

        running = MagicMock()
        DroidSpeakLinker._new_prefill(self.linker, original, self.scheduler, running_batch=running)
        return names(self.scheduler.waiting_queue)


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


def test_nobody_is_lost_where_a_step_fails() -> None:
    step = Round("abcd", "ac")
    with pytest.raises(RuntimeError, match="a test"):
        step.run("b", fails=True)
    assert names(step.scheduler.waiting_queue) == "acd"


def staging_of(budget: Budget) -> BudgetedStaging:
    sizes = dict.fromkeys(PLAN.steps, STEP_BYTES)
    assert budget.take(sum(sizes.values()))
    return BudgetedStaging(sizes, Deadline.after(60), pageable, budget, lambda _staging: None)


def test_a_load_that_is_cancelled_before_it_starts_gives_its_memory_back() -> None:
    budget = Budget(1 << 20)
    linker = MagicMock()
    job = Job(
        rid="r1",
        plan=PLAN,
        staging=staging_of(budget),
        pages=PLAN.pages,
        slots=torch.arange(4 * PAGE),
        page_size=PAGE,
        match_s=0.0,
        queued_s=0.0,
    )
    linker._queued = {"r1": job}
    assert not DroidSpeakLinker.cancel_queued_load(linker, "r2")
    assert budget.num_bytes
    assert DroidSpeakLinker.cancel_queued_load(linker, "r1")
    assert (budget.num_bytes, linker._queued) == (0, {})
    assert isinstance(job.staging.error, Cancelled)
    assert not DroidSpeakLinker.cancel_queued_load(linker, "r1")


class Held:
    """One request whose fetch is under way, and whose recompute takes longer than any fetch."""

    def __init__(self) -> None:
        self.budget = Budget(1 << 20)
        self.staging = staging_of(self.budget)
        settings = SimpleNamespace(
            hicache_backend=None,
            fetch_deadline_s=60.0,
            max_stall_s=None,
            gate="off",
            min_tokens=1,
        )
        planned = SimpleNamespace(
            plan=PLAN,
            is_optional=False,
            is_experiment=False,
            patience_s=3600.0,
            step_share=0.0,
            pool_pages=None,
        )
        self.req = request()
        self._waiting = made(
            WaitingRequests,
            site=SimpleNamespace(settings=settings, page_size=PAGE),
            cache=SimpleNamespace(fetch=lambda *_: self.staging),
            provenance=SimpleNamespace(any_approximate=False),
            meter=SimpleNamespace(s_per_token_layer=3600.0, full_prefill_s=lambda _tokens: 3600.0),
            planner=SimpleNamespace(plan=lambda *_: planned),
            leaders=SimpleNamespace(follow=lambda *_: None, prune=lambda _waiting: None),
            ranks=Ranks(None),
        )

    def is_held(self) -> bool:
        return bool(self._waiting.look([self.req], None, is_decoding=False))

    def land(self, *steps: Step) -> None:
        for step in steps:
            self.staging.write(step, 0, memoryview(bytes(STEP_BYTES)))


E, FIRST_KV, LAST_KV = Step(Kind.E, 1), Step(Kind.KV, 0), Step(Kind.KV, 3)


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
