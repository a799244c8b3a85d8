"""Requests in the queues of two ranks against a slow model: hypothesis chooses what happens.

The second rank has the same resources and no planner: it only follows the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from standins import (
    NUM_PAGES,
    PAGE,
    PLAN,
    STEP_BYTES,
    TREE,
    UNCOUNTED,
    Asked,
    Now,
    Pair,
    counting_on,
    keys_of,
    look,
    planner_that,
    request,
    waiting_with,
)

from cachetree.clock import Deadline
from cachetree.errors import Cancelled, FetchError
from cachetree.ids import Location, Span
from cachetree.names import ModelNames
from cachetree.planning import Patience
from cachetree.planning.plan import Plan
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import reusable_pages
from sglang_droidspeak.request.arrivals import NUM_NEXT
from sglang_droidspeak.request.planner import Declined, Planned
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.request.request import Phase
from sglang_droidspeak.start.config import at_rank
from sglang_droidspeak.store.pool import Held

PLANNED: Final = ("approximate", "experiment", "exact", "exact experiment", "optional")
KINDS: Final = (
    *(*PLANNED, "no_match", "follows", "off", "too_short", "on_device", "session", "error"),
)
"""Kinds of request, by what the planner chooses: a plan, or the reason why there is none."""
DEADLINE_S, SAVING_S = 10.0, 2.0
NUM_BYTES: Final = len(PLAN.steps) * STEP_BYTES
PAGES: Final[list[Any]] = []
KEYS: Final[dict[bool, list[str]]] = {}
"""Keys of requests, by whether they read approximate KV. All requests have the same tokens."""
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
    """A cache with memory for a limited number of fetches at once. The fetches end in time by this
    clock."""

    room = 3
    num_asked = 0

    def fetch(self, plan: Plan, pages: Any, deadline: Deadline, context: str) -> Any:
        self.num_asked += 1
        if sum(not it.is_released for it in self.stagings) >= self.room:
            return None
        return super().fetch(
            plan, pages, Deadline(self._clock() + DEADLINE_S, self._clock), context
        )


def choice_for(req: Any, has: Held) -> Planned | Declined:
    if req.kind in ("too_short", "no_match", "follows"):
        considered = counting_on(has.exact, has.approximate)
        outcome = "no_match" if req.kind == "follows" else req.kind
        return Declined(outcome, "in words", considered=considered)
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


class Rank:
    """The waiting requests of one rank, and the resources of this rank."""

    def __init__(self, now: Now, number: int, **parts: Any) -> None:
        self.cache = Limited(now)
        self.cache.has_approximate = True
        self.waiting, self.recorded = waiting_with(self.cache, **parts)
        self.queue: list[Any] = []
        self.location = Location(at_rank(PLAN.location, number))


@dataclass(eq=False)
class Fetch:
    plan: Plan
    begun_s: float
    num_landed: int = 0
    has_failed: bool = False
    is_late: bool = False
    is_released: bool = False


@dataclass(eq=False)
class Entry:
    """A request's stay in the queue, from when it was first seen."""

    req: Any
    seen_s: float
    phase: Phase = Phase.SEEN
    plan: Plan | None = None
    fetch: Fetch | None = None
    num_there: int = 0
    """Number of pages on the device that the request counts on."""
    runnable_s: float | None = None

    def settle(self) -> None:
        if self.fetch is not None:
            self.fetch.is_released = True
        self.phase, self.fetch, self.num_there = Phase.SETTLED, None, 0


class Model:
    """A model of the phases of requests, written as simply as possible."""

    def __init__(self, now: Now) -> None:
        self.now, self.has, self.room, self.pays = now, Held(2, 3), 3, True
        self.entries: dict[str, Entry] = {}
        self.fetches: list[Fetch] = []
        self.num_asked = 0
        """Number of times that memory for a fetch was asked for."""
        self.notes: list[tuple[str, str, str | None, float]] = []
        self.approximate: set[str] = set()
        """Requests that read approximate KV."""
        self.loaded: set[int] = set()
        """Numbers of pages that were loaded as approximate KV."""
        self.begun: list[int] = []
        """Number of fetches that had begun when each plan was made."""

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
                self.read(entry, self.is_longer(entry))
        return {it.req.rid for it in entries if it.phase in (Phase.SEEN, Phase.FETCHING)}

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
        req, choice = entry.req, choice_for(entry.req, self.has)
        if req.kind != "session":
            self.begun.append(len(self.fetches))
        if isinstance(choice, Planned) and req.was_told and "exact" not in req.kind.split():
            choice = Declined("off")
        if isinstance(choice, Planned):
            entry.phase, entry.plan = Phase.PLANNED, choice.plan
            self.begin(entry)
            return
        is_near = choice.outcome in ("no_match", "too_short", "on_device")
        self.read(entry, is_near and self.is_longer(entry))
        if req.kind == "follows" and req.rid not in self.approximate:
            return
        entry.settle()
        self.notes.append((req.rid, choice.outcome, choice.detail or None, 0.0))
        if choice.outcome == "too_short":
            is_approximate = req.rid in self.approximate
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
        """Return the cause for which the request is given up, if any."""
        fetch = entry.fetch
        if fetch is None:
            return ""
        if fetch.num_landed == NUM_BYTES:
            entry.phase = Phase.READY
            return ""
        if fetch.has_failed:
            return "fallback: FetchError"
        if self.now() >= fetch.begun_s + DEADLINE_S:
            fetch.is_late = True
            return "fallback: DeadlineExceeded"
        most_s = math.inf if entry.req.kind == "optional" else entry.req.saving_s
        return "fallback: SlowLink" if self.waited_s(entry) > most_s else ""

    def waited_s(self, entry: Entry) -> float:
        return 0.0 if entry.runnable_s is None else self.now() - entry.runnable_s

    def num_approximate(self, entry: Entry, num_read: int) -> int:
        """Return how many tokens of the first `num_read` pages are approximate on the device."""
        if entry.req.rid not in self.approximate:
            return 0
        return PAGE * sum(it in self.loaded for it in range(num_read))

    def give_up(self, entry: Entry, outcome: str) -> None:
        queued_ms = round(1000 * (self.now() - entry.seen_s), 3)
        self.notes.append((entry.req.rid, outcome, None, queued_ms))
        entry.settle()

    def read(self, entry: Entry, is_approximate: bool) -> None:
        (self.approximate.add if is_approximate else self.approximate.discard)(entry.req.rid)

    def is_longer(self, entry: Entry) -> bool:
        """Return whether a request that may read approximate KV finds more of it than of exact
        KV."""
        return not entry.req.was_told and self.has.approximate > self.has.exact


def event(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a function as an event. SGLang looks at the queue after it, unless more events come
    first."""

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
    """SGLang's scheduler, its device and the network, together with the ranks and the model."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.now = Now(self.patch)
        self.model, pair = Model(self.now), Pair()
        planner = planner_that(self.plan)
        planner.still_saves = self.still_saves
        followers = SimpleNamespace(
            follow=lambda it, *_: it.req.kind == "follows",
            prune=lambda _waiting: None,
            clear=lambda: None,
        )
        self.ranks = [
            Rank(self.now, number, planner=it, followers=followers, ranks=pair.rank(number))
            for number, it in enumerate((planner, planner_that(None)))  # type: ignore[arg-type]
        ]
        self.cache = self.ranks[0].cache
        self.begun: list[int] = []
        self.hold_pages(self.model.has)
        self.num_rids, self.is_quiet = 0, False

    @property
    def queue(self) -> list[Any]:
        return self.ranks[0].queue

    def plan(self, req: Any, pages: Any, tree: Any, num_waiting: int) -> Planned | Declined:
        assert (pages, tree, num_waiting) == (PAGES, TREE, len(self.queue) - 1)
        self.begun.append(len(self.cache.fetched))
        if req.kind == "error":
            raise RuntimeError("a test")
        assert req.kind != "session"
        return choice_for(req, self.cache.has)

    def still_saves(self, plan: Plan, demand: Any, has: Held) -> bool:
        assert (demand.first_page, has) == (plan.pages.start, self.cache.has)
        assert self.cache.where[-1][1:] == (len(PAGES), TREE)
        return self.model.pays

    def teardown(self) -> None:
        for rank in self.ranks:
            rank.waiting.clear()
            assert rank.cache.memory.lent_bytes == 0
        self.patch.undo()

    # What comes and goes.

    @rule(
        kind=st.sampled_from((*KINDS, *PLANNED)),
        is_patient=st.booleans(),
        is_skipped=st.booleans(),
        was_told=st.sampled_from((False, False, True)),
    )
    @event
    def arrive(self, kind: str, **drawn: bool) -> None:
        self.come(kind, **drawn)

    @rule(kind=st.sampled_from(KINDS))
    @event
    def crowd(self, kind: str) -> None:
        """Queue more requests than a step may take."""
        for _ in range(NUM_NEXT + 2):
            self.come(kind)

    def come(self, kind, is_patient=True, is_skipped=False, was_told=False, rid=""):
        """Queue a request. A request that was told that it is exact, and then retracted, stays
        exact."""
        self.num_rids += 1
        rid = rid or f"r{self.num_rids}"
        fields = {"kind": kind, "saving_s": math.inf if is_patient else SAVING_S}
        fields["session"] = object() if kind == "session" else None
        for rank in self.ranks:
            req = request(rid, skip_radix_cache_insert=is_skipped, was_told=was_told, **fields)
            if was_told:
                Labels(UNCOUNTED, ModelNames()).report([req])
            rank.queue.append(req)

    @precondition(lambda self: self.queue)
    @rule(at=places, kind=st.sampled_from(KINDS), comes_again=st.booleans())
    @event
    def leave(self, at: int, kind: str, comes_again: bool) -> None:
        """Abort a request. Another request may come with the same name."""
        req = self.remove(self.queue[at % len(self.queue)])
        if comes_again:
            self.come(kind, rid=req.rid)

    def remove(self, req: Any) -> Any:
        place = self.queue.index(req)
        for rank in self.ranks:
            rank.queue.pop(place)
        return req

    @rule(seconds=st.sampled_from((0.0001234567, 0.5, 1.5, 6.0)))
    @event
    def wait(self, seconds: float) -> None:
        self.now.now_s += seconds

    @rule(has=helds)
    @event
    def hold(self, has: Held) -> None:
        self.hold_pages(has)

    def hold_pages(self, has: Held) -> None:
        self.model.has = has
        for rank in self.ranks:
            rank.cache.has = has

    @rule()
    @event
    def lose(self) -> None:
        has = self.cache.has
        self.hold_pages(Held(max(0, has.exact - 1), max(0, has.approximate - 1)))

    @rule(pays=st.booleans())
    @event
    def think_again(self, pays: bool) -> None:
        self.model.pays = pays

    @rule(room=st.integers(0, 3))
    @event
    def make_room(self, room: int) -> None:
        self.model.room = room
        for rank in self.ranks:
            rank.cache.room = room

    @precondition(lambda self: self.fetching())
    @rule(at=places, num_steps=st.sampled_from((1, len(PLAN.steps))))
    @event
    def land(self, at: int, num_steps: int) -> None:
        self.finish(self.fetching()[at % len(self.fetching())], num_steps)

    def finish(self, number: int, num_steps: int) -> None:
        staging, fetch = self.cache.stagings[number], self.model.fetches[number]
        for step in [it for it in staging.steps if not staging.has_landed(it)][:num_steps]:
            for rank in self.ranks:
                rank.cache.stagings[number].land(step, STEP_BYTES)
            fetch.num_landed += STEP_BYTES

    @precondition(lambda self: self.fetching())
    @rule(at=places)
    @event
    def fail(self, at: int) -> None:
        number = self.fetching()[at % len(self.fetching())]
        for rank in self.ranks:
            rank.cache.stagings[number].fail(FetchError("a test"))
        self.model.fetches[number].has_failed = True

    def fetching(self) -> list[int]:
        """Return the fetches that may still continue."""
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
        held = [look(rank.waiting, *rank.queue) for rank in self.ranks]
        assert held == 2 * [self.model.look(self.queue)]
        assert self.begun == self.model.begun
        for rank in self.ranks:
            self.check(rank)

    def check(self, rank: Rank) -> None:
        plans = [replace(it.plan, location=rank.location) for it in self.model.fetches]
        assert rank.cache.fetched == [(plan, PAGES) for plan in plans]
        waiting = rank.waiting
        for req in rank.queue:
            assert prefixes.is_approximate(req) == (req.rid in self.model.approximate)
            entry, keys = self.model.entries[req.rid], KEYS[prefixes.is_approximate(req)]
            has_source = entry.phase in (Phase.FETCHING, Phase.READY)
            assert waiting.has_source(req.rid) == has_source
            assert [waiting.num_restorable(req.rid, it) for it in keys] == [
                NUM_PAGES - i if entry.plan and has_source and i in entry.plan.pages else 0
                for i in range(NUM_PAGES)
            ]
            assert waiting.num_restorable(req.rid, "00" * 32) == 0
            assert waiting.step_tokens(req.rid, 3) == (2 if has_source else 0)
        assert waiting.num_restorable("another", KEYS[False][0]) == 0
        assert waiting.step_tokens("another", 3) == 0

    @invariant()
    def each_request_has_one_note_of_its_end(self) -> None:
        notes = self.ranks[0].recorded.notes
        notes = [(rid, it.outcome, it.detail, it.queued_ms) for rid, it in notes]
        assert notes == self.model.notes
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
        for rank in self.ranks:
            rank.waiting.pass_over([entry.req.rid, "another"])
        if entry.runnable_s is None:
            entry.runnable_s = self.now()

    @precondition(lambda self: self.known())
    @rule(at=places, num_on_device=st.integers(NUM_PAGES - 1, NUM_PAGES))
    @event
    def admit(self, at: int, num_on_device: int) -> None:
        """Admit a request without the KV that its plan would load."""
        entry = self.known()[at % len(self.known())]
        num_approximate = self.model.num_approximate(entry, num_on_device)
        if entry.phase in WAITING:
            outcome = "staging_full" if entry.fetch is None else "no_slots"
            is_there = num_on_device == NUM_PAGES
            self.model.give_up(entry, "on_device" if is_there else outcome)
        del self.model.entries[entry.req.rid]
        place = self.queue.index(entry.req)
        for rank in self.ranks:
            req = rank.queue.pop(place)
            req.prefix_len = num_on_device * PAGE
            rank.waiting.admitted([req])
            assert prefixes.num_approximate(req) == num_approximate

    @precondition(lambda self: self.known())
    @rule(
        at=places,
        first=st.integers(0, NUM_PAGES - 1),
        is_cancelled=st.booleans(),
        all_land=st.booleans(),
    )
    @event
    def take(self, at: int, first: int, is_cancelled: bool, all_land: bool) -> None:
        """Load what is left from page `first` on, or give the slots back before the batch
        starts."""
        for number in self.fetching() if all_land else ():
            self.finish(number, len(PLAN.steps))
        self.look()
        known = [it for it in self.known() if it.phase is Phase.READY] or self.known()
        entry = known[at % len(known)]
        place, kind = self.queue.index(entry.req), entry.req.kind
        is_taken = entry.phase is Phase.READY and first in entry.plan.pages  # type: ignore[union-attr]
        num_tokens = (NUM_PAGES - first) * PAGE
        num_approximate = self.model.num_approximate(entry, first)
        num_approximate += 0 if "exact" in kind else num_tokens
        for rank in self.ranks:
            req = rank.queue[place]
            keys = KEYS[prefixes.is_approximate(req)][first:]
            was_skipped, slots = req.skip_radix_cache_insert, torch.arange(num_tokens)
            assert rank.waiting.take(req.rid, keys, slots) == is_taken
            is_kept_apart = is_taken and kind == "experiment"
            assert req.skip_radix_cache_insert == (was_skipped or is_kept_apart)
            if is_taken:
                assert prefixes.num_approximate(req) == num_approximate
            if is_cancelled:
                assert rank.waiting.cancel(req.rid) == is_taken
            elif is_taken:
                (loading,) = rank.waiting.start()
                assert loading.req is req
                assert loading.load.plan == replace(entry.plan, location=rank.location)
                assert loading.load.at == Span(first * PAGE, NUM_PAGES * PAGE)
                assert loading.load.slots is slots
                assert loading.queued_s == self.now() - entry.seen_s
                saving_s = 1e9 if kind == "optional" else entry.req.saving_s
                left_s = max(0.0, saving_s - self.model.waited_s(entry))
                assert loading.load.patience_s == pytest.approx(left_s)
                loading.settle()
        if is_taken:
            if kind in ("approximate", "optional"):
                self.model.loaded |= {*range(first, NUM_PAGES)}
            if not is_cancelled:
                self.remove(entry.req)
            entry.settle()
            del self.model.entries[entry.req.rid]

    def known(self) -> list[Entry]:
        """Return the entries of the queue. If any entry has a plan, return only the entries with a
        plan."""
        known = [it for it in self.model.entries.values() if it.req in self.queue]
        return [it for it in known if it.phase in WAITING] or known

    @rule()
    @event
    def clear(self) -> None:
        """Change the served model, as an update of the weights does."""
        for rank in self.ranks:
            rank.waiting.clear()
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
