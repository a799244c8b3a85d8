"""The decision, rule by rule. Models have ten layers, pages have 16 tokens, and the numbers are
easy to compute.

At 1 ms per token-layer, full prefill of a page takes 160 ms; a page of KV of one layer is 1 MB and
a page of E 2 MB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_parts import identity, profile_of

from benchmarks.schedule import Request, ttfts
from cachetree.ids import EMPTY_SPAN, LOCAL, Location, Span
from cachetree.planning import (
    FREE_LINK,
    Considered,
    Demand,
    Gate,
    Link,
    NoReuse,
    PrefillCost,
    Reason,
    Requested,
    choose,
    index_profiles,
    patience_for,
    saving_s,
    weigh,
)
from cachetree.planning.plan import Match, Plan, Strategy
from cachetree.planning.prediction import Costs, full_prefill_s, recompute_s, times_of
from cachetree.planning.profile import BlockQuality, EMap

MB = 1_000_000
FAR = Location("tcp://far:1")


RECEIVER, SENDER, OTHER = identity("r"), identity("s"), identity("o")
R, S, O = RECEIVER.model_id, SENDER.model_id, OTHER.model_id  # noqa: E741
RECOMMENDED = BlockQuality(start=3, stop=6, quality=0.96)
PROFILE = profile_of(
    SENDER,
    RECEIVER,
    RECOMMENDED,
    BlockQuality(start=2, stop=7, quality=0.97),
    BlockQuality(start=0, stop=8, quality=0.99),
)
FAILED = msgspec.structs.replace(PROFILE, passed=False, reason="loses 9 %")
DEMAND = Demand(receiver=R, num_layers=10, page_size=16, num_pages=10)
UNKNOWN = Costs(kv_page_bytes=MB, e_page_bytes=2 * MB)


def links(bytes_per_s: Mapping[Location, float]) -> dict[Location, Link]:
    return {location: Link(byte_s=1 / rate) for location, rate in bytes_per_s.items()}


MEASURED = replace(
    UNKNOWN,
    prefill=PrefillCost(token_s=10e-3, context_s=0.0),
    recompute=PrefillCost(token_s=1e-3, context_s=0.0),
    links=links({FAR: 1e9, LOCAL: 1e12}),
)
PROFILES = index_profiles([PROFILE])
ALL_E = dict.fromkeys(range(10), 10)


def match(model, num_pages=10, location=LOCAL, e=ALL_E):
    return Match(model=model, location=location, num_pages=num_pages, e_pages=e)  # type: ignore[arg-type]


def plan_for(*matches: Match, demand=DEMAND, profiles=PROFILES, costs=UNKNOWN) -> Plan:
    plan = choose(demand, matches, profiles, costs)
    assert isinstance(plan, Plan), plan
    (taken,) = [
        it for it in weigh(Considered(demand, matches, costs), profiles) if it.reason == "taken"
    ]
    assert (taken.sender, taken.location) == (plan.sender, plan.location)
    assert taken.pages == (plan.pages.start, plan.pages.stop)
    assert taken.block == ((plan.block.start, plan.block.stop) if len(plan.block) else None)
    return plan


def reason_for(*matches: Match, demand=DEMAND, profiles=PROFILES, costs=UNKNOWN) -> Reason:
    nothing = choose(demand, matches, profiles, costs)
    assert isinstance(nothing, NoReuse), nothing
    ways = {it.reason for it in weigh(Considered(demand, matches, costs), profiles)}
    assert not ways & {"taken", "not the best"}
    assert nothing.reason.value in ways or nothing.reason is Reason.NO_MATCH
    return nothing.reason


def test_every_way_is_told_with_its_price_and_what_became_of_it():
    """Full prefill takes 1.6 s. Over a link of 1 GB/s, E of ten pages takes 20 ms, and KV of one
    layer takes 10 ms."""
    matches = [match(S, location=FAR), match(S, 4, LOCAL, e={3: 2}), match(O)]
    demand = replace(DEMAND, min_pages=3)
    considered = Considered(demand, matches, MEASURED)
    no_e = f"{S} lacks E at some of layers [0, 2, 3] for pages from 0"
    outcomes = {
        (it.location, it.block): (
            *(it.reason, it.quality, it.ttft_s and round(it.ttft_s, 2)),
            *(it.saving_s and round(it.saving_s, 2), it.bytes and it.bytes // MB, it.detail),
        )
        for it in weigh(considered, PROFILES)
    }
    assert outcomes == {
        (FAR, (3, 6)): ("taken", 0.96, 0.34, 1.26, 90, ""),
        (FAR, (2, 7)): ("not the best", 0.97, 0.66, 0.94, 70, ""),
        (FAR, (0, 8)): ("not the best", 0.99, 1.12, 0.48, 20, ""),
        (LOCAL, (3, 6)): ("no_e", 0.96, None, None, 36, no_e),
        (LOCAL, (2, 7)): ("no_e", 0.97, None, None, 28, no_e),
        (LOCAL, (0, 8)): ("not the best", 0.99, 1.41, 0.19, 8, ""),
        (LOCAL, None): ("no_profile", None, None, None, None, f"no profile with sender {O}"),
    }
    assert considered.full_prefill_s == pytest.approx(1.6)
    assert not any(it.exact for it in weigh(considered, PROFILES))
    asked = replace(considered, demand=replace(demand, requested=Requested(sender=O)))
    reasons = [it.reason for it in weigh(asked, PROFILES)]
    assert reasons == ["not asked for", "not asked for", "no_profile"]


def test_the_own_model_is_exact_and_needs_no_profile():
    matches = [match(R, 7, FAR, e={})]
    (way,) = weigh(Considered(DEMAND, matches, UNKNOWN), {})
    assert (way.exact, way.quality) == (True, 1.0)
    plan = plan_for(*matches, profiles={})
    assert plan == Plan(
        sender=R, receiver=R, location=FAR, pages=Span(0, 7), block=Span(0, 0), num_layers=10
    )
    assert plan.is_exact


def test_a_difference_that_the_server_found_itself_needs_no_profile():
    demand = replace(DEMAND, first_differences={S: 6, O: 10})
    upper = plan_for(match(S), demand=demand, profiles={})
    assert (upper.block, upper.is_exact) == (Span(6, 10), True)
    same = plan_for(match(S), match(O), demand=demand, profiles={})
    assert (same.sender, len(same.block), same.is_exact) == (O, 0, True)
    none = replace(DEMAND, first_differences={S: 0})
    assert reason_for(match(S), demand=none, profiles={}) is Reason.NO_PROFILE


def test_one_step_recomputes_only_so_much():
    """Recomputing [3, 6) of 160 tokens is 320 token-layers: at 1 ms each, 0.32 s."""
    tokens = replace(DEMAND, max_recompute_tokens=50)
    assert plan_for(match(S), demand=tokens).pages == Span(0, 3)
    seconds = replace(DEMAND, max_stall_s=0.2, first_page=2)
    assert plan_for(match(S), demand=seconds, costs=MEASURED).pages == Span(2, 8)
    assert plan_for(match(S), demand=seconds).pages == Span(2, 10), "no speed is known yet"
    enough = replace(DEMAND, max_stall_s=0.33)
    assert plan_for(match(S), demand=enough, costs=MEASURED).pages == Span(0, 10)
    assert plan_for(match(R), demand=tokens).pages == Span(0, 10), "nothing is recomputed"
    short = replace(tokens, min_pages=4)
    assert reason_for(match(S), demand=short) is Reason.RECOMPUTE_TOO_LONG
    plan = plan_for(match(S))
    assert recompute_s(plan, 16, MEASURED.recompute) == pytest.approx(0.32)


def test_one_step_recomputes_and_copies_only_for_so_long():
    """A page with [3, 6) takes 32 ms of recompute, and 18 ms of copies of 9 MB. All ten layers are
    10 MB."""
    costs = replace(MEASURED, links={FAR: Link(byte_s=0.0, copy_byte_s=2e-3 / MB)})
    demand = replace(DEMAND, max_stall_s=0.201)
    assert plan_for(match(S, location=FAR), demand=demand, costs=costs).pages == Span(0, 4)
    assert plan_for(match(R, location=FAR), demand=demand, costs=costs).pages == Span(0, 10)
    demand = replace(DEMAND, max_stall_s=0.101)
    assert plan_for(match(R, location=FAR), demand=demand, costs=costs).pages == Span(0, 5)


def test_another_model_needs_a_profile_that_passed():
    assert reason_for(match(S), profiles={}) is Reason.NO_PROFILE
    assert reason_for(match(O)) is Reason.NO_PROFILE
    assert reason_for(match(S), profiles=index_profiles([FAILED])) is Reason.GATE_FAILED
    # The profile of the opposite direction says nothing.
    assert reason_for(match(R), demand=replace(DEMAND, receiver=S)) is Reason.NO_PROFILE
    plan = plan_for(match(S))
    assert (plan.sender, plan.block, plan.pages) == (S, Span(3, 6), Span(0, 10))
    assert plan.transition_layers == (3,)


def test_pages_on_the_device_are_not_fetched_again():
    plan = plan_for(match(R, 9), demand=replace(DEMAND, first_page=4))
    assert plan.pages == Span(4, 9)
    assert plan_for(match(R, 30)).pages == Span(0, 10)  # nor what the prompt does not have
    assert reason_for(match(R, 4), demand=replace(DEMAND, first_page=4)) is Reason.ON_DEVICE
    picky = replace(DEMAND, first_page=4, min_pages=3)
    assert reason_for(match(R, 6), demand=picky) is Reason.ON_DEVICE
    barely = replace(picky, first_page=2)
    assert reason_for(match(R, 4), demand=barely) is Reason.TOO_SHORT
    assert plan_for(match(R, 7), demand=picky).pages == Span(4, 7)


def test_e_limits_the_pages():
    assert plan_for(match(S, e={3: 6})).pages == Span(0, 6)
    only_recommended = index_profiles([msgspec.structs.replace(PROFILE, blocks=(RECOMMENDED,))])
    assert reason_for(match(S, e={4: 10}), profiles=only_recommended) is Reason.NO_E
    later = replace(DEMAND, first_page=6)
    assert reason_for(match(S, e={3: 6}), demand=later, profiles=only_recommended) is Reason.NO_E


def test_a_block_from_the_first_layer_needs_no_e():
    plan = plan_for(match(S, e={}))
    assert (plan.block, plan.pages, plan.transition_layers) == (Span(0, 8), Span(0, 10), ())


def test_waiting_requests_get_the_fewest_layers_of_what_is_proven():
    quality = (BlockQuality(start=5, stop=7, quality=0.95), *PROFILE.blocks)
    profiles = index_profiles([msgspec.structs.replace(PROFILE, blocks=quality)])
    busy = replace(DEMAND, num_waiting=3, ttft_target_s=60)
    assert plan_for(match(S), demand=busy, profiles=profiles).block == Span(5, 7)
    # Idle and without a target: recommended.
    assert plan_for(match(S), profiles=profiles).block == Span(3, 6)


def test_an_idle_server_recomputes_as_much_as_the_target_allows():
    # 160 tokens: a layer takes 160 ms; [3,6) 0.34 s with E, [2,7) 0.66, [0,8) 1.12, full 1.6.
    def block(target_s: float, num_new_tokens: int = 0) -> Span:
        demand = replace(DEMAND, ttft_target_s=target_s, num_new_tokens=num_new_tokens)
        return plan_for(match(S, location=FAR), demand=demand, costs=MEASURED).block

    assert [block(target_s) for target_s in (1.2, 1.0, 0.5)] == [Span(0, 8), Span(2, 7), Span(3, 6)]
    assert block(0.1) == Span(3, 6)  # none meets it: the fastest
    assert block(1.2, num_new_tokens=20) == Span(2, 7)  # 0.2 s of them count


def test_a_plan_that_is_not_faster_is_not_used():
    slow = replace(MEASURED, links=links({FAR: 50 * MB}))
    # 10 layers x 10 pages = 100 MB take 2 s, full prefill 1.6 s.
    assert reason_for(match(R, location=FAR), costs=slow) is Reason.SLOWER
    assert plan_for(match(R, location=FAR), costs=MEASURED).pages == Span(0, 10)
    assert plan_for(match(R, location=FAR), match(R, 4), costs=slow).location == LOCAL
    unmeasured = replace(slow, prefill=None, recompute=None)
    assert plan_for(match(R, location=FAR), costs=unmeasured).location == FAR
    # A larger block moves fewer bytes: E 0.4 s + max(0.4 s KV, 1.12 s) beats 1.6 s.
    plan = plan_for(match(S, location=FAR), costs=replace(slow, links=links({FAR: 40 * MB})))
    assert plan.block == Span(0, 8)
    far = MEASURED.links[FAR]
    expensive = replace(MEASURED, links={FAR: replace(far, fixed_s=2.0)})
    assert reason_for(match(R, location=FAR), costs=expensive) is Reason.SLOWER


def test_a_lossless_block_needs_no_gate():
    profiles = index_profiles([msgspec.structs.replace(FAILED, first_difference=7)])
    assert plan_for(match(S), profiles=profiles).block == Span(7, 10)
    below = plan_for(match(S, e={3: 10}), profiles=profiles)
    assert below.block == Span(3, 10), "E below the first difference is the same too"
    assert below.is_exact
    assert reason_for(match(S, e={8: 10}), profiles=profiles) is Reason.NO_E
    asked = replace(DEMAND, requested=Requested(block=Span(3, 6)))
    assert reason_for(match(S), demand=asked, profiles=profiles) is Reason.UNGATED_BLOCK
    equal = index_profiles([msgspec.structs.replace(FAILED, first_difference=10)])
    assert plan_for(match(S, e={}), profiles=equal).block == EMPTY_SPAN


def test_a_lossless_block_stands_beside_the_measured_ones():
    profiles = index_profiles([msgspec.structs.replace(PROFILE, first_difference=9)])
    assert plan_for(match(S), profiles=profiles).block == Span(3, 6), "recommended"
    busy = replace(DEMAND, num_waiting=3)
    assert plan_for(match(S), demand=busy, profiles=profiles).block == Span(9, 10), "fewest layers"


def test_a_block_that_is_lossless_and_proven_is_one_way():
    upper = BlockQuality(start=9, stop=10, quality=0.97)
    profile = msgspec.structs.replace(PROFILE, first_difference=9, blocks=(RECOMMENDED, upper))
    ways = [*weigh(Considered(DEMAND, [match(S, e={3: 10, 9: 10})], UNKNOWN), {(S, R): profile})]
    assert [(it.block, it.quality) for it in ways] == [
        ((3, 10), 1.0),
        ((9, 10), 1.0),
        ((3, 6), 0.96),
    ]


def test_the_larger_saving_wins():
    own, other = match(R, 3), match(S, 10)
    assert plan_for(own, other).sender == S  # 3 x 10 layers saved against 10 x 7
    assert plan_for(match(R, 8), other).sender == R
    slow = replace(MEASURED, links=links({LOCAL: 1e12, FAR: 90 * MB}))
    # Ten remote pages save 1.6 - 1.11 s, five local ones 0.8 s.
    assert plan_for(match(R, 10, FAR), match(R, 5), costs=slow).pages == Span(0, 5)


def test_ties_go_to_the_exact_and_then_to_the_local_cache():
    free = msgspec.structs.replace(
        PROFILE, blocks=(BlockQuality(start=0, stop=0, quality=0.99),), recommended=None
    )
    profiles = index_profiles([free])
    for matches in ([match(S), match(R)], [match(R), match(S)]):
        assert plan_for(*matches, profiles=profiles).sender == R
    for matches in ([match(S, location=FAR), match(S)], [match(S), match(S, location=FAR)]):
        assert plan_for(*matches).location == LOCAL
    assert plan_for(match(R, location=FAR), match(S), profiles=profiles).sender == R


def test_a_request_may_name_its_sender():
    named = replace(DEMAND, requested=Requested(sender=S))
    assert plan_for(match(R), match(S), demand=named).sender == S
    assert reason_for(match(R), demand=named) is Reason.NO_MATCH


def test_a_request_may_name_a_block_that_passed():
    def asks(start: int, stop: int, **changes: object) -> Demand:
        wanted = Requested(sender=S, block=Span(start, stop))
        return replace(DEMAND, requested=wanted, **changes)  # type: ignore[arg-type]

    assert plan_for(match(S), demand=asks(2, 7)).block == Span(2, 7)
    for start, stop in ((4, 5), (1, 9), (0, 0), (0, 10)):
        assert reason_for(match(S), demand=asks(start, stop)) is Reason.UNGATED_BLOCK
        free = asks(start, stop, gate=Gate.NONE)
        assert plan_for(match(S), demand=free, profiles={}).block == Span(start, stop)
    assert reason_for(match(S, e={3: 10}), demand=asks(2, 7)) is Reason.NO_E
    assert reason_for(match(S), demand=asks(9, 11, gate=Gate.NONE)) is Reason.UNGATED_BLOCK
    # What was asked for is done, even where it does not pay.
    slow = replace(MEASURED, links=links({FAR: MB}))
    assert plan_for(match(S, location=FAR), demand=asks(2, 7), costs=slow).block == Span(2, 7)


def test_a_plan_names_the_map_of_its_block_unless_it_is_exact():
    e_map = EMap(layer=3, dtype="float32", sha256="digest")
    corrected = msgspec.structs.replace(RECOMMENDED, e_map=e_map)
    blocks = (corrected, *PROFILE.blocks[1:])
    profile = msgspec.structs.replace(PROFILE, blocks=blocks, recommended=corrected)
    profiles = index_profiles([profile])
    assert plan_for(match(S), profiles=profiles).e_map == "digest"
    assert plan_for(match(S)).e_map == ""
    considered = Considered(DEMAND, [match(S)], UNKNOWN)
    assert [it.e_corrected for it in weigh(considered, profiles)] == [True, False, False]

    def asks(start: int, stop: int, gate: Gate = Gate.ENFORCE) -> Demand:
        return replace(DEMAND, requested=Requested(block=Span(start, stop)), gate=gate)

    for gate in Gate:
        assert plan_for(match(S), demand=asks(3, 6, gate), profiles=profiles).e_map == "digest"
        assert plan_for(match(S), demand=asks(2, 7, gate), profiles=profiles).e_map == ""
    # What is lossless has nothing to correct, whatever a profile says.
    whole = msgspec.structs.replace(corrected, stop=10)
    same = msgspec.structs.replace(profile, blocks=(whole,), recommended=whole, first_difference=3)
    plan = choose(asks(3, 10), [match(S)], index_profiles([same]), UNKNOWN)
    assert isinstance(plan, Plan)
    assert plan.is_exact
    assert plan.e_map == ""


def test_a_named_block_on_the_own_cache_needs_the_own_name():
    by_name = replace(DEMAND, requested=Requested(sender=R, block=Span(2, 4)))
    assert plan_for(match(R), demand=by_name, profiles={}).block == Span(2, 4)
    by_block = replace(DEMAND, requested=Requested(block=Span(2, 7)))
    assert plan_for(match(R), demand=by_block).block == Span(0, 0)


def test_the_own_cache_answers_who_wants_nothing_recomputed():
    """An example is an activated adapter before its invocation: its model is the base."""
    asked = replace(DEMAND, requested=Requested(block=EMPTY_SPAN))
    assert plan_for(match(R), demand=asked, profiles={}).is_exact
    assert reason_for(match(S), demand=asked) is Reason.UNGATED_BLOCK


def test_a_forbidden_block_is_refused_whoever_has_the_pages():
    """The server's own cache could answer, or the device has all pages; the block is refused all
    the same."""
    asked = replace(DEMAND, requested=Requested(block=Span(4, 5)))
    for held in (0, 10):
        nothing = choose(replace(asked, first_page=held), [match(R)], PROFILES, UNKNOWN)
        assert isinstance(nothing, NoReuse)
        assert nothing.reason is Reason.UNGATED_BLOCK
        assert nothing.detail.endswith("allowed: 0:8, 2:7, 3:6")
    assert reason_for(match(R), demand=asked, profiles={}) is Reason.UNGATED_BLOCK
    other = replace(asked, first_differences={S: 4})
    assert reason_for(match(R), demand=other, profiles={}) is Reason.UNGATED_BLOCK
    lossless = replace(other, requested=Requested(block=Span(3, 10)))
    assert plan_for(match(R), demand=lossless, profiles={}).block == EMPTY_SPAN


def test_an_approximate_plan_goes_on_from_approximate_kv():
    """An exact plan continues from exact KV. Both plans have to save more than the pages on the
    device do."""
    held = replace(DEMAND, first_page=2, first_approximate=4)
    assert plan_for(match(S), demand=held).pages == Span(4, 10)
    assert plan_for(match(R), demand=held).pages == Span(2, 10)
    assert plan_for(match(S), demand=replace(DEMAND, first_page=2)).pages == Span(2, 10)
    short = replace(held, first_approximate=9, min_pages=2)
    assert reason_for(match(S), demand=short) is Reason.ON_DEVICE
    assert reason_for(match(R), demand=replace(held, first_approximate=10)) is Reason.SLOWER


@pytest.mark.parametrize("costs", [UNKNOWN, MEASURED])
def test_a_long_exact_prefix_is_worth_more_than_approximate_pages_from_the_root(costs):
    """Recomputing a block of three layers costs as much as two of ten full layers, or three if
    nothing is measured. For ten pages, this is as much as two or three pages in full."""
    demand = replace(DEMAND, first_approximate=0)
    most = 6 if costs is UNKNOWN else 7
    for num_exact in range(10):
        choice = choose(replace(demand, first_page=num_exact), [match(S)], PROFILES, costs)
        if num_exact <= most:
            assert isinstance(choice, Plan)
            assert choice.pages == Span(0, 10)
        else:
            assert isinstance(choice, NoReuse)
            assert choice.reason is Reason.SLOWER


@pytest.mark.parametrize("place", ["pool:", "pool:lora"])
def test_slower_plan_names_where_its_pages_are(place):
    nearly = replace(DEMAND, first_page=9, first_approximate=0)
    choice = choose(nearly, [match(S, location=Location(place))], PROFILES, MEASURED)
    assert isinstance(choice, NoReuse)
    assert f" at {place.removesuffix(':')}: full prefill is faster" in choice.detail


def test_without_the_gate_a_failed_profile_still_names_blocks():
    free = replace(DEMAND, gate=Gate.NONE)
    failed = index_profiles([FAILED])
    assert plan_for(match(S), demand=free, profiles=failed).block == Span(3, 6)
    assert reason_for(match(S), demand=free, profiles={}) is Reason.NO_PROFILE
    hopeless = msgspec.structs.replace(FAILED, blocks=(), recommended=None)
    assert (
        reason_for(match(S), demand=free, profiles=index_profiles([hopeless])) is Reason.GATE_FAILED
    )


def test_the_reason_is_the_one_of_the_match_that_came_furthest():
    assert reason_for(match(R, 0), match(O)) is Reason.NO_PROFILE
    slow = replace(MEASURED, links=links({FAR: 50 * MB}))
    assert reason_for(match(O), match(R, location=FAR), costs=slow) is Reason.SLOWER


def test_a_repeat_that_the_device_answers_is_not_called_slower():
    """An exact plan for the same pages would take as long as a full prefill."""
    held = replace(DEMAND, first_approximate=10)
    lossless = msgspec.structs.replace(PROFILE, first_difference=0)
    everything = msgspec.structs.replace(
        lossless.blocks[0], start=0, stop=PROFILE.receiver.num_layers
    )
    both = msgspec.structs.replace(lossless, blocks=(*lossless.blocks, everything))
    assert reason_for(match(S), demand=held, profiles=index_profiles([both])) is Reason.ON_DEVICE
    assert reason_for(match(O), match(S), demand=held) is Reason.NO_PROFILE


def test_reasons_are_labels():
    assert [reason.value for reason in Reason] == [
        "off",
        "no_match",
        "too_short",
        "on_device",
        "no_profile",
        "gate_failed",
        "longer_than_measured",
        "ungated_block",
        "no_e",
        "recompute_too_long",
        "slower",
        "staging_full",
    ]


@pytest.mark.parametrize(
    ("block", "seconds"),
    [
        (Span(0, 0), 0.1),  # 100 MB at 1 GB/s
        (Span(3, 6), 0.02 + 0.32),  # E, then two full layers hide 70 MB
        (Span(3, 4), 0.02 + 0.09),  # one layer: its K and V only, so the transfer decides
        (Span(0, 10), 1.44),
    ],
)
def test_the_prediction(block, seconds):
    plan = plan_for(match(S, location=FAR))
    plan = replace(plan, block=block)
    assert times_of(plan, 16, MEASURED).ttft_s == pytest.approx(seconds)
    assert times_of(plan, 16, UNKNOWN) is None
    assert full_prefill_s(Span(0, 160), MEASURED.prefill) == pytest.approx(1.6)


def test_a_block_that_took_longer_of_late_is_predicted_to_take_longer():
    recompute = MEASURED.recompute
    assert recompute is not None
    late = replace(MEASURED, recompute=replace(recompute, margin=1.25))
    plan = plan_for(match(S, location=FAR))
    assert plan.block == Span(3, 6)
    assert times_of(plan, 16, late).ttft_s == pytest.approx(0.02 + 0.32 * 1.25)


def test_a_block_that_was_faster_of_late_is_predicted_to_hide_less_of_the_transfer():
    """Its 32 ms hide a part of 70 ms of KV, behind 20 ms of E; 16 ms would hide half as much."""
    fast = PrefillCost(token_s=1e-4, context_s=0.0, margin=2.0)
    plan = plan_for(match(S, location=FAR))
    assert times_of(plan, 16, replace(MEASURED, recompute=fast)).wait_s == pytest.approx(0.074)


@pytest.mark.parametrize("slower", [1, 30, 1000])
def test_a_late_transfer_and_a_recompute_that_is_off_are_not_expected_at_once(slower):
    assert MEASURED.recompute is not None
    link = replace(MEASURED.links[FAR], byte_s=slower * MEASURED.links[FAR].byte_s)
    measured = replace(MEASURED, links={FAR: link})
    late = replace(measured, links={FAR: replace(link, margin=1.4)})
    off = replace(measured, recompute=replace(MEASURED.recompute, margin=1.25))
    both = replace(late, recompute=off.recompute)
    plan = plan_for(match(S, location=FAR))
    for of in (attrgetter("wait_s"), attrgetter("ttft_s")):
        times = [of(times_of(plan, 16, costs)) for costs in (both, late, off, measured)]
        assert times[0] == max(times[1:3]) >= times[3]
    assert times[0] > times[3]


def test_while_one_of_the_speeds_is_unknown_so_is_what_a_plan_saves():
    """Either no recompute was measured, or the prompt is longer than any measured prompt."""
    prefill = MEASURED.prefill
    assert prefill is not None
    long = replace(MEASURED, prefill=replace(prefill, known_tokens=100))
    some = match(S, location=FAR, e={3: 6})
    for costs in (long, replace(MEASURED, recompute=None)):
        plan = plan_for(some, costs=costs)
        assert (plan.block, plan.pages) == (Span(3, 6), Span(0, 6))
        assert saving_s(plan, DEMAND, costs) is None


def test_pages_beyond_the_plan_are_prefilled():
    """Four of ten pages are prefilled, at 0.16 s each."""
    plan = replace(plan_for(match(S, location=FAR)), pages=Span(0, 6))
    ttft_s = times_of(plan, 16, MEASURED).ttft_s
    assert ttft_s is not None
    assert saving_s(plan, DEMAND, MEASURED) == pytest.approx(1.6 - 0.64 - ttft_s)


@given(st.integers(0, 10), st.integers(0, 10), st.floats(1e6, 1e10))
def test_the_prediction_is_the_pipelined_schedule(one, two, bytes_per_s):
    block = Span(min(one, two), max(one, two))
    costs = replace(MEASURED, links=links({FAR: bytes_per_s}))
    plan = replace(plan_for(match(S, location=FAR)), block=block)
    request = Request(
        block=block,
        num_layers=10,
        load=10 * MB / bytes_per_s,
        recompute=0.16 * max(0, len(block) - 1),
        e_load=20 * MB / bytes_per_s,
    )
    (drawn,) = ttfts([request], Strategy.PIPELINED)
    assert times_of(plan, 16, costs).ttft_s == pytest.approx(drawn)


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_a_plan_may_wait_longer_than_it_saves(num_waiting):
    """Ten pages of ten layers: full prefill takes 1.6 s, and their KV is 100 MB."""
    demand = replace(DEMAND, num_waiting=num_waiting)
    for mb_per_s in (124, 63, 62):
        waits_s = 100 / mb_per_s
        costs = replace(MEASURED, links=links({FAR: mb_per_s * 1e6}))
        choice = choose(demand, [match(R, location=FAR)], {}, costs)
        assert isinstance(choice, Plan) == (waits_s < 1.6)
    plan = plan_for(match(R, location=FAR))
    costs = replace(MEASURED, links=links({FAR: 100e6}))
    assert saving_s(plan, demand, costs) == pytest.approx(0.6)
    some = replace(demand, first_approximate=2)  # Two of the ten, which it gives up.
    assert saving_s(plan, some, costs) == pytest.approx(0.8 * 1.6 - 1.0)
    assert saving_s(plan, demand, UNKNOWN) is None


def test_a_request_is_to_wait_for_what_its_plan_is_predicted_to_wait():
    """E of [3, 6) takes 0.2 s. KV takes 0.7 s, of which the recompute hides 0.32 s."""
    link = Link(byte_s=1e-8)
    costs = replace(MEASURED, links={FAR: link})
    plan = plan_for(match(S, location=FAR))
    assert plan.block == Span(3, 6)
    patience = patience_for(plan, DEMAND, costs)
    assert patience.wait_s == pytest.approx(0.2 + 0.7 - 0.32)
    assert patience.saving_s == pytest.approx(1.6 - 0.32 - patience.wait_s)
    assert patience.link == link
    assert patience_for(plan, DEMAND, UNKNOWN) is None
    unknown = patience_for(plan, DEMAND, replace(MEASURED, links={}))
    assert unknown is not None and unknown.link == FREE_LINK
