"""Requests that wait for a fetch: held until its deadline, once, and told how long."""

from __future__ import annotations

import gc
import math
import time
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from request_parts import planned_as
from waiting_parts import (
    METER,
    PAGE,
    PLAN,
    SAVING_S,
    STORE,
    WANTED,
    Asked,
    FakeMeter,
    Now,
    keys_of,
    look,
    planner_of,
    request,
    server_with,
    waiting_with,
)

from cachetree.errors import Cancelled, FetchError
from cachetree.ids import LOCAL, Location, ModelId, Span
from cachetree.names import ModelNames
from cachetree.planning import Costs, Link, Patience, PrefillCost
from cachetree.transport import Source
from sglang_droidspeak.adapters.models import Owner
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.request.in_flight import InFlightPrefills
from sglang_droidspeak.request.labels import Labels
from sglang_droidspeak.request.planner import Declined, Planner
from sglang_droidspeak.request.queue import Queue
from sglang_droidspeak.request.waiting import WaitingRequests

DEADLINE_S = 0.2

UNCOUNTED: Any = SimpleNamespace(count_outcome=lambda *_, **__: None)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


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
    leaders = InFlightPrefills(team, team, team, PAGE)
    return waiting_with(Asked(), planner=team, in_flight=leaders)[0]


def test_a_request_is_held_until_one_deadline_after_its_first_sight() -> None:
    cache, req = Asked(time.monotonic), request()
    server = server_with(fetch_deadline_s=DEADLINE_S)
    waiting, told = waiting_with(cache, server=server)
    before_s = time.monotonic()
    assert look(waiting, req) == {req.rid}
    (staging,) = cache.stagings
    assert before_s < staging.deadline.at_s - DEADLINE_S < time.monotonic()
    while look(waiting, req):
        assert not told.notes
    assert staging.deadline.has_passed
    held_ms = 1000 * (time.monotonic() - before_s)
    ((_, note),) = told.notes
    assert note.outcome == "fallback: DeadlineExceeded"
    assert 1000 * DEADLINE_S <= note.queued_ms <= held_ms

    # It stays in the queue where there are no slots for it.
    assert not look(waiting, req)
    assert len(cache.stagings) == len(told.notes) == 1
    assert cache.memory.held_bytes == 0


def test_a_plan_that_loads_nothing_is_ready_at_once() -> None:
    """All layers are computed anew: from the receiver's own embeddings, with no E."""
    planner = planner_of(plan=replace(PLAN, block=Span(0, 4)), patience=Patience(saving_s=0.0))
    req = request()
    waiting, _ = waiting_with(Asked(), planner=planner)
    assert not look(waiting, req)
    keys = keys_of(req)
    assert waiting.take(req.rid, keys, torch.arange(4 * PAGE))


def test_a_leader_that_is_aborted_in_the_queue_holds_nobody_up_and_is_forgotten() -> None:
    waiting = waiting_in(Team())
    leader, follower = request("leads"), request("follows", "x")
    gone = weakref.ref(leader)
    for _ in range(2):
        assert look(waiting, leader, follower) == {"follows"}
    del leader
    assert not look(waiting, follower)
    assert not look(waiting)
    gc.collect()
    assert gone() is None


def test_a_leader_that_left_nothing_holds_nobody_up_after_its_first_token() -> None:
    waiting = waiting_in(Team())
    leader, follower = request("leads"), request("follows", "x")
    assert look(waiting, leader, follower) == {"follows"}
    leader.kv.holds_kv = True
    assert look(waiting, follower) == {"follows"}, "it computes"
    leader.output_ids.append(7)
    assert not look(waiting, follower)


def test_a_request_reads_approximate_kv_only_by_its_plan() -> None:
    """And goes back where the plan is given up, or is an experiment."""
    for is_experiment in (True, False):
        cache, req = Asked(), request()
        planner = planner_of(**WANTED | {"is_experiment": is_experiment})
        waiting, _ = waiting_with(cache, planner=planner)
        assert look(waiting, req)
        assert prefixes.is_approximate(req) != is_experiment
        assert (req.extra_key is None) == is_experiment
        cache.stagings[0].fail(FetchError("a test"))
        assert not look(waiting, req)
        assert not prefixes.is_approximate(req)
        assert req.extra_key is None


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


@pytest.mark.parametrize("found", [planned_as(PLAN), Declined("no_match")])
def test_what_was_told_to_be_exact_waits_for_nobody_whom_it_may_not_read(found: Any) -> None:
    team: Any = Team()
    waiting = waiting_in(team)
    leader, exact, other = (request(rid, rid) for rid in ("leads", "exact", "other"))
    Labels(UNCOUNTED, ModelNames()).report([exact])
    team.plan = lambda req, *_: found if req is exact else Declined("no_match")
    assert look(waiting, leader, exact, other) == {"other"}


@pytest.mark.parametrize(
    ("num_on_device", "has_memory", "outcome"),
    [(4, True, "on_device"), (3, True, "no_slots"), (0, False, "staging_full")],
)
def test_a_plan_that_was_not_carried_out_says_why(
    num_on_device: int, has_memory: bool, outcome: str
) -> None:
    """Known when SGLang has admitted the request: a twin may have left its pages there."""
    cache, req = Asked(), request()
    if not has_memory:
        cache.fetch = lambda *_: None  # type: ignore[method-assign]
    waiting, told = waiting_with(cache)
    look(waiting, req)
    assert not told.notes
    req.prefix_len = num_on_device * PAGE
    waiting.admitted([req])
    ((_, note),) = told.notes
    assert note.outcome == outcome and note.queued_ms > 0
    assert cache.memory.held_bytes == 0
    waiting.admitted([req])
    assert len(told.notes) == 1


OPTIONAL = planner_of(patience=Patience(saving_s=SAVING_S))
"""Chosen by the server, which predicts that it saves so much."""


@pytest.mark.parametrize("num_landed", [0, 1])
def test_a_request_waits_no_longer_than_reuse_saves(now: Now, num_landed: int) -> None:
    """With the first byte and without it, from the step that could have taken it."""
    cache, req = Asked(now), request()
    waiting, told = waiting_with(cache, planner=OPTIONAL)
    for _ in range(3):
        assert look(waiting, req) == {req.rid}
        now.now_s += SAVING_S  # Others compute, so that it could not have run.
    if num_landed:
        cache.stagings[0].land(PLAN.steps[0], 1)
    waiting.pass_over([req.rid])
    now.now_s += SAVING_S
    waiting.pass_over([req.rid])
    assert look(waiting, req) == {req.rid}
    now.now_s += 1e-3
    assert not look(waiting, req)
    ((_, note),) = told.notes
    assert note.outcome == "fallback: SlowLink"
    assert cache.memory.held_bytes == 0
    assert note.queued_ms == pytest.approx(1e3 * (4 * SAVING_S + 1e-3))
    # It fails nobody else's: a worker may be reading its disk first.
    assert isinstance(cache.stagings[0].error, Cancelled)


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


def test_the_wait_for_an_answer_of_a_store_counts_as_well(now: Now) -> None:
    waiting, _ = waiting_with(Asked(now), server=STORE, planner=OPTIONAL, meter=METER)
    req = request()
    assert look(waiting, req) == {req.rid}
    waiting.pass_over([req.rid])
    now.now_s += SAVING_S + 1e-3
    assert not look(waiting, req), "and then it waits for no fetch"


def test_a_fetch_for_which_there_was_no_memory_is_begun_once_there_is() -> None:
    cache, req, fetch = Asked(), request(), Asked.fetch
    waiting, _ = waiting_with(cache)
    cache.fetch = lambda *_: None  # type: ignore[method-assign, assignment]
    for _ in range(2):
        assert not look(waiting, req), "it may go on without"
    cache.fetch = lambda *it: fetch(cache, *it)  # type: ignore[method-assign]
    assert look(waiting, req) == {req.rid}
    assert len(cache.stagings) == 1


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


@pytest.mark.parametrize("is_optional", [True, False])
@pytest.mark.parametrize("pays", [True, False])
def test_what_no_longer_pays_when_it_has_come_takes_a_full_prefill(
    pays: bool, is_optional: bool
) -> None:
    """But for what a request has asked for by name."""
    cache, req, asked = Asked(), request(), []
    demand: Any = object() if is_optional else None
    planner = planner_of(patience=Patience(saving_s=1e3), considered=SimpleNamespace(demand=demand))
    planner.still_saves = lambda *args: asked.append(args) or pays
    pool = SimpleNamespace(has_approximate=False, held=lambda *_: "held")
    waiting, told = waiting_with(cache, planner=planner, pool=pool)
    assert look(waiting, req) == {req.rid}
    assert not asked, "nothing has come"
    cache.land()
    assert not look(waiting, req)
    assert asked == ([(PLAN, demand, "held")] if is_optional else [])
    is_given_up = is_optional and not pays
    assert [it.outcome for _, it in told.notes] == (["slower"] if is_given_up else [])
    assert waiting.has_source(req.rid) != is_given_up
    assert (cache.memory.held_bytes == 0) == is_given_up


def test_a_follower_waits_no_longer_than_reading_saves(now: Now) -> None:
    waiting = waiting_in(Team())
    leader, follower = request("leads"), request("follows", "x")
    queue = [leader, follower]
    for _ in range(2):
        assert look(waiting, *queue) == {"follows"}
        now.now_s += 100.0
    waiting.pass_over(["follows"])
    now.now_s += SAVING_S + 1e-3
    assert not look(waiting, *queue)


def all_staged(share: float, is_decoding: bool) -> tuple[WaitingRequests, Any]:
    """A request whose four pages have come; a step has 56 tokens, and three and a half pages."""
    cache, req = Asked(), request()
    planner = planner_of(**WANTED | {"step_share": share})
    meter = FakeMeter(recompute=None, step_tokens=56)
    waiting, _ = waiting_with(cache, planner=planner, meter=meter)
    assert look(waiting, req, is_decoding=is_decoding) == {req.rid}
    cache.land()
    assert not look(waiting, req, is_decoding=is_decoding)
    return waiting, req


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
    """One page of the step stays for the request's own tokens."""
    waiting, req = all_staged(share, is_decoding)
    pages = keys_of(req)
    assert waiting.num_restorable(req.rid, pages[0]) == num_pages
    assert waiting.step_tokens(req.rid, 3 * PAGE) == math.ceil(3 * PAGE * share)
    if num_pages < 4:
        assert waiting.take(req.rid, pages[: num_pages + 1], torch.arange(0)) is False
    if num_pages:
        assert waiting.take(req.rid, pages[:num_pages], torch.arange(0))
        (loading,) = waiting.start()
        assert loading.load.at == Span(0, num_pages * PAGE)


@dataclass
class Adder:
    """SGLang's, as far as one step's tokens go."""

    rem_chunk_tokens: int | None
    can_run_list: list[Any]
    is_decoding: bool

    @property
    def running_batch(self) -> Any:
        return SimpleNamespace(is_empty=lambda: not self.is_decoding)

    def ceil_paged_tokens(self, num_tokens: int) -> int:
        return -(-num_tokens // PAGE) * PAGE


@pytest.mark.parametrize(
    ("room", "others", "is_decoding", "charge"),
    [
        (96, [], True, 64),  # All of it,
        (96, ["another"], True, 64),
        (64, ["another"], True, 64),  # also where it does not fit any more;
        (64, [], True, 48),  # but the first of a step always does,
        (64, [], False, 32),  # and in one step, if that holds up nobody.
        (16, [], False, 0),
        (None, [], True, 64),
    ],
)
def test_recomputed_layers_take_their_share_of_a_step(
    room: int | None, others: list[Any], is_decoding: bool, charge: int
) -> None:
    """64 tokens' worth, of a request with 20 tokens of its own, on top of what SGLang replays."""
    waiting: Any = SimpleNamespace(step_tokens=lambda _rid, num_tokens: num_tokens // 2)
    queue = Queue(waiting, waiting, waiting, waiting)
    queue._least_chunk = PAGE
    req: Any = SimpleNamespace(rid="r1", prefix_len=32, full_untruncated_fill_ids=range(180))
    adder: Any = Adder(room, others, is_decoding)
    assert queue.charge(5, adder, req, 160) == 5 + charge


@pytest.mark.parametrize(("max_stall_s", "share"), [(None, 0.5), (0.048, 1.0), (0.192, 0.25)])
@pytest.mark.parametrize("copy_s", [0.0, 0.012])
def test_a_steps_tokens_are_filled_by_layers_and_copies(
    max_stall_s: float | None, share: float, copy_s: float
) -> None:
    """Block [1, 4) computes two layers of four whole. A step of 96 tokens takes 96 ms; the copies
    of as many tokens take an eighth of that, or nothing."""
    settings = SimpleNamespace(max_stall_s=max_stall_s)
    planner: Any = SimpleNamespace(
        _server=SimpleNamespace(settings=settings, page_size=PAGE),
        _meter=SimpleNamespace(step_tokens=96),
    )
    plan, layer = replace(PLAN, block=Span(1, 4)), PrefillCost(token_s=1e-3 / 4, context_s=0.0)
    costs = Costs(
        kv_page_bytes=6,
        e_page_bytes=10,
        prefill=PrefillCost(token_s=1e-3, context_s=0.0),
        recompute=layer,
        links={PLAN.location: Link(byte_s=0.0, copy_byte_s=copy_s / 96)},
    )
    share += copy_s / (max_stall_s or 0.096)
    assert Planner._step_share(planner, plan, costs) == pytest.approx(share)
    loads = replace(plan, block=Span(0, 0))
    of_copies = copy_s * 24 / 16 / (max_stall_s or 0.096)
    assert Planner._step_share(planner, loads, costs) == pytest.approx(of_copies)
    unmeasured = replace(costs, prefill=None, recompute=None, links={})
    assert Planner._step_share(planner, plan, unmeasured) == (0.0 if max_stall_s else 0.5)


def test_another_request_of_the_same_name_is_another_request() -> None:
    """The first was aborted and its name given out again, between two looks at the queue."""
    cache, first, second = Asked(), request(), request()
    waiting, _ = waiting_with(cache)
    look(waiting, first)
    held_bytes = cache.memory.held_bytes
    look(waiting, second)
    assert len(cache.stagings) == 2
    assert cache.memory.held_bytes == held_bytes > 0
    waiting.clear()
    assert cache.memory.held_bytes == 0
