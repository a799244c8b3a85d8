"""A request and the server's settings become limits of the policy, in pages and seconds."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from standins import made, request, request_of
from test_policy import ALL_E, FAR, MEASURED, PROFILE, O, R, S, match

from cachetree.checkpoint.family import Codec
from cachetree.ids import LOCAL, Location, PageHash, Span
from cachetree.planning import Costs, Link, PlanId, weigh
from sglang_droidspeak.adapters.models import Owner
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.followers import Followers
from sglang_droidspeak.request.planner import UNMEASURED_S, Declined, Planner
from sglang_droidspeak.request.request import Request
from sglang_droidspeak.start.config import Settings
from sglang_droidspeak.store.pool import Held, PoolIndex, pool_of

PAGE = 16
PAGES = [PageHash(bytes([number] * 16)) for number in range(10)]
TREE = SimpleNamespace(
    page_size=PAGE, tree_core=SimpleNamespace(match_full_device_prefix=lambda _key: (0, 0, 0))
)
"""A stand-in for SGLang's tree. It is empty, and no use can be noted."""


def plan(*args: Any, **kw: Any) -> Any:
    """Return the plan if one peer has all of a prompt."""
    return planned(*args, **kw)[1]


def planned(
    num_pages: int = 10,
    sender: str = S,
    controls: dict[str, Any] | None = None,
    costs: Costs = MEASURED,
    location: Location = FAR,
    notice_s: float = 0.0,
    **settings: Any,
) -> Any:
    """Return the plan, and the planner that made it."""
    matches = match(sender, num_pages, location, dict.fromkeys(ALL_E, num_pages))
    planner = made(
        Planner,
        server=SimpleNamespace(
            settings=Settings(**{"min_tokens": 1, **settings}),
            identity=SimpleNamespace(num_layers=10),
            page_size=PAGE,
            profiles=[PROFILE],
            transition_layers=range(10),
            has_blocks=True,
        ),
        cache=SimpleNamespace(
            match=lambda _pages: [matches],
            link=costs.links.get,
            family=SimpleNamespace(
                kv_page_bytes=MEASURED.kv_page_bytes,
                e_page_bytes=MEASURED.e_page_bytes,
                codec=Codec.NONE,
            ),
        ),
        meter=SimpleNamespace(
            prefill=costs.prefill,
            recompute=costs.recompute,
            copy_byte_s=0.0,
            notice_s=notice_s,
            step_tokens=1 << 20,
        ),
        models=MagicMock(
            generation=0,
            unknown="",
            owner_of=lambda _req: Owner(R, None, None),
            first_differences=lambda _lora_id: {},
        ),
        pool=PoolIndex(MagicMock(), (), PAGE, 0, Ranks(None)),
    )
    req = request_of(range(num_pages * PAGE + 1))
    req.sampling_params.custom_params = {"droidspeak": controls or {}}
    planner.asked = req
    pages = [PageHash(bytes([number] * 16)) for number in range(num_pages)]
    return planner, planner.plan(req, pages, TREE, 0)


@pytest.mark.parametrize(
    ("min_tokens", "num_pages", "is_enough"),
    [(1, 1, True), (96, 6, True), (97, 6, False), (111, 6, False), (111, 7, True), (113, 7, False)],
)
def test_fewer_tokens_than_the_least_are_not_loaded(min_tokens, num_pages, is_enough):
    """The least number of tokens need not be a whole number of pages."""
    decision = plan(num_pages, sender=R, min_tokens=min_tokens)
    assert hasattr(decision, "plan") == is_enough
    if not is_enough:
        assert getattr(decision, "outcome", decision) == "too_short"


@pytest.mark.parametrize(
    ("target_ms", "block"), [(None, Span(3, 6)), (1000, Span(2, 7)), (10_000, Span(0, 8))]
)
@pytest.mark.parametrize("asked_by", ["request", "server"])
def test_a_ttft_target_is_milliseconds(asked_by, target_ms, block):
    """The blocks take 0.48, 0.8 and 1.28 s. Without a target the recommended block is chosen."""
    if asked_by == "server":
        decision = plan(ttft_target_ms=target_ms)
    else:
        decision = plan(controls={} if target_ms is None else {"ttft_target_ms": target_ms})
    assert decision.plan.block == block


def test_a_requests_own_target_counts():
    decision = plan(ttft_target_ms=10_000, controls={"ttft_target_ms": 1000})
    assert decision.plan.block == Span(2, 7)


def test_who_is_met_after_a_change_of_plans_reads_no_approximate_kv_of_before():
    planner, _ = planned(10)
    before, after = (request_of([1, 2]) for _ in range(2))
    planner.meet(before)
    planner.put_in_service(PROFILE)
    planner.meet(after)
    assert prefixes.approximate_of(before) != prefixes.approximate_of(after)


def test_while_the_weights_are_unknown_nothing_is_planned():
    planner, _ = planned(10)
    req = request()
    assert planner.refusal(req) == ""
    planner._models.unknown = "weights_updated"
    assert planner.refusal(req) == "weights_updated"


def test_over_a_slow_link_a_full_prefill_is_taken_and_told():
    """Ten pages take 1.6 s. 70 MB of KV and 20 MB of E take 0.09 s over the fast link; over the
    slow link they take nine times as long as the pages."""
    decision = plan()
    assert (decision.plan.block, decision.patience.saving_s) == (
        Span(3, 6),
        pytest.approx(1.6 - 0.34),
    )
    slow = plan(costs=replace(MEASURED, links={FAR: Link(byte_s=1e-7)}))
    assert slow.outcome == "slower"
    assert "full prefill is faster" in slow.detail
    backlog = plan(costs=replace(MEASURED, links={FAR: Link(byte_s=1e-9, backlog=[10**9] * 99)}))
    assert backlog.outcome == "slower"
    unknown = plan(costs=replace(MEASURED, links={}, prefill=None, recompute=None))
    assert unknown.patience.saving_s == UNMEASURED_S


@pytest.mark.parametrize(
    ("exact", "approximate", "saves"),
    [(0, 0, True), (4, 0, True), (7, 0, True), (8, 0, False), (0, 9, True), (10, 0, False)],
)
def test_at_admission_counts_what_the_device_has_by_then(exact, approximate, saves):
    """Recomputing two layers of ten with [3, 6) from page 0 on costs as much as two pages in full.
    It also gives up exact KV on the device."""
    planner, decision = planned()
    demand = replace(decision.demand, first_approximate=0)
    held = Held(exact, approximate)
    assert planner.still_saves(decision.plan, demand, held) == saves


@pytest.mark.parametrize("held", [Held(8, 0), Held(0, 9)])
def test_at_admission_an_experiment_goes_on_from_exact_kv(held):
    planner, decision = planned()
    demand = replace(decision.demand, first_approximate=None)
    assert planner.still_saves(decision.plan, demand, held)


@pytest.mark.parametrize("peer", [None, "far", "http://other:8000", "nowhere"])
def test_a_request_names_the_peer_to_look_at_first(peer):
    """Both peers have the same pages, and the far one is predicted to be as fast."""
    other = Location("tcp://other:1")
    costs = replace(MEASURED, links=dict.fromkeys([FAR, other], Link(byte_s=1e-9)))
    planner, _ = planned(costs=costs, controls={"peer": peer})
    matches = [match(S, 10, it, dict.fromkeys(ALL_E, 10)) for it in (FAR, other)]
    planner._cache.match = lambda _pages: matches
    pages = [PageHash(bytes([number] * 16)) for number in range(10)]
    chosen = planner.plan(planner.asked, pages, TREE, 0).plan.location
    assert chosen == (other if peer == "http://other:8000" else FAR)


@pytest.mark.parametrize(
    ("location", "fixed_s", "saving_s"), [(FAR, 0.3, 1.1), (FAR, 0.0, 1.4), (LOCAL, 0.0, 1.6)]
)
def test_only_what_is_fetched_takes_a_round_trip_and_is_noticed_late(location, fixed_s, saving_s):
    """A full prefill of ten pages takes 1.6 s. Pages that are read in place need no fetch."""
    costs = replace(MEASURED, links={FAR: Link(byte_s=0.0, fixed_s=fixed_s)})
    decision = plan(sender=R, location=location, costs=costs, notice_s=0.2)
    assert decision.patience.saving_s == pytest.approx(saving_s)


def test_at_admission_what_was_fetched_costs_no_more_than_its_copies():
    """Seven pages of ten layers take 1.12 s in full, and have 70 MB."""
    for copy_byte_s, saves in ((0.0, True), (1.5e-8, True), (1.7e-8, False)):
        planner, decision = planned(sender=R)
        planner._meter.copy_byte_s, planner._meter.notice_s = copy_byte_s, 9.0
        planner._cache.link = lambda _location: Link(byte_s=1.0, fixed_s=9.0)
        assert planner.still_saves(decision.plan, decision.demand, Held(3, 0)) == saves


@pytest.mark.parametrize(
    ("location", "staging_gb", "is_taken"),
    [(FAR, 0.04, True), (FAR, 0.005, False), (LOCAL, 0.0, True)],
)
def test_what_no_staging_will_hold_is_not_waited_for(location, staging_gb, is_taken):
    """Four pages take 36 MB with the recommended block, and at least 8 MB with any. Pages in this
    memory are read in place."""
    decision = plan(location=location, staging_gb=staging_gb, min_tokens=4 * PAGE)
    assert hasattr(decision, "plan") == is_taken
    if not is_taken:
        assert (decision.outcome, decision.may_be_approximate) == ("staging_full", True)
        assert decision.detail == "4 pages, the fewest worth a fetch, exceed staging_gb, 0.005"


@pytest.mark.parametrize(
    ("num_there", "location", "num_taken"), [(0, FAR, 9), (6, FAR, 9), (10, LOCAL, 10)]
)
def test_what_fits_into_the_staging_competes_with_what_is_there(num_there, location, num_taken):
    """Ten pages with [3, 6) take 90 MB. The staging has 86 MB."""
    planner, _ = planned(staging_gb=0.08)
    matches = [
        match(S, num, it, dict.fromkeys(ALL_E, num)) for it, num in ((FAR, 10), (LOCAL, num_there))
    ]
    planner._cache.match = lambda _pages: [it for it in matches if it.num_pages]
    decision = planner.plan(planner.asked, PAGES, TREE, 0)
    assert (decision.plan.location, decision.plan.pages) == (location, Span(0, num_taken))
    ways = weigh(decision.considered, planner.profiles)
    assert [(it.location, it.pages) for it in ways if it.reason == "taken"] == [
        (location, (0, num_taken))
    ]


@pytest.mark.parametrize(("measured_tokens", "is_covered"), [(160, True), (159, False)])
def test_first_pages_of_a_prompt_longer_than_measured_are_not_waited_for(
    measured_tokens, is_covered
):
    """The prompt has 160 tokens. No plan is proven for this length, so the first 96 are no use."""
    planner, _ = planned(10)
    profile = msgspec.structs.replace(PROFILE, measured_tokens=measured_tokens)
    planner.put_in_service(profile)
    assert (would_save_s(planner) > 0) == is_covered


def would_save_s(planner, num_there=6, sender=S, *, exactly=False):
    """Return the seconds saved if another adapter had so many of ten pages."""
    demand = planner.demand(planner.asked, Owner(R, None, None), 10, TREE)
    return planner.would_save_s(demand, num_there, sender, pool_of(""), exactly=exactly)


@pytest.mark.parametrize(
    ("sender", "exactly", "saves"),
    [(R, True, True), (R, False, True), (S, False, True), (S, True, False), (O, False, False)],
)
def test_request_waits_for_pages_that_it_may_read(sender, exactly, saves):
    """These are pages of its own model, or of a model with a profile, unless the request has to
    stay exact."""
    planner, _ = planned(10)
    assert (would_save_s(planner, 10, sender, exactly=exactly) > 0) == saves


@pytest.mark.parametrize("lora_id", [None, "x"])
@pytest.mark.parametrize("approximate", [False, True])
def test_pages_on_the_device_in_the_own_namespace_are_no_match(lora_id, approximate):
    """SGLang itself finds the pages of the namespace that the request uses now."""
    planner, _ = planned(10)
    planner.asked.lora_id = planner.asked.extra_key = lora_id
    prefixes.move(planner.asked, approximate=approximate)
    mine, others = (match(S, 10, pool_of(it), ALL_E) for it in (lora_id or "", "other"))
    planner._cache.match = lambda _pages: [mine]
    planner._cache.sources = lambda: ()
    assert planner.plan(planner.asked, PAGES, TREE, 0).outcome == "no_match"
    planner._cache.match = lambda _pages: [mine, others]
    planner._pool.has = lambda *_: True
    assert planner.plan(planner.asked, PAGES, TREE, 0).plan.location == others.location


@pytest.mark.parametrize(
    ("gate", "block", "sender", "is_experiment", "is_approximate"),
    [
        ("none", "3:6", S, True, False),
        ("none", None, S, False, True),
        ("enforce", "3:6", S, False, True),
        ("enforce", None, R, False, False),
    ],
)
def test_experiment_is_a_block_that_is_asked_for_where_no_gate_decides(
    gate, block, sender, is_experiment, is_approximate
):
    """An experiment's KV is not found by other requests, and it reads no approximate KV."""
    planner, _ = planned(10, sender, {"block": block}, gate=gate)
    planner._pool.held = lambda *_: Held(0, 5)
    decision = planner.plan(planner.asked, PAGES, TREE, 0)
    assert (decision.is_experiment, decision.is_approximate) == (is_experiment, is_approximate)
    assert decision.plan.pages.start == (0 if is_experiment or sender == R else 5)


def test_request_follows_nobody_in_its_own_namespace():
    """The first request leaves its pages in SGLang's tree, where SGLang itself finds them for the
    second."""
    planner, _ = planned(10)
    models: Any = MagicMock(__len__=lambda _: 2)
    models.owner_of = lambda _req: Owner(R, None, None)
    followers = Followers(
        SimpleNamespace(remote=SimpleNamespace(reach=lambda *_: 0)), planner, models, PAGE
    )
    for lora_id, follows in ((None, False), ("x", True)):
        first, second = Request(request("leads", lora_id)), Request(planner.asked)
        first.pages = second.pages = PAGES
        assert not followers.follow(first, Declined("no_match"), TREE)
        assert followers.follow(second, Declined("no_match"), TREE) == follows
        followers.clear()


@pytest.mark.parametrize(
    ("held", "saved_s"),
    [(Held(0, 0), 1.28), (Held(5, 0), 0.48), (Held(0, 5), 0.64), (Held(9, 0), 0), (Held(10, 0), 0)],
)
def test_nobody_waits_for_what_the_device_has(held, saved_s):
    """Two layers in ten are computed anew: of everything that the request reads, or of the part
    that is not approximate yet."""
    planner, _ = planned(10)
    planner._pool.held = lambda *_: held
    assert would_save_s(planner, 10) == pytest.approx(saved_s)


@pytest.mark.parametrize(
    ("sender", "num_there", "waits_s"),
    [(R, 0, 1.28), (R, 2, 0.96), (R, 9, None), (S, 2, 1.024), (S, 9, 0.128)],
)
@pytest.mark.parametrize("block", [None, "3:6"])
def test_who_has_a_plan_waits_for_what_more_would_save(block, sender, num_there, waits_s):
    """This model's own pages would be loaded at once, and save .16 s each; the other model's pages
    save .128 s each."""
    planner, _ = planned(controls={"block": block})
    match_here = match(sender, num_there, LOCAL, dict.fromkeys(ALL_E, num_there))
    planner._cache.match = lambda _pages: num_there * [match_here]
    planner._cache.sources = lambda: ()
    models: Any = MagicMock(__len__=lambda _: 2)
    models.owner_of = lambda req: Owner(S if req is leader else R, None, None)
    remote = SimpleNamespace(reach=lambda *_: 0)
    leaders = Followers(SimpleNamespace(remote=remote), planner, models, PAGE)
    leader = request("leads", "x")
    first, second = Request(leader), Request(planner.asked)
    first.pages = second.pages = PAGES
    assert not leaders.follow(first, Declined("no_match"), TREE)
    decision = planner.plan(planner.asked, PAGES, TREE, 1)
    assert leaders.follow(second, decision, TREE) == (waits_s is not None)
    if waits_s is not None:
        assert second.patience.saving_s == pytest.approx(waits_s, rel=1e-3)
    assert not leaders.follow(second, decision, TREE), "once is enough"


def test_what_was_asked_for_by_name_is_not_thought_over():
    """The plan's saving does not limit the request's wait either."""
    decision = plan(controls={"block": "3:6"}, gate="none")
    assert (decision.plan.block, decision.demand, decision.patience.saving_s) == (
        Span(3, 6),
        None,
        math.inf,
    )
    assert plan().demand is not None


def test_what_the_drift_guard_took_out_of_service_nobody_gets_by_name():
    planner, decision = planned(controls={"block": "4:6"}, gate="none")
    planner.out_of_service = frozenset([PlanId(S, R, (4, 7), False)])
    assert planner.plan(planner.asked, PAGES, TREE, 0).plan == decision.plan
    planner.out_of_service |= {PlanId(S, R, (4, 6), False)}
    refused = planner.plan(planner.asked, PAGES, TREE, 0)
    assert refused.outcome == "gate_failed" and "drift guard" in refused.detail


def test_a_wrong_note_of_the_pool_is_mended_and_planned_without():
    """SGLang has evicted the pages. The next best location is read, if there is one."""
    planner, _ = planned(10)
    here, far = pool_of("a"), FAR
    notes = [match(S, 10, it, dict.fromkeys(ALL_E, 10)) for it in (here, far)]
    planner._cache.match = lambda _pages: list(notes)

    planner._pool.has = lambda *_: not notes.pop(0)
    assert planner.plan(planner.asked, PAGES, TREE, 0).plan.location == far
    assert not notes[1:]


@pytest.mark.parametrize("has_blocks", [True, False])
def test_a_class_without_blocks_is_offered_no_sender_that_differs_at_a_layer(has_blocks):
    planner, _ = planned(10)
    planner._server.has_blocks = has_blocks
    planner._models.first_differences = lambda _lora_id: {"differs": 3, "is the same": 10}
    asked = planner.demand(planner.asked, Owner(R, None, None), 10, TREE)
    assert ("differs" in asked.first_differences) == has_blocks
    assert asked.first_differences["is the same"] == 10
