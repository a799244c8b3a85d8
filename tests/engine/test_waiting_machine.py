"""Requests in the queue against a slow model of them: hypothesis chooses what happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from waiting_parts import (
    NUM_PAGES,
    PAGE,
    PLAN,
    STEP_BYTES,
    Asked,
    Now,
    counting_on,
    keys_of,
    look,
    planner_that,
    request,
    waiting_with,
)

from cachetree.clock import Deadline
from cachetree.errors import Cancelled, FetchError
from cachetree.ids import Span
from cachetree.planning import Patience
from cachetree.planning.plan import Plan
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import reusable_pages
from sglang_droidspeak.request.arrivals import NUM_NEXT
from sglang_droidspeak.request.planner import Declined, Planned
from sglang_droidspeak.request.request import Phase
from sglang_droidspeak.store.pool import Held

PLANNED: Final = ("approximate", "experiment", "exact", "exact experiment", "optional")
KINDS: Final = (*PLANNED, "no_match", "off", "too_short", "on_device", "session", "error")
"""What is found for a request: a plan, or why there is none."""
DEADLINE_S, SAVING_S = 10.0, 2.0
NUM_BYTES: Final = len(PLAN.steps) * STEP_BYTES
PAGES: Final[list[Any]] = []
KEYS: Final[dict[bool, list[str]]] = {}
"""By whether the request reads approximate KV; all have the same tokens."""
WAITING: Final = (Phase.PLANNED, Phase.FETCHING, Phase.READY)


@pytest.fixture(scope="module", autouse=True)
def _pages() -> None:
    req = request()
    req.refresh_fill_ids()
    PAGES[:] = reusable_pages(req, PAGE)
    for is_approximate in (False, True):
        prefixes.move(req, approximate=is_approximate)
        KEYS[is_approximate] = keys_of(req)


class Limited(Asked):
    """Has memory for so many fetches at once, which end in time by this clock."""

    room = 3
    num_asked = 0

    def fetch(self, plan: Plan, pages: Any, deadline: Deadline, context: str) -> Any:
        self.num_asked += 1
        if sum(not it.is_released for it in self.stagings) >= self.room:
            return None
        return super().fetch(
            plan, pages, Deadline(self._clock() + DEADLINE_S, self._clock), context
        )


def found_for(req: Any, has: Held) -> Planned | Declined:
    if req.kind in ("too_short", "no_match"):
        considered = counting_on(has.exact, has.approximate)
        return Declined(req.kind, "in words", considered=considered)
    if req.kind not in PLANNED:
        return Declined(req.kind)
    start = min(has.exact, NUM_PAGES - 1)
    return Planned(
        plan=replace(
            PLAN,
            sender=PLAN.receiver if "exact" in req.kind else PLAN.sender,
            pages=Span(start, NUM_PAGES),
        ),
        is_experiment="experiment" in req.kind,
        patience=Patience(saving_s=1e9 if req.kind == "optional" else req.saving_s),
        step_share=0.5,
        considered=counting_on(start) if req.kind == "optional" else None,
    )


@dataclass(eq=False)
class Fetch:
    """One that was begun, and what has become of it."""

    plan: Plan
    begun_s: float
    num_landed: int = 0
    has_failed: bool = False
    is_late: bool = False
    is_released: bool = False


@dataclass(eq=False)
class Entry:
    """A request of the queue: one stay, from its first sight."""

    req: Any
    seen_s: float
    phase: Phase = Phase.SEEN
    plan: Plan | None = None
    fetch: Fetch | None = None
    num_there: int = 0
    """Pages of the device that it counts on."""
    runnable_s: float | None = None

    def settle(self) -> None:
        if self.fetch is not None:
            self.fetch.is_released = True
        self.phase, self.fetch, self.num_there = Phase.SETTLED, None, 0


class Model:
    """What is to become of each request."""

    def __init__(self, now: Now) -> None:
        self.now, self.has, self.room, self.pays = now, Held(2, 3), 3, True
        self.entries: dict[str, Entry] = {}
        self.fetches: list[Fetch] = []
        self.num_asked = 0
        """Times that memory for one was asked for."""
        self.notes: list[tuple[str, str, str | None, float]] = []
        self.approximate: set[str] = set()
        """Who reads approximate KV."""

    def look(self, queue: list[Any]) -> set[str]:
        self.see_anew([self.entries[it.rid] for it in queue if it.rid in self.entries])
        for req in queue:
            if req.rid not in self.entries or self.entries[req.rid].req is not req:
                self.see(req)
        for rid in self.entries.keys() - {it.rid for it in queue}:
            self.entries.pop(rid).settle()
        entries = [self.entries[it.rid] for it in queue]
        seen = [it for it in entries if it.phase is Phase.SEEN]
        for entry in seen:
            self.decide(entry)
        planned = [it for it in entries if it.phase in WAITING]
        for entry in [it for it in planned if it.fetch is None]:
            if not self.begin(entry):
                break
        without = [it for it in planned if it.fetch is None]
        following = [it for it in planned if it.phase is not Phase.FETCHING][:NUM_NEXT]
        for entry in planned:
            had_come = entry.phase is Phase.READY
            outcome = self.outcome_of(entry)
            has_come = entry.phase is Phase.READY and (not had_come or entry in following)
            if has_come and entry.req.kind == "optional" and not self.pays:
                outcome = "slower"
            if outcome:
                self.give_up(entry, outcome)
            if entry.phase in (Phase.FETCHING, Phase.READY):
                self.read(entry, entry.req.kind in ("approximate", "optional"))
            elif outcome or entry in seen or entry in without[:NUM_NEXT]:
                self.read(entry, self.is_longer)
        return {it.req.rid for it in entries if it.phase is Phase.FETCHING}

    def see_anew(self, known: list[Entry]) -> None:
        for entry in [it for it in known if it.num_there][:NUM_NEXT]:
            is_approximate = entry.req.rid in self.approximate
            has = self.has.approximate if is_approximate else self.has.exact
            if has < entry.num_there:
                was_over = entry.phase in (Phase.READY, Phase.SETTLED)
                self.see(entry.req).runnable_s = None if was_over else entry.runnable_s

    def see(self, req: Any) -> Entry:
        if req.rid in self.entries:
            self.entries[req.rid].settle()
        self.entries[req.rid] = entry = Entry(req, self.now())
        self.read(entry, False)
        return entry

    def decide(self, entry: Entry) -> None:
        found = found_for(entry.req, self.has)
        if isinstance(found, Planned):
            entry.phase, entry.plan = Phase.PLANNED, found.plan
            self.begin(entry)
            return
        entry.settle()
        self.notes.append((entry.req.rid, found.outcome, found.detail or None, 0.0))
        is_approximate = found.outcome in ("no_match", "too_short", "on_device") and self.is_longer
        self.read(entry, is_approximate)
        if found.outcome == "too_short":
            entry.num_there = self.has.approximate if is_approximate else self.has.exact

    def begin(self, entry: Entry) -> bool:
        self.num_asked += 1
        if sum(not it.is_released for it in self.fetches) >= self.room:
            return False
        assert entry.plan is not None
        entry.phase, entry.fetch = Phase.FETCHING, Fetch(entry.plan, self.now())
        entry.num_there = entry.plan.pages.start
        self.fetches.append(entry.fetch)
        return True

    def outcome_of(self, entry: Entry) -> str:
        """Why it is given up, if it is."""
        it = entry.fetch
        if it is None:
            return ""
        if it.num_landed == NUM_BYTES:
            entry.phase = Phase.READY
            return ""
        if it.has_failed:
            return "fallback: FetchError"
        if self.now() >= it.begun_s + DEADLINE_S:
            it.is_late = True
            return "fallback: DeadlineExceeded"
        waited_s = 0.0 if entry.runnable_s is None else self.now() - entry.runnable_s
        most_s = math.inf if entry.req.kind == "optional" else entry.req.saving_s
        return "fallback: SlowLink" if waited_s > most_s else ""

    def give_up(self, entry: Entry, outcome: str) -> None:
        queued_ms = round(1000 * (self.now() - entry.seen_s), 3)
        self.notes.append((entry.req.rid, outcome, None, queued_ms))
        entry.settle()

    def read(self, entry: Entry, is_approximate: bool) -> None:
        (self.approximate.add if is_approximate else self.approximate.discard)(entry.req.rid)

    @property
    def is_longer(self) -> bool:
        """Whether the device has more approximate KV than exact."""
        return self.has.approximate > self.has.exact


def event(function: Callable[..., None]) -> Callable[..., None]:
    """Behind it SGLang looks at the queue, unless more is to happen before."""

    @wraps(function)
    def then_looks(self: WaitingMachine, **drawn: Any) -> None:
        function(self, **drawn)
        if not self.is_quiet:
            self.look()
        self.is_quiet = False

    return then_looks


places = st.integers(0, 9)
helds = st.builds(Held, st.integers(0, NUM_PAGES), st.integers(0, NUM_PAGES))


class WaitingMachine(RuleBasedStateMachine):
    """SGLang's scheduler, its device and the network, with both."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.now = Now(self.patch)
        self.model, self.cache = Model(self.now), Limited(self.now)
        self.cache.has, self.cache.has_approximate = self.model.has, True
        planner = planner_that(lambda req, *_: self.found_for(req))
        planner.still_saves = lambda plan, demand, has: self.model.pays
        self.waiting, self.told = waiting_with(self.cache, planner=planner)
        self.queue: list[Any] = []
        self.num_rids, self.is_quiet = 0, False

    def found_for(self, req: Any) -> Planned | Declined:
        if req.kind in ("error", "session"):
            raise RuntimeError("a test: not to be planned, or to fail")
        return found_for(req, self.cache.has)

    def teardown(self) -> None:
        self.waiting.clear()
        assert self.cache.memory.lent_bytes == 0
        self.patch.undo()

    # What comes and goes.

    @rule(
        kind=st.sampled_from((*KINDS, *PLANNED)), is_patient=st.booleans(), is_skipped=st.booleans()
    )
    @event
    def arrive(self, kind: str, is_patient: bool, is_skipped: bool) -> None:
        self.come(kind, is_patient, is_skipped)

    @rule(kind=st.sampled_from(KINDS))
    @event
    def crowd(self, kind: str) -> None:
        """More than a step may take."""
        for _ in range(NUM_NEXT + 2):
            self.come(kind)

    def come(
        self, kind: str, is_patient: bool = True, is_skipped: bool = False, rid: str = ""
    ) -> None:
        self.num_rids += 1
        rid = rid or f"r{self.num_rids}"
        saving_s = math.inf if is_patient else SAVING_S
        session = object() if kind == "session" else None
        fields = {"kind": kind, "saving_s": saving_s, "session": session}
        self.queue.append(request(rid, skip_radix_cache_insert=is_skipped, **fields))

    @precondition(lambda self: self.queue)
    @rule(at=places, kind=st.sampled_from(KINDS), comes_again=st.booleans())
    @event
    def leave(self, at: int, kind: str, comes_again: bool) -> None:
        """Aborted; another one may come with its name."""
        req = self.queue.pop(at % len(self.queue))
        if comes_again:
            self.come(kind, rid=req.rid)

    @rule(seconds=st.sampled_from((0.0001234567, 0.5, 1.5, 6.0)))
    @event
    def wait(self, seconds: float) -> None:
        self.now.now_s += seconds

    @rule(has=helds)
    @event
    def hold(self, has: Held) -> None:
        self.cache.has = self.model.has = has

    @rule()
    @event
    def lose(self) -> None:
        has = self.cache.has
        self.cache.has = self.model.has = Held(max(0, has.exact - 1), max(0, has.approximate - 1))

    @rule(pays=st.booleans())
    @event
    def think_again(self, pays: bool) -> None:
        self.model.pays = pays

    @rule(room=st.integers(0, 3))
    @event
    def make_room(self, room: int) -> None:
        self.cache.room = self.model.room = room

    @precondition(lambda self: self.fetching())
    @rule(at=places, num_steps=st.sampled_from((1, len(PLAN.steps))))
    @event
    def land(self, at: int, num_steps: int) -> None:
        self.finish(self.fetching()[at % len(self.fetching())], num_steps)

    def finish(self, number: int, num_steps: int) -> None:
        staging, fetch = self.cache.stagings[number], self.model.fetches[number]
        for step in [it for it in staging.steps if not staging.has_landed(it)][:num_steps]:
            staging.land(step, STEP_BYTES)
            fetch.num_landed += STEP_BYTES

    @precondition(lambda self: self.fetching())
    @rule(at=places)
    @event
    def fail(self, at: int) -> None:
        number = self.fetching()[at % len(self.fetching())]
        self.cache.stagings[number].fail(FetchError("a test"))
        self.model.fetches[number].has_failed = True

    def fetching(self) -> list[int]:
        """Fetches that may still go on."""
        return [
            number
            for number, it in enumerate(self.model.fetches)
            if not (it.is_released or it.has_failed or it.num_landed == NUM_BYTES)
        ]

    @rule()
    def hold_still(self) -> None:
        self.is_quiet = True

    # What SGLang does.

    def look(self) -> None:
        held = look(self.waiting, *self.queue)
        assert held == self.model.look(self.queue)
        assert [plan for plan, _ in self.cache.fetched] == [it.plan for it in self.model.fetches]
        assert all(pages == PAGES for _, pages in self.cache.fetched)
        for req in self.queue:
            assert prefixes.is_approximate(req) == (req.rid in self.model.approximate)
            entry, keys = self.model.entries[req.rid], KEYS[prefixes.is_approximate(req)]
            has_source = entry.phase in (Phase.FETCHING, Phase.READY)
            assert self.waiting.has_source(req.rid) == has_source
            assert [self.waiting.num_restorable(req.rid, it) for it in keys] == [
                NUM_PAGES - i if entry.plan and has_source and i in entry.plan.pages else 0
                for i in range(NUM_PAGES)
            ]
            assert self.waiting.num_restorable(req.rid, "00" * 32) == 0
            assert self.waiting.step_tokens(req.rid, 3) == (2 if has_source else 0)
        assert self.waiting.num_restorable("another", KEYS[False][0]) == 0
        assert self.waiting.step_tokens("another", 3) == 0

    @invariant()
    def each_is_told_once_what_becomes_of_it(self) -> None:
        told = [(rid, it.outcome, it.detail, it.queued_ms) for rid, it in self.told.notes]
        assert told == self.model.notes
        assert self.cache.num_asked == self.model.num_asked
        for staging, fetch in zip(self.cache.stagings, self.model.fetches, strict=True):
            assert staging.is_released == fetch.is_released
            # Given up, it fails nobody else's: a worker may be reading its disk first.
            is_over = (
                staging.is_complete or not fetch.is_released or fetch.has_failed or fetch.is_late
            )
            assert is_over or isinstance(staging.error, Cancelled)

    @precondition(lambda self: self.model.entries)
    @rule(at=places)
    @event
    def pass_over(self, at: int) -> None:
        entry = [*self.model.entries.values()][at % len(self.model.entries)]
        self.waiting.pass_over([entry.req.rid, "another"])
        if entry.runnable_s is None:
            entry.runnable_s = self.now()

    @precondition(lambda self: self.known())
    @rule(at=places, num_on_device=st.integers(NUM_PAGES - 1, NUM_PAGES))
    @event
    def admit(self, at: int, num_on_device: int) -> None:
        """Without what its plan would load."""
        entry = self.known()[at % len(self.known())]
        entry.req.prefix_len = num_on_device * PAGE
        if entry.phase in WAITING:
            outcome = "staging_full" if entry.fetch is None else "no_slots"
            is_there = num_on_device == NUM_PAGES
            self.model.give_up(entry, "on_device" if is_there else outcome)
        del self.model.entries[entry.req.rid]
        self.queue.remove(entry.req)
        self.waiting.admitted([entry.req])

    @precondition(lambda self: self.known())
    @rule(
        at=places,
        first=st.integers(0, NUM_PAGES - 1),
        is_cancelled=st.booleans(),
        all_land=st.booleans(),
    )
    @event
    def take(self, at: int, first: int, is_cancelled: bool, all_land: bool) -> None:
        """Load what is left from this page on; or give the slots back before the batch starts."""
        for number in self.fetching() if all_land else ():
            self.finish(number, len(PLAN.steps))
        self.look()
        known = [it for it in self.known() if it.phase is Phase.READY] or self.known()
        entry = known[at % len(known)]
        req, keys = entry.req, KEYS[prefixes.is_approximate(entry.req)][first:]
        was_skipped, slots = req.skip_radix_cache_insert, torch.arange(len(keys) * PAGE)
        is_taken = self.waiting.take(req.rid, keys, slots)
        assert is_taken == (entry.phase is Phase.READY and first in entry.plan.pages)  # type: ignore[union-attr]
        is_kept = is_taken and req.kind == "experiment"
        assert req.skip_radix_cache_insert == (was_skipped or is_kept)
        if is_cancelled:
            assert self.waiting.cancel(req.rid) == is_taken
        elif is_taken:
            (loading,) = self.waiting.start()
            assert (loading.req, loading.load.plan) == (req, entry.plan)
            assert (loading.load.at.start, loading.load.at.stop) == (first * PAGE, NUM_PAGES * PAGE)
            assert loading.load.slots is slots
            self.queue.remove(req)
            loading.settle()
        if is_taken:
            entry.settle()
            del self.model.entries[req.rid]

    def known(self) -> list[Entry]:
        """Requests of the queue that were looked at; with a plan, if one has."""
        known = [it for it in self.model.entries.values() if it.req in self.queue]
        return [it for it in known if it.phase in WAITING] or known

    @rule()
    @event
    def clear(self) -> None:
        """After an update of the weights, say."""
        self.waiting.clear()
        for entry in self.model.entries.values():
            entry.settle()
        self.model.entries.clear()


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
