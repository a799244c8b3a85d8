"""The decision: reuse whose cache, for which pages, with which block recomputed, or not at all.

Pure: values in, one value out. Of every match at most one plan is made; the best of them wins.

    own model      every layer loaded, exact, no profile needed
    another model  without a gate what is lossless: all layers from the first that differs, or from
                   one below it that has E; else only with a profile that passed its gate, one of
                   its proven plans, for prompts up to twice as long as it was measured on; in both
                   cases for as many pages as have E where the plan needs it

Which block (DroidSpeak, NSDI '26, appendix B): while requests wait, the one that recomputes the
fewest layers; while none do, the one that recomputes the most within the TTFT target, or the
recommended one where there is no target. Without a target the choice is among those that are nearly
as fast as the fastest: over a slow link more layers may be sooner. A plan that is predicted to be
no faster than full prefill is not used, nor, while no others compute, one that saves less than its
request would wait for the link: that request would give it up. Transfers and recomputes are taken
to last as long as nine in ten of late would (`cachetree.planning.margin`). Costs that are not
measured yet count as nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from cachetree.ids import EMPTY_SPAN, LOCAL, ModelId, Span, is_pool, nearness
from cachetree.planning.link import FREE
from cachetree.planning.plan import Match, Plan
from cachetree.planning.prediction import (
    Costs,
    Times,
    full_prefill_s,
    layers_of_work,
    recompute_s,
    times_of,
)
from cachetree.planning.profile import BEYOND, PROJECTION, BlockQuality, PairProfile

NEARLY: Final = 1.05
"""Plans whose predicted TTFT is within this factor of the fastest one's are as good as that."""

_Recipe = BlockQuality
"""What is computed anew, and how good the answers are then."""

Profiles = Mapping[tuple[ModelId, ModelId], PairProfile]
"""By (sender, receiver)."""


class Gate(str, Enum):
    """Whether a pair's profile decides; off is for experiments."""

    ENFORCE = "enforce"
    OFF = "off"


class Mode(str, Enum):
    AUTO = "auto"
    OFF = "off"


class Reason(str, Enum):
    """Why a request is not reused, from the least to the most that was found.

    The values are labels in metrics and in `meta_info`; they never change.
    """

    OFF = "off"
    NO_MATCH = "no_match"
    TOO_SHORT = "too_short"
    NO_PROFILE = "no_profile"
    GATE_FAILED = "gate_failed"
    LONGER_THAN_MEASURED = "longer_than_measured"
    UNGATED_BLOCK = "ungated_block"
    NO_E = "no_e"
    RECOMPUTE_TOO_LONG = "recompute_too_long"
    SLOWER = "slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """What one request asks for itself. A `block` is obeyed without a look at the costs, and so are
    the layers to refresh beside it."""

    mode: Mode = Mode.AUTO
    sender: ModelId | None = None
    block: Span | None = None
    refreshed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be answered: which model, which part of the prompt, how pressing."""

    receiver: ModelId
    num_layers: int
    page_size: int
    num_pages: int
    """Pages of the prompt that may be reused at most, counted from its start."""
    first_page: int = 0
    """Pages that the device has already."""
    first_approximate: int | None = None
    """Those that it has as approximate KV, which approximate plans go on from; None: the others."""
    num_new_tokens: int = 0
    """Tokens after `num_pages`, which are computed in any case."""
    min_pages: int = 1
    """Fewer new pages than this are not worth a fetch."""
    num_waiting: int = 0
    """Depth of the server's queue."""
    ttft_target_s: float | None = None
    requested: Requested | None = None
    gate: Gate = Gate.ENFORCE
    is_lossy: bool = False
    """The family's entries are encoded, wherever they are but in the engine's own pool."""
    max_recompute_tokens: int | None = None
    """Of longer prefixes only so many tokens are reused where layers are recomputed."""
    max_recompute_s: float | None = None
    """The same as time, once the device's speed is known."""
    first_differences: Mapping[ModelId, int] = field(default_factory=dict)
    """By sender whose content was compared with the receiver's: the first layer that differs. Of
    others the profile tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReuse:
    reason: Reason
    detail: str = ""
    """For a person: what was missing, of whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    plan: Plan
    quality: float
    ttft_s: float | None
    """Predicted for the whole prompt; None while the device's speed is unknown."""
    saving: float
    """Seconds, or token-layers while the device's speed is unknown."""
    wait_s: float = 0.0
    """Of these seconds, how many the device has nothing to do, for it or for others."""


def index_profiles(profiles: Iterable[PairProfile]) -> Profiles:
    """Made once at start-up: a model id is a digest of its identity, too dear for each request."""
    return {(it.sender.model_id, it.receiver.model_id): it for it in profiles}


def saving_s(plan: Plan, demand: Demand, costs: Costs) -> float | None:
    """Seconds that the plan is predicted to save; None while the device's speed is unknown.

    Without it the request reads what the device has more of, exact or approximate.
    """
    times = times_of(plan, demand.page_size, costs)
    return None if times is None else _saving_s(plan, demand, costs, times)


def _saving_s(plan: Plan, demand: Demand, costs: Costs, times: Times) -> float | None:
    """The forward over the rest of the prompt has its price with the plan, too."""
    start, stop = _num_held(demand) * demand.page_size, plan.pages.stop * demand.page_size
    full_s = full_prefill_s(Span(start, _num_tokens(demand)), costs)
    rest_s = full_prefill_s(Span(stop, _num_tokens(demand)), costs)
    return None if full_s is None or rest_s is None else full_s - rest_s - times.ttft_s


def _num_tokens(demand: Demand) -> int:
    return demand.num_pages * demand.page_size + demand.num_new_tokens


def choose(
    demand: Demand, matches: Sequence[Match], profiles: Profiles, costs: Costs
) -> Plan | NoReuse:
    """The plan for one request, or why there is none."""
    requested = demand.requested or Requested()
    if requested.mode is Mode.OFF:
        return NoReuse(reason=Reason.OFF, detail="the request asked for a full prefill")
    wanted = [it for it in matches if requested.sender in (None, it.model)]
    picks = [_pick(demand, match, profiles, costs) for match in wanted]
    found = [pick for pick in picks if isinstance(pick, _Candidate)]
    if found:
        return max(found, key=lambda it: _rank(it, demand)).plan
    misses = [pick for pick in picks if isinstance(pick, NoReuse)]
    nothing = NoReuse(reason=Reason.NO_MATCH, detail="no model of the family has this prefix")
    return max([nothing, *misses], key=lambda miss: list(Reason).index(miss.reason))


def _rank(it: _Candidate, demand: Demand) -> tuple[bool, float, bool, int, float]:
    """Largest saving first; then exact before approximate, near before far, the better one."""
    meets = _meets(it, demand)
    return meets, it.saving, it.plan.is_exact, nearness(it.plan.location), it.quality


def _pick(demand: Demand, match: Match, profiles: Profiles, costs: Costs) -> _Candidate | NoReuse:
    """The best plan that this match allows."""
    recipes = _recipes(demand, match, profiles)
    if isinstance(recipes, NoReuse) and recipes.reason is Reason.UNGATED_BLOCK:
        return recipes
    if min(match.num_pages, demand.num_pages) - demand.first_page < demand.min_pages:
        have = f"{match.num_pages} pages of {match.model}, {demand.first_page} on the device"
        return NoReuse(reason=Reason.TOO_SHORT, detail=have)
    if isinstance(recipes, NoReuse):
        return recipes
    profile = profiles.get((match.model, demand.receiver))
    same = _first_difference(demand, match.model, profile)
    whole = [(it, _whole_plan(demand, match, it, same)) for it in recipes]
    if max(len(plan.pages) for _, plan in whole) < demand.min_pages:
        have = f"{match.num_pages} pages of {match.model}, {demand.first_approximate} approximate"
        return NoReuse(reason=Reason.TOO_SHORT, detail=f"{have} on the device")
    possible = [it for each in whole if (it := _candidate(demand, match, *each, costs))]
    if not possible:
        free = replace(demand, max_recompute_tokens=None, max_recompute_s=None)
        if any(_candidate(free, match, *each, costs) for each in whole):
            short = "what may be recomputed at a time is less than the fewest pages worth a fetch"
            return NoReuse(reason=Reason.RECOMPUTE_TOO_LONG, detail=short)
        layers = sorted(
            {layer for recipe in recipes for layer in (recipe.start, *recipe.refreshed)}
        )
        return NoReuse(
            reason=Reason.NO_E,
            detail=f"{match.model} lacks E at some of layers {layers} for pages from "
            f"{demand.first_page}",
        )
    explicit = demand.requested is not None and demand.requested.block is not None
    faster = possible if explicit else [it for it in possible if _is_worth_it(it)]
    if not faster:
        return NoReuse(
            reason=Reason.SLOWER,
            detail=f"{match.model} at {match.location}: full prefill is faster, or nearly so",
        )
    return _by_load(demand, match, profiles, faster)


def _recipes(demand: Demand, match: Match, profiles: Profiles) -> list[_Recipe] | NoReuse:
    """What the gate lets this request compute anew with this sender."""
    requested = demand.requested or Requested()
    block = requested.block
    if block is not None and _last_layer(requested) >= demand.num_layers:
        too_large = f"layer {_last_layer(requested)} of a model of {demand.num_layers} layers"
        return NoReuse(reason=Reason.UNGATED_BLOCK, detail=too_large)
    if match.model == demand.receiver:
        # The own cache is exact whatever is recomputed; a block only where asked for by name.
        if block is None or requested.sender == match.model:
            return [_quality(block or EMPTY_SPAN, 1.0)]
        allowed = _allowed_of_others(demand, profiles)
        if demand.gate is Gate.ENFORCE and _asked(requested) not in map(_what, allowed):
            return _ungated(requested, allowed)
        return [_quality(EMPTY_SPAN, 1.0)]
    profile = profiles.get((match.model, demand.receiver))
    is_free = demand.gate is Gate.OFF
    if block is not None and is_free:
        return [_quality(block, 0.0, requested.refreshed)]
    lossless = _lossless(demand, match, profile)
    if profile is None and not lossless:
        return NoReuse(reason=Reason.NO_PROFILE, detail=f"no profile with sender {match.model}")
    passed = profile is not None and (profile.passed or is_free)
    proven = profile.blocks if profile is not None and passed else ()
    num_tokens = demand.num_pages * demand.page_size
    is_covered = is_free or profile is None or profile.covers(num_tokens)
    allowed = lossless + list(proven if is_covered else ())
    if not allowed and proven and profile is not None:
        return NoReuse(
            reason=Reason.LONGER_THAN_MEASURED,
            detail=f"{num_tokens} tokens of prompt, and the profile was measured on at most "
            f"{profile.measured_tokens}; it is used up to {BEYOND} times as many",
        )
    if not allowed:
        reason = profile.reason if profile and not passed else "the profile has no proven block"
        return NoReuse(reason=Reason.GATE_FAILED, detail=reason)
    if block is None:
        return allowed
    asked = [it for it in allowed if _what(it) == _asked(requested)]
    return asked or _ungated(requested, allowed)


def _allowed_of_others(demand: Demand, profiles: Profiles) -> list[_Recipe]:
    """What the gate allows with one sender or another, of whom there is no match perhaps."""
    known = {sender for sender, receiver in profiles if receiver == demand.receiver}
    allowed: list[_Recipe] = []
    for sender in known | demand.first_differences.keys():
        everything = Match(
            model=sender,
            location=LOCAL,
            num_pages=demand.num_pages,
            e_pages=dict.fromkeys(range(demand.num_layers), demand.num_pages),
        )
        free = replace(demand, requested=None)
        recipes = _recipes(free, everything, profiles)
        allowed += recipes if isinstance(recipes, list) else []
    return allowed


def _what(recipe: _Recipe) -> tuple[Span, tuple[int, ...]]:
    return recipe.block, recipe.refreshed


def _asked(requested: Requested) -> tuple[Span, tuple[int, ...]]:
    return requested.block or EMPTY_SPAN, requested.refreshed


def _ungated(requested: Requested, allowed: Sequence[_Recipe]) -> NoReuse:
    names = sorted({_named(*_what(it)) for it in allowed}) or ["none"]
    return NoReuse(
        reason=Reason.UNGATED_BLOCK,
        detail=f"block {_named(*_asked(requested))} is none of those that a profile has "
        f"proven; allowed: {', '.join(names)}",
    )


def _named(block: Span, refreshed: Sequence[int]) -> str:
    """As a request names it."""
    span = f"{block.start}:{block.stop}" if len(block) else "none"
    return f"{span} refresh {','.join(map(str, refreshed))}" if refreshed else span


def _last_layer(requested: Requested) -> int:
    block = requested.block or EMPTY_SPAN
    return max([block.stop - 1, *requested.refreshed])


def _first_difference(demand: Demand, sender: ModelId, profile: PairProfile | None) -> int:
    known = demand.first_differences.get(sender)
    return known if known is not None else profile.first_difference if profile else 0


def _lossless(demand: Demand, match: Match, profile: PairProfile | None) -> list[_Recipe]:
    """Everything anew from the first layer that differs, or from one below it that has E."""
    differs = _first_difference(demand, match.model, profile)
    quality = profile.full_prefill_quality if profile is not None else 1.0
    if differs == demand.num_layers:
        return [_quality(EMPTY_SPAN, quality)]
    starts = {differs, *(layer for layer in match.e_pages if layer < differs)} - {0}
    return [_quality(Span(start, demand.num_layers), quality) for start in sorted(starts)]


def _quality(block: Span, quality: float, refreshed: tuple[int, ...] = ()) -> _Recipe:
    return BlockQuality(start=block.start, stop=block.stop, refreshed=refreshed, quality=quality)


def _whole_plan(demand: Demand, match: Match, recipe: _Recipe, first_difference: int) -> Plan:
    """For all pages that there are, whether or not they have E."""
    stop = min(match.num_pages, demand.num_pages)
    plan = Plan(
        sender=match.model,
        receiver=demand.receiver,
        location=match.location,
        pages=Span(demand.first_page, max(demand.first_page, stop)),
        block=recipe.block,
        refreshed=recipe.refreshed,
        num_layers=demand.num_layers,
        first_difference=first_difference,
        is_lossy=demand.is_lossy and not is_pool(match.location),
    )
    if plan.is_exact or demand.first_approximate is None:
        return plan
    first = demand.first_approximate
    return replace(plan, pages=Span(first, max(first, stop)))


def _candidate(
    demand: Demand, match: Match, recipe: _Recipe, plan: Plan, costs: Costs
) -> _Candidate | None:
    """The plan for as many pages as E and the device's time allow; None for too few."""
    start, stop = plan.pages.start, plan.pages.stop
    stop = min([stop, *(_num_pages_with(match, recipe, it) for it in plan.transition_layers)])
    stop = min(stop, start + _most_recomputed_pages(demand, plan, costs))
    if stop - start < demand.min_pages:
        return None
    plan = replace(plan, pages=Span(start, stop))
    times = times_of(plan, demand.page_size, costs)
    rest_s = full_prefill_s(Span(stop * demand.page_size, _num_tokens(demand)), costs)
    saving = None if times is None else _saving_s(plan, demand, costs, times)
    if times is None or saving is None or rest_s is None:
        in_vain = demand.num_layers * (_num_held(demand) - start)
        saved = demand.page_size * (_saved_page_layers(plan) - in_vain)
        return _Candidate(plan=plan, quality=recipe.quality, ttft_s=None, saving=saved)
    return _Candidate(
        plan=plan,
        quality=recipe.quality,
        ttft_s=times.ttft_s + rest_s,
        saving=saving,
        wait_s=0.0 if _are_others_computing(demand, plan, costs) else times.wait_s,
    )


def _are_others_computing(demand: Demand, plan: Plan, costs: Costs) -> bool:
    """Whether a request has the device meanwhile: more wait than what comes over the same link."""
    return demand.num_waiting > len(costs.links.get(plan.location, FREE).backlog)


def _num_held(demand: Demand) -> int:
    return max(demand.first_page, demand.first_approximate or 0)


def _num_pages_with(match: Match, recipe: _Recipe, layer: int) -> int:
    """How many pages have what the recipe begins with at this layer."""
    num_pages = match.e_pages.get(layer, 0)
    if layer in recipe.refreshed:
        return max(num_pages, match.reduced_pages.get(layer, 0))
    return num_pages


def _by_load(
    demand: Demand, match: Match, profiles: Profiles, possible: Sequence[_Candidate]
) -> _Candidate:
    """One of the blocks of one match, by how pressing the request is."""
    if demand.num_waiting == 0 and demand.ttft_target_s is not None:
        in_time = [it for it in possible if _meets(it, demand)]
        if in_time:
            return max(in_time, key=lambda it: (len(it.plan.block), it.quality))
        return min(possible, key=lambda it: it.ttft_s or 0.0)
    possible = _nearly_fastest(possible)
    if demand.num_waiting == 0:
        profile = profiles.get((match.model, demand.receiver))
        recommended = profile.recommended if profile else None
        longest = max(len(it.plan.pages) for it in possible)
        for it in possible:
            recipe = (it.plan.block, it.plan.refreshed)
            is_recommended = recommended is not None and recipe == (
                recommended.block,
                recommended.refreshed,
            )
            if is_recommended and len(it.plan.pages) == longest:
                return it
    return max(possible, key=lambda it: (_saved_page_layers(it.plan), it.quality))


def _nearly_fastest(possible: Sequence[_Candidate]) -> Sequence[_Candidate]:
    """All of them while the device's speed is unknown."""
    fastest_s = min(it.ttft_s or 0.0 for it in possible)
    return [it for it in possible if (it.ttft_s or 0.0) <= NEARLY * fastest_s]


def _is_worth_it(it: _Candidate) -> bool:
    return 0 < it.saving >= it.wait_s


def _meets(it: _Candidate, demand: Demand) -> bool:
    target_s = demand.ttft_target_s
    return target_s is None or it.ttft_s is None or it.ttft_s <= target_s


def _most_recomputed_pages(demand: Demand, plan: Plan, costs: Costs) -> int:
    """How many pages one step may recompute; all of them where that costs nothing."""
    most, work = [demand.num_pages], layers_of_work(plan)
    if work and demand.max_recompute_tokens is not None:
        most.append(demand.max_recompute_tokens // demand.page_size)
    if work and demand.max_recompute_s is not None and costs.recompute is not None:
        start = plan.pages.start

        def seconds(num_pages: int) -> float:
            so_many = replace(plan, pages=Span(start, start + num_pages))
            return recompute_s(so_many, demand.page_size, costs) or 0.0

        span = range(1, len(plan.pages) + 1)
        most.append(bisect_right(span, demand.max_recompute_s, key=seconds))
    return min(most)


def _saved_page_layers(plan: Plan) -> float:
    return len(plan.pages) * (len(plan.loaded_layers) + (1 - PROJECTION) * len(plan.refreshed))
