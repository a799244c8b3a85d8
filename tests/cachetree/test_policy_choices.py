"""Choices of the policy where two plans are near each other: each of them decides a tie."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from test_policy import (
    DEMAND,
    FAR,
    MEASURED,
    PROFILE,
    UNKNOWN,
    S,
    choose,
    match,
    plan_for,
)

from cachetree.ids import Span
from cachetree.planning.plan import Plan
from cachetree.planning.policy import Gate, NoReuse, Requested, index_profiles, predict_ttft_s
from cachetree.planning.profile import BlockQuality, PairProfile

BUSY = replace(DEMAND, num_waiting=1)


def profile_with(*blocks: BlockQuality, full: float = 1.0) -> dict:
    made: PairProfile = msgspec.structs.replace(
        PROFILE, blocks=blocks, recommended=blocks[0], full_prefill_quality=full
    )
    return index_profiles([made])


def block(start: int, stop: int, quality: float, *refreshed: int) -> BlockQuality:
    return BlockQuality(start=start, stop=stop, quality=quality, refreshed=refreshed)


def test_at_an_unknown_speed_of_the_link_the_recompute_and_the_fixed_cost_are_predicted() -> None:
    costs = replace(UNKNOWN, compute_s_per_token_layer=1e-3, overhead_s=0.25)
    plan = plan_for(match(S))
    compute_s = 160 * (len(plan.block) - 1) * 1e-3
    assert predict_ttft_s(plan, page_size=16, costs=costs) == pytest.approx(0.25 + compute_s)


def test_a_prefix_that_is_too_short_is_told_with_its_length() -> None:
    answer = choose(replace(DEMAND, min_pages=4), [match(S, 3)], index_profiles([PROFILE]), UNKNOWN)
    assert isinstance(answer, NoReuse)
    assert f"3 pages of {S}" in answer.detail


@pytest.mark.parametrize(("full", "chosen"), [(1.0, Span(3, 10)), (0.96, Span(2, 9))])
def test_of_plans_that_save_the_same_the_better_one_is_taken(full: float, chosen: Span) -> None:
    """What is lossless is as good as a full prefill was measured to be."""
    profiles = profile_with(block(2, 9, 0.97), full=full)
    demand = replace(BUSY, first_differences={S: 3})
    plan = plan_for(match(S, e={2: 10, 3: 10}), demand=demand, profiles=profiles)
    assert len(plan.block) == 7
    assert plan.block == chosen


def test_an_experiment_refreshes_the_layers_that_it_names() -> None:
    requested = Requested(block=Span(3, 6), refreshed=(8, 9))
    plan = plan_for(match(S), demand=replace(DEMAND, gate=Gate.OFF, requested=requested))
    assert (plan.block, plan.refreshed) == (Span(3, 6), (8, 9))


def test_where_no_plan_is_in_time_the_fastest_is_taken() -> None:
    profiles = profile_with(block(0, 8, 0.99), block(2, 7, 0.97), block(3, 6, 0.96))
    demand = replace(DEMAND, ttft_target_s=0.001)
    assert plan_for(match(S), demand=demand, profiles=profiles, costs=MEASURED).block == Span(3, 6)


def test_a_plan_that_takes_exactly_the_target_is_in_time() -> None:
    costs = replace(MEASURED, bytes_per_s={FAR: 1e12})
    slow = plan_for(match(S, location=FAR), demand=replace(DEMAND, ttft_target_s=60.0), costs=costs)
    exactly_s = predict_ttft_s(slow, page_size=16, costs=costs)
    again = plan_for(
        match(S, location=FAR), demand=replace(DEMAND, ttft_target_s=exactly_s), costs=costs
    )
    assert again.block == slow.block == Span(0, 8)


@pytest.mark.parametrize(
    ("blocks", "chosen"),
    [
        # A refreshed layer saves nearly what a loaded one does, and never more.
        ((block(2, 7, 0.97), block(3, 6, 0.97, 8, 9)), (Span(3, 6), (8, 9))),
        ((block(3, 6, 0.97, 8, 9), block(3, 6, 0.96)), (Span(3, 6), ())),
    ],
)
def test_under_load_refreshed_layers_count_as_what_they_save(
    blocks: tuple[BlockQuality, ...], chosen: tuple[Span, tuple[int, ...]]
) -> None:
    plan: Plan = plan_for(match(S), demand=BUSY, profiles=profile_with(*blocks))
    assert (plan.block, plan.refreshed) == chosen
