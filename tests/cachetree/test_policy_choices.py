"""Choices of the policy between plans that are nearly equal. Each test decides one tie."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from test_policy import (
    DEMAND,
    FAILED,
    FAR,
    MB,
    MEASURED,
    OTHER,
    PROFILE,
    PROFILES,
    UNKNOWN,
    O,
    R,
    S,
    choose,
    links,
    match,
    plan_for,
)

from cachetree.ids import EMPTY_SPAN, POOL_PREFIX, Location, Span
from cachetree.planning import (
    Demand,
    Gate,
    Link,
    NoReuse,
    Profiles,
    Reason,
    Requested,
    index_profiles,
)
from cachetree.planning.plan import Plan
from cachetree.planning.prediction import times_of
from cachetree.planning.profile import BlockQuality, PairProfile

BUSY = replace(DEMAND, num_waiting=1)


def profile_with(*blocks: BlockQuality, full: float = 1.0) -> dict:
    made: PairProfile = msgspec.structs.replace(
        PROFILE, blocks=blocks, recommended=blocks[0], full_prefill_quality=full
    )
    return index_profiles([made])


def block(start: int, stop: int, quality: float) -> BlockQuality:
    return BlockQuality(start=start, stop=stop, quality=quality)


def test_at_an_unknown_speed_of_the_link_the_recompute_and_the_fixed_cost_are_predicted():
    costs = replace(MEASURED, links={FAR: Link(byte_s=0.0, fixed_s=0.25)})
    plan = plan_for(match(S, location=FAR))
    compute_s = 160 * (len(plan.block) - 1) * 1e-3
    assert times_of(plan, 16, costs).ttft_s == pytest.approx(0.25 + compute_s)
    here = replace(plan, location=Location(f"{POOL_PREFIX}lora"))
    assert times_of(here, 16, costs).ttft_s == pytest.approx(compute_s)


def asking(block: Span, gate: Gate = Gate.ENFORCE) -> Demand:
    return replace(DEMAND, gate=gate, requested=Requested(block=block))


PROVEN = profile_with(block(3, 6, 0.96), block(0, 0, 0.95))
NONE_PROVEN = index_profiles([msgspec.structs.replace(PROFILE, blocks=(), recommended=None)])
SHORT = "one step may recompute fewer pages than are worth a fetch"


def measured_on(num_tokens: int) -> Profiles:
    return index_profiles([msgspec.structs.replace(PROFILE, measured_tokens=num_tokens)])


@pytest.mark.parametrize(
    ("demand", "matches", "profiles", "reason", "detail"),
    [
        (DEMAND, [], PROFILES, Reason.NO_MATCH, "no model of the family has this prefix"),
        (
            replace(DEMAND, first_page=4, min_pages=2),
            [match(S, 5)],
            PROFILES,
            Reason.ON_DEVICE,
            f"5 pages of {S}, 4 on the device",
        ),
        (
            replace(DEMAND, first_approximate=4, min_pages=4),
            [match(S, 5)],
            PROFILES,
            Reason.ON_DEVICE,
            f"5 pages of {S}, 4 approximate on the device",
        ),
        (DEMAND, [match(S)], {}, Reason.NO_PROFILE, f"no profile with sender {S}"),
        (DEMAND, [match(S)], index_profiles([FAILED]), Reason.GATE_FAILED, "loses 9 %"),
        (DEMAND, [match(S)], NONE_PROVEN, Reason.GATE_FAILED, "the profile has no proven block"),
        (
            DEMAND,
            [match(S)],
            measured_on(79),
            Reason.LONGER_THAN_MEASURED,
            "160 tokens of prompt, and the profile was measured on enough prompts of up to 79 only",
        ),
        (
            asking(Span(3, 11)),
            [match(S)],
            PROFILES,
            Reason.UNGATED_BLOCK,
            "layer 10 of a model of 10 layers",
        ),
        (
            asking(Span(3, 5)),
            [match(S)],
            PROVEN,
            Reason.UNGATED_BLOCK,
            "block 3:5 is none of those that a profile has proven; allowed: 3:6, none",
        ),
        (
            asking(Span(3, 5)),
            [match(R)],
            index_profiles([FAILED]),
            Reason.UNGATED_BLOCK,
            "block 3:5 is none of those that a profile has proven; no block is allowed",
        ),
        (
            DEMAND,
            [match(S, e={8: 10})],
            profile_with(block(3, 6, 0.96), block(5, 9, 0.97)),
            Reason.NO_E,
            f"{S} lacks E at some of layers [3, 5] for pages from 0",
        ),
        (
            replace(DEMAND, max_recompute_tokens=15),
            [match(S)],
            PROFILES,
            Reason.RECOMPUTE_TOO_LONG,
            SHORT,
        ),
        (replace(DEMAND, max_stall_s=1e-3), [match(S)], PROFILES, Reason.RECOMPUTE_TOO_LONG, SHORT),
        (
            DEMAND,
            [match(S, location=FAR)],
            PROFILES,
            Reason.SLOWER,
            f"{S} at {FAR}: full prefill is faster, or nearly so",
        ),
        (
            replace(DEMAND, max_fetch_bytes=1 << 20),
            [match(S, location=FAR)],
            PROFILES,
            Reason.STAGING_FULL,
            "1 pages, the fewest worth a fetch, exceed staging_gb, 0.000976562",
        ),
    ],
)
def test_why_nothing_is_reused_is_told_to_a_person(demand, matches, profiles, reason, detail):
    slow = replace(MEASURED, links={FAR: Link(byte_s=1e-3)})
    assert choose(demand, matches, profiles, slow) == NoReuse(reason=reason, detail=detail)


@pytest.mark.parametrize(
    ("most", "block", "num_pages"),
    [(90, Span(3, 6), 10), (89, Span(3, 6), 9), (63, Span(3, 6), 7), (9, Span(0, 8), 4)],
)
def test_a_plan_is_cut_to_what_the_staging_takes(most, block, num_pages):
    """A page takes one megabyte for each loaded layer, and two for E. With [3, 6) these are 9 MB.
    With [0, 8), which starts from embeddings, these are 2 MB."""
    demand = replace(DEMAND, max_fetch_bytes=most * MB)
    plan = plan_for(match(S, location=FAR), demand=demand, costs=MEASURED)
    assert (plan.block, plan.pages) == (block, Span(0, num_pages))
    local = plan_for(match(S), demand=demand, costs=MEASURED)
    assert (local.block, local.pages) == (Span(3, 6), Span(0, 10)), "it is read in place"


def test_a_block_that_one_sender_allows_is_allowed_where_the_own_cache_answers():
    """There are two senders, one of which has no proven block at all."""
    other = msgspec.structs.replace(PROFILE, sender=OTHER, blocks=(block(1, 9, 0.99),))
    refused = choose(asking(Span(4, 5)), [match(R)], index_profiles([PROFILE, other]), UNKNOWN)
    assert isinstance(refused, NoReuse)
    assert refused.detail.endswith("allowed: 0:8, 1:9, 2:7, 3:6")
    profiles = index_profiles([msgspec.structs.replace(FAILED, sender=OTHER), PROFILE])
    assert plan_for(match(R), demand=asking(Span(3, 6)), profiles=profiles).sender == R


@pytest.mark.parametrize("requested", [Requested(), Requested(block=EMPTY_SPAN)])
def test_first_of_equal_plans_is_taken(requested):
    demand = replace(DEMAND, requested=requested, first_differences={O: 10})
    for first, second in ((O, R), (R, O)):
        assert plan_for(match(first), match(second), demand=demand, profiles={}).sender == first


def test_entries_are_encoded_everywhere_but_in_the_engines_pool():
    lossy = replace(DEMAND, is_lossy=True)
    assert plan_for(match(S), demand=lossy).is_lossy
    assert not plan_for(match(S, location=Location("pool:adapter")), demand=lossy).is_lossy
    assert not plan_for(match(S)).is_lossy


def test_remaining_prefill_counts_towards_the_target():
    """The rest takes 0.64 s if 6 of 10 pages are reused, and the block takes 0.19 s or 0.67 s."""
    demand = replace(DEMAND, ttft_target_s=1.0)
    profiles = profile_with(block(0, 8, 0.99), block(3, 6, 0.96))
    plan = plan_for(match(S, 6), demand=demand, profiles=profiles, costs=MEASURED)
    assert plan.block == Span(3, 6)


def test_better_plan_is_taken_among_equal_recomputes_in_time():
    demand = replace(DEMAND, ttft_target_s=60.0)
    profiles = profile_with(block(3, 8, 0.96), block(2, 7, 0.97))
    plan = plan_for(match(S), demand=demand, profiles=profiles, costs=MEASURED)
    assert plan.block == Span(2, 7)


@pytest.mark.parametrize(("full", "chosen"), [(1.0, Span(3, 10)), (0.96, Span(2, 9))])
def test_better_plan_is_taken_among_equal_savings(full, chosen):
    """A lossless plan has the quality that was measured for full prefill."""
    profiles = profile_with(block(2, 9, 0.97), full=full)
    demand = replace(BUSY, first_differences={S: 3})
    plan = plan_for(match(S, e={2: 10, 3: 10}), demand=demand, profiles=profiles)
    assert len(plan.block) == 7
    assert plan.block == chosen


def test_fastest_plan_is_taken_if_none_is_in_time():
    profiles = profile_with(block(0, 8, 0.99), block(2, 7, 0.97), block(3, 6, 0.96))
    demand = replace(DEMAND, ttft_target_s=0.001)
    assert plan_for(match(S), demand=demand, profiles=profiles, costs=MEASURED).block == Span(3, 6)


def test_a_plan_that_takes_exactly_the_target_is_in_time():
    costs = replace(MEASURED, links=links({FAR: 1e12}))
    slow = plan_for(match(S, location=FAR), demand=replace(DEMAND, ttft_target_s=60.0), costs=costs)
    exactly_s = times_of(slow, 16, costs).ttft_s
    again = plan_for(
        match(S, location=FAR), demand=replace(DEMAND, ttft_target_s=exactly_s), costs=costs
    )
    assert again.block == slow.block == Span(0, 8)


def test_a_profile_is_used_up_to_the_length_that_it_was_measured_on():
    longer = replace(DEMAND, num_pages=11)
    profiles = measured_on(160)
    assert isinstance(choose(DEMAND, [match(S)], profiles, MEASURED), Plan)
    choice = choose(longer, [match(S)], profiles, MEASURED)
    assert isinstance(choice, NoReuse) and choice.reason is Reason.LONGER_THAN_MEASURED
    free = replace(longer, gate=Gate.NONE)
    assert isinstance(choose(free, [match(S)], profiles, MEASURED), Plan), "no gate, no bound"
    alike = replace(longer, first_differences={S: 3})
    plan = choose(alike, [match(S)], profiles, MEASURED)
    assert isinstance(plan, Plan) and plan.block == Span(3, 10), "lossless at any length"
