"""Requests that wait for a fetch: held until its deadline, once, and told how long."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from permissive import made
from request_parts import planned_as

from cachetree.clock import Clock, Deadline
from cachetree.errors import Cancelled
from cachetree.ids import LOCAL, Location, ModelId, Span
from cachetree.memory import Arena, Blocks, Staging, staged
from cachetree.planning import Patience, PrefillCost
from cachetree.planning.plan import Plan
from cachetree.tier import Search
from sglang_droidspeak.adapters.models import Owner
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import reusable_pages
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.in_flight import InFlightPrefills
from sglang_droidspeak.request.labels import Labels
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.planner import Declined, Planned, Planner
from sglang_droidspeak.request.queue import Queue
from sglang_droidspeak.request.source import Sources
from sglang_droidspeak.request.waiting import WaitingRequests

PAGE = 16
DEADLINE_S = 0.2
SAVING_S = 0.125
PLAN = Plan(
    sender=ModelId("s"),
    receiver=ModelId("r"),
    location=Location("tcp://127.0.0.1:1"),
    pages=Span(0, 4),
    block=Span(1, 3),
    num_layers=4,
)


class SilentCache:
    """Its worker takes every request, and sends nothing."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.memory = Arena(1 << 20)
        self.deadlines: list[Deadline] = []
        self.stagings: list[Staging] = []
        self._clock = clock

    def fetch(self, plan: Plan, _pages: Any, deadline: Deadline, _context: str) -> Staging:
        self.deadlines.append(deadline)
        mine = Deadline(deadline.at_s, self._clock)
        parts = dict.fromkeys(plan.steps, Blocks(1, 40))
        staging = staged(self.memory, parts, mine)
        self.stagings.append(staging)
        return staging

    def search(self, _pages: Any) -> list[Search]:
        return [Search(Deadline(math.inf, self._clock))]


class FakeMeter(SimpleNamespace):
    """Knows what it is made with."""

    def noticed(self, late_s: float) -> None:
        """Of no use here."""


class Request(SimpleNamespace):
    """Unlike its base it can be referred to weakly. Like SGLang's it has no tokens at first."""

    full_untruncated_fill_ids: Sequence[int] = ()

    def refresh_fill_ids(self) -> None:
        self.full_untruncated_fill_ids = range(4 * PAGE + 1)


def request(rid: str = "r1", lora_id: str | None = None) -> Any:
    return Request(
        rid=rid,
        lora_id=lora_id,
        kv=SimpleNamespace(holds_kv=False),
        output_ids=[],
        origin_input_ids=(),
        skip_radix_cache_insert=False,
        customized_info=None,
        multimodal_inputs=None,
        input_embeds=None,
        positional_embed_overrides=None,
        session=None,
        extra_key=lora_id,
        cache_salt=None,
        sampling_params=SimpleNamespace(n=1, max_new_tokens=8, custom_params=None),
        is_retracted=False,
        retracted_stain=False,
        extend_end=None,
        finished_reason=None,
        to_finish=None,
        _compute_max_prefix_len=lambda length: length - 1,
    )


def waiting_on(
    cache: SilentCache,
    notes: list[RequestProvenance],
    *,
    is_experiment: bool = True,
    **others: Any,
) -> WaitingRequests:
    settings = SimpleNamespace(
        hicache_backend=None,
        fetch_deadline_s=DEADLINE_S,
        max_stall_s=None,
        gate="none",
        min_tokens=1,
    )
    planned = Planned(
        plan=PLAN,
        is_experiment=is_experiment,
        patience=Patience(saving_s=math.inf),
        step_share=0.0,
    )
    parts: Any = {
        "server": SimpleNamespace(settings=settings, page_size=PAGE),
        "cache": cache,
        "meter": FakeMeter(recompute=None),
        "labels": SimpleNamespace(note=lambda _req, told: notes.append(told)),
        "planner": SimpleNamespace(
            meet=lambda _req: None, refusal=prefixes.refusal, plan=lambda *_: planned
        ),
        "pool": SimpleNamespace(has_approximate=False),
        "in_flight": SimpleNamespace(
            follow=lambda *_: False, prune=lambda _waiting: None, clear=lambda: None
        ),
        "ranks": Ranks(None),
    }
    parts |= others
    server, cache, pool = (parts.pop(name) for name in ("server", "cache", "pool"))
    kv: Any = SimpleNamespace(page_size=PAGE)
    sources = Sources(server, cache, pool, kv)
    return made(WaitingRequests, sources=sources, **parts)


class Team:
    """Two models that may read each other, and have nothing yet; stands for what leaders ask."""

    plan = staticmethod(lambda *_: Declined("no_match"))
    refusal = staticmethod(prefixes.refusal)
    demand = staticmethod(lambda *_: None)
    would_save_s = staticmethod(lambda *_, exactly: 0.0 if exactly else SAVING_S)
    remote = SimpleNamespace(reach=lambda *_: 0)

    def meet(self, req: Any) -> None:
        pass

    def owner_of(self, req: Any) -> Owner:
        return Owner(ModelId(f"model {req.lora_id}"), req.lora_id, None)

    def __len__(self) -> int:
        return 2


def test_a_request_is_held_until_one_deadline_after_its_first_sight() -> None:
    notes: list[RequestProvenance] = []
    cache, req = SilentCache(), request()
    waiting = waiting_on(cache, notes)
    tree: Any = None
    before_s = time.monotonic()
    assert waiting.look([req], tree, is_decoding=False) == {req.rid}
    (deadline,) = cache.deadlines
    assert before_s < deadline.at_s - DEADLINE_S < time.monotonic()
    while waiting.look([req], tree, is_decoding=False):
        assert not notes
    assert deadline.has_passed
    held_ms = 1000 * (time.monotonic() - before_s)
    (told,) = notes
    assert told.outcome == "fallback: DeadlineExceeded"
    assert 1000 * DEADLINE_S <= told.queued_ms <= held_ms

    # It stays in the queue where there are no slots for it.
    assert not waiting.look([req], tree, is_decoding=False)
    assert len(cache.deadlines) == 1
    assert len(notes) == 1
    assert cache.memory.held_bytes == 0


def test_a_plan_that_loads_nothing_is_ready_at_once() -> None:
    """All layers are computed anew: from the receiver's own embeddings, with no E."""
    planner = planner_of(plan=replace(PLAN, block=Span(0, 4)), patience=Patience(saving_s=0.0))
    req = request()
    waiting = waiting_on(SilentCache(), [], planner=planner)
    assert not waiting.look([req], None, is_decoding=False)  # type: ignore[arg-type]
    keys = [page.hex() for page in prefixes.own_pages_of(req, 4 * PAGE, PAGE)]
    assert waiting.take(req.rid, keys, torch.arange(4 * PAGE))


def test_a_leader_that_is_aborted_in_the_queue_holds_nobody_up_and_is_forgotten() -> None:
    team: Any = Team()
    in_flight = InFlightPrefills(team, team, team, PAGE)
    waiting = waiting_on(SilentCache(), [], planner=team, in_flight=in_flight)
    leader, follower, tree = request("leads"), request("follows", "x"), None
    gone = weakref.ref(leader)
    for _ in range(2):
        assert waiting.look([leader, follower], tree, is_decoding=False) == {"follows"}
    del leader
    assert not waiting.look([follower], tree, is_decoding=False)
    assert not waiting.look([], tree, is_decoding=False)
    gc.collect()
    assert gone() is None


def test_a_leader_that_left_nothing_holds_nobody_up_after_its_first_token() -> None:
    team: Any = Team()
    waiting = waiting_on(
        SilentCache(), [], planner=team, in_flight=InFlightPrefills(team, team, team, PAGE)
    )
    leader, follower, tree = request("leads"), request("follows", "x"), None
    assert waiting.look([leader, follower], tree, is_decoding=False) == {"follows"}
    leader.kv.holds_kv = True
    assert waiting.look([follower], tree, is_decoding=False) == {"follows"}, "it computes"
    leader.output_ids.append(7)
    assert not waiting.look([follower], tree, is_decoding=False)


def test_a_request_reads_approximate_kv_only_by_its_plan() -> None:
    """And goes back where the plan is given up, or is an experiment."""
    for is_experiment in (True, False):
        cache, req = SilentCache(), request()
        waiting = waiting_on(cache, [], is_experiment=is_experiment)
        tree: Any = None
        while waiting.look([req], tree, is_decoding=False):
            assert prefixes.is_approximate(req) != is_experiment
            assert (req.extra_key is None) == is_experiment
        assert not prefixes.is_approximate(req)
        assert req.extra_key is None


@pytest.mark.parametrize("is_approximate", [False, True])
def test_what_was_told_to_be_exact_stays_so(is_approximate: bool) -> None:
    """A request that was retracted after its first tokens were sent is planned again."""
    cache, req, metrics = (
        SilentCache(),
        request(),
        SimpleNamespace(count_outcome=lambda *_, exact: None),
    )
    labels = Labels(metrics)  # type: ignore[arg-type]
    prefixes.move(req, approximate=is_approximate)
    req.extend_end = 4 * PAGE
    labels.report([req])
    waiting = waiting_on(cache, [], is_experiment=False)
    held = waiting.look([req], None, is_decoding=False)  # type: ignore[arg-type]
    assert bool(held) == prefixes.is_approximate(req) == is_approximate
    waiting.clear()


@pytest.mark.parametrize("found", [planned_as(PLAN), Declined("no_match")])
def test_what_was_told_to_be_exact_waits_for_nobody_whom_it_may_not_read(found: Any) -> None:
    team: Any = Team()
    leaders = InFlightPrefills(team, team, team, PAGE)
    waiting, tree = waiting_on(SilentCache(), [], planner=team, in_flight=leaders), None
    leader, exact, other = (request(rid, rid) for rid in ("leads", "exact", "other"))
    Labels(SimpleNamespace(count_outcome=lambda *_, exact: None)).report([exact])  # type: ignore[arg-type]
    team.plan = lambda req, *_: found if req is exact else Declined("no_match")
    assert waiting.look([leader, exact, other], tree, is_decoding=False) == {"other"}


@pytest.mark.parametrize(
    ("num_on_device", "has_memory", "outcome"),
    [(4, True, "too_short"), (3, True, "no_slots"), (0, False, "staging_full")],
)
def test_a_plan_that_was_not_carried_out_says_why(
    num_on_device: int, has_memory: bool, outcome: str
) -> None:
    """Known when SGLang has admitted the request: a twin may have left its pages there."""
    notes: list[RequestProvenance] = []
    cache, req = SilentCache(), request()
    if not has_memory:
        cache.fetch = lambda *_: None  # type: ignore[method-assign]
    waiting = waiting_on(cache, notes)
    waiting.look([req], None, is_decoding=False)  # type: ignore[arg-type]
    assert not notes
    req.prefix_len = num_on_device * PAGE
    waiting.admitted([req])
    (told,) = notes
    assert told.outcome == outcome and told.queued_ms > 0
    assert cache.memory.held_bytes == 0
    waiting.admitted([req])
    assert len(notes) == 1


class Now:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1.0  # Before any deadline by the time since the machine was started.
        monkeypatch.setattr(
            "sglang_droidspeak.request.request.time", SimpleNamespace(monotonic=lambda: self.now_s)
        )

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


def planner_of(**planned: Any) -> Any:
    fixed = {"plan": PLAN, "is_experiment": False, "step_share": 0.0}
    value = Planned(**fixed | planned)
    return SimpleNamespace(meet=lambda _req: None, refusal=prefixes.refusal, plan=lambda *_: value)


OPTIONAL = planner_of(patience=Patience(saving_s=SAVING_S))
"""Chosen by the server, which predicts that it saves so much."""
METER: Any = FakeMeter(
    recompute=PrefillCost(token_s=1e-3, context_s=0.0),
    prefill=PrefillCost(fixed_s=SAVING_S, token_s=0.0, context_s=0.0),
)


@pytest.mark.parametrize("num_landed", [0, 1])
def test_a_request_waits_no_longer_than_reuse_saves(now: Now, num_landed: int) -> None:
    """With the first byte and without it, from the step that could have taken it."""
    notes: list[RequestProvenance] = []
    cache, req = SilentCache(now), request()
    waiting = waiting_on(cache, notes, planner=OPTIONAL)
    tree: Any = None
    for _ in range(3):
        assert waiting.look([req], tree, is_decoding=False) == {req.rid}
        now.now_s += SAVING_S  # Others compute, so that it could not have run.
    if num_landed:
        cache.stagings[0].land(PLAN.steps[0], 1)
    waiting.pass_over([req.rid])
    now.now_s += SAVING_S
    waiting.pass_over([req.rid])
    assert waiting.look([req], tree, is_decoding=False) == {req.rid}
    now.now_s += 1e-3
    assert not waiting.look([req], tree, is_decoding=False)
    (told,) = notes
    assert told.outcome == "fallback: SlowLink"
    assert cache.memory.held_bytes == 0
    assert told.queued_ms == pytest.approx(1e3 * (4 * SAVING_S + 1e-3))
    # It fails nobody else's: a worker may be reading its disk first.
    assert isinstance(cache.stagings[0].error, Cancelled)


def test_one_that_comes_too_late_at_its_rate_is_given_up_before(now: Now) -> None:
    saving_s = 10.0
    notes: list[RequestProvenance] = []
    cache, req = SilentCache(now), request()
    planner = planner_of(patience=Patience(saving_s=saving_s))
    waiting = waiting_on(cache, notes, planner=planner, meter=METER)
    tree: Any = None
    assert waiting.look([req], tree, is_decoding=False) == {req.rid}
    cache.stagings[0].land(PLAN.steps[0], 1)  # One of 120 bytes.
    now.now_s += 0.25
    assert waiting.look([req], tree, is_decoding=False) == {req.rid}, "it waits its turn"
    waiting.pass_over([req.rid])
    assert not waiting.look([req], tree, is_decoding=False)
    assert [told.outcome for told in notes] == ["fallback: SlowLink"]


def test_the_wait_for_an_answer_of_a_store_counts_as_well(now: Now) -> None:
    settings = SimpleNamespace(
        hicache_backend="file", fetch_deadline_s=1e3, max_stall_s=None, gate="none", min_tokens=1
    )
    server = SimpleNamespace(settings=settings, page_size=PAGE)
    pool = SimpleNamespace(held=lambda *_: SimpleNamespace(exact=0), has_approximate=False)
    others: Any = {"server": server, "pool": pool, "planner": OPTIONAL, "meter": METER}
    waiting = waiting_on(SilentCache(now), [], **others)
    req, tree = request(), None
    req.sampling_params = SimpleNamespace(custom_params=None)
    assert waiting.look([req], tree, is_decoding=False) == {req.rid}
    waiting.pass_over([req.rid])
    now.now_s += SAVING_S + 1e-3
    assert not waiting.look([req], tree, is_decoding=False), "and then it waits for no fetch"


def test_a_fetch_for_which_there_was_no_memory_is_begun_once_there_is() -> None:
    cache, req, fetch = SilentCache(), request(), SilentCache.fetch
    waiting, tree = waiting_on(cache, []), None
    cache.fetch = lambda *_: None  # type: ignore[method-assign, assignment]
    for _ in range(2):
        assert not waiting.look([req], tree, is_decoding=False), "it may go on without"  # type: ignore[arg-type]
    cache.fetch = lambda *it: fetch(cache, *it)  # type: ignore[method-assign]
    assert waiting.look([req], tree, is_decoding=False) == {req.rid}  # type: ignore[arg-type]
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
    waiting = waiting_on(SilentCache(), [], planner=planner, ranks=ranks)
    req, tree = request(), None
    waiting.look([req], tree, is_decoding=False)  # type: ignore[arg-type]
    (((rid, _, planned, _),),) = told
    assert (rid, planned.plan, planned.demand) == (req.rid, PLAN, None)


@pytest.mark.parametrize(("location", "is_fetched"), [(PLAN.location, True), (LOCAL, False)])
def test_how_late_the_end_of_a_fetch_is_seen_is_told_once(
    location: Location, is_fetched: bool
) -> None:
    """Not of what lies in this server's own memory."""
    cache, req, told = SilentCache(), request(), []
    meter: Any = SimpleNamespace(recompute=None, noticed=told.append)
    planner = planner_of(
        plan=replace(PLAN, location=location), patience=Patience(saving_s=math.inf)
    )
    waiting = waiting_on(cache, [], meter=meter, planner=planner)
    assert waiting.look([req], None, is_decoding=False) == {req.rid}  # type: ignore[arg-type]
    (staging,) = cache.stagings
    for step in PLAN.steps:
        staging.land(step, 40)
    assert not told
    for _ in range(2):
        assert not waiting.look([req], None, is_decoding=False)  # type: ignore[arg-type]
        assert len(told) == is_fetched
    for late_s in told:
        assert 0 <= late_s <= time.monotonic() - staging.completed_s


@pytest.mark.parametrize("is_optional", [True, False])
@pytest.mark.parametrize("pays", [True, False])
def test_what_no_longer_pays_when_it_has_come_takes_a_full_prefill(
    pays: bool, is_optional: bool
) -> None:
    """But for what a request has asked for by name."""
    notes: list[RequestProvenance] = []
    cache, req, asked = SilentCache(), request(), []
    demand: Any = object() if is_optional else None
    planner = planner_of(patience=Patience(saving_s=1e3), considered=SimpleNamespace(demand=demand))
    planner.still_saves = lambda *args: asked.append(args) or pays
    pool = SimpleNamespace(has_approximate=False, held=lambda *_: "held")
    waiting = waiting_on(cache, notes, planner=planner, pool=pool)
    tree: Any = None
    assert waiting.look([req], tree, is_decoding=False) == {req.rid}
    assert not asked, "nothing has come"
    for step in PLAN.steps:
        cache.stagings[0].land(step, 40)
    assert not waiting.look([req], tree, is_decoding=False)
    assert asked == ([(PLAN, demand, "held")] if is_optional else [])
    is_given_up = is_optional and not pays
    assert [told.outcome for told in notes] == (["slower"] if is_given_up else [])
    assert waiting.has_source(req.rid) != is_given_up
    assert (cache.memory.held_bytes == 0) == is_given_up


def test_a_follower_waits_no_longer_than_reading_saves(now: Now) -> None:
    team: Any = Team()
    waiting = waiting_on(
        SilentCache(now), [], planner=team, in_flight=InFlightPrefills(team, team, team, PAGE)
    )
    leader, follower, tree = request("leads"), request("follows", "x"), None
    queue = [leader, follower]
    for _ in range(2):
        assert waiting.look(queue, tree, is_decoding=False) == {"follows"}
        now.now_s += 100.0
    waiting.pass_over(["follows"])
    now.now_s += SAVING_S + 1e-3
    assert not waiting.look(queue, tree, is_decoding=False)


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
    taken: str, is_in_chunks: bool, is_full: bool, num_slots: int, could_run: str
) -> None:
    queue = [Request(rid=rid, priority=20 if rid == "a" else 10) for rid in "abcd"]
    passed: list[str] = []
    held = {"a", "c"}
    waiting = SimpleNamespace(
        look=lambda *_, **__: held, pass_over=passed.extend, admitted=lambda _reqs: None
    )
    others: Any = SimpleNamespace(
        release=lambda: None,
        settle=lambda _ranks: None,
        meet=lambda _req: None,
        refusal=prefixes.refusal,
    )
    hidden = Queue(waiting, others, others, Ranks(None))
    decoding = SimpleNamespace(priority=0)
    running = SimpleNamespace(reqs=[decoding], is_empty=lambda: False, batch_is_full=is_full)
    scheduler = SimpleNamespace(
        waiting_queue=list(queue),
        tree_cache=None,
        grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False, grammar_queue=[]),
        chunked_req=object() if is_in_chunks else None,
        get_num_allocatable_reqs=lambda _num, running_batch: num_slots,
        truncation_align_size=None,
        page_size=PAGE,
        enable_priority_scheduling=False,
        enable_priority_preemption=num_slots < 0,
        priority_scheduling_preemption_threshold=10,
        schedule_low_priority_values_first=False,
    )

    def step(it: Any, running_batch: Any) -> Any:
        it.waiting_queue = [req for req in it.waiting_queue if req.rid not in taken]
        batch = SimpleNamespace(reqs=[]) if taken or is_in_chunks else None
        return batch, running_batch

    hidden.new_prefill(step, scheduler, running_batch=running)
    assert passed == list(could_run)
    assert [req.rid for req in scheduler.waiting_queue] == [it for it in "abcd" if it not in taken]


def all_staged(share: float, is_decoding: bool) -> tuple[WaitingRequests, Any]:
    """A request whose four pages have come; a step has 56 tokens, and three and a half pages."""
    cache, req = SilentCache(), request()
    named = {"is_experiment": True, "patience": Patience(saving_s=math.inf)}
    planner = planner_of(**named, step_share=share)
    meter: Any = FakeMeter(recompute=None, step_tokens=56)
    waiting = waiting_on(cache, [], planner=planner, meter=meter)
    tree: Any = None
    assert waiting.look([req], tree, is_decoding=is_decoding) == {req.rid}
    for step in PLAN.steps:
        cache.stagings[0].land(step, 40)
    assert not waiting.look([req], tree, is_decoding=is_decoding)
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
    pages = [page.hex() for page in reusable_pages(req, PAGE)]
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
def test_a_steps_tokens_are_filled_by_layers_or_by_time(
    max_stall_s: float | None, share: float
) -> None:
    """Block [1, 4) computes two layers of four whole; a step of 96 tokens takes 96 ms."""
    settings = SimpleNamespace(max_stall_s=max_stall_s)
    layer = PrefillCost(token_s=1e-3 / 4, context_s=0.0)
    meter = SimpleNamespace(step_tokens=96, recompute=layer)
    planner: Any = SimpleNamespace(_server=SimpleNamespace(settings=settings), _meter=meter)
    assert Planner._step_share(planner, replace(PLAN, block=Span(1, 4))) == pytest.approx(share)
    meter.recompute = None
    unmeasured = 0.0 if max_stall_s else share
    assert Planner._step_share(planner, replace(PLAN, block=Span(1, 4))) == unmeasured


def test_another_request_of_the_same_name_is_another_request() -> None:
    """The first was aborted and its name given out again, between two looks at the queue."""
    cache, first, second = SilentCache(), request(), request()
    waiting, tree = waiting_on(cache, []), None
    waiting.look([first], tree, is_decoding=False)  # type: ignore[arg-type]
    held_bytes = cache.memory.held_bytes
    waiting.look([second], tree, is_decoding=False)  # type: ignore[arg-type]
    assert len(cache.stagings) == 2
    assert cache.memory.held_bytes == held_bytes > 0
    waiting.clear()
    assert cache.memory.held_bytes == 0
