"""The decision about one request: which sender's cache, which pages, which block; or no reuse.

Pure: values in, one value out. Each match gives at most one plan; the best plan wins.

The gate says which blocks are allowed (`cachetree.planning.gate`). If a plan needs E, it covers
only pages with E.

The choice of a block (DroidSpeak, NSDI '26, appendix B) depends on the queue:

    requests wait               the block that recomputes the fewest layers
    queue empty, TTFT target    the block that recomputes the most within the TTFT target
    queue empty, no target      the recommended block

Without a target, or if requests wait, the choice is among blocks that are nearly as fast as the
fastest: over a slow link more recomputed layers may be faster. A plan predicted to be no faster
than full prefill is not used. A prediction allows for a late transfer or a slow recompute, not for
both (see `Margin`). Costs that are not measured yet count as zero.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from cachetree.ids import EMPTY_SPAN, LOCAL, Location, ModelId, Span, is_pool, nearness
from cachetree.planning.gate import Profiles, allowed_blocks, first_difference
from cachetree.planning.plan import Demand, Match, NoReuse, Plan, Reason
from cachetree.planning.prediction import (
    Costs,
    Patience,
    bytes_of,
    copy_s,
    full_prefill_s,
    layers_of_work,
    recompute_s,
    times_of,
)
from cachetree.planning.profile import BlockQuality
from cachetree.planning.speeds import FREE_LINK

NEARLY: Final = 1.05
"""Plans count as equally fast if their predicted TTFT is at most this many times the lowest
TTFT."""
_GIB: Final = 1 << 30
_TAKEN: Final = "taken"
_TOO_LONG: Final = "one step may recompute fewer pages than are worth a fetch"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A block that the gate allows for a match, with its plan."""

    plan: Plan
    """Plan for as many pages as E and the device's limits allow. If these are too few, the plan for
    all pages."""
    quality: float
    miss: NoReuse | None = None
    """Reason why the option cannot be taken. None if it can."""
    ttft_s: float | None = None
    """TTFT predicted for the whole prompt; None while the device's speed is unknown."""
    saving: float = 0.0
    """Saved seconds; saved tokens times layers while the device's speed is unknown."""


@dataclass(frozen=True, slots=True)
class Considered:
    """Inputs of a decision. Equal inputs give the same decision, so it can be explained later."""

    demand: Demand
    matches: Sequence[Match]
    costs: Costs

    @property
    def full_prefill_s(self) -> float | None:
        """Predicted seconds to prefill all tokens that the device lacks. None while the device's
        speed is unknown."""
        start = self.demand.num_held * self.demand.page_size
        return full_prefill_s(Span(start, self.demand.num_tokens), self.costs.prefill)


class Weighed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One option that `choose` considered for a request, and why the option was taken or not.

    People read this value in logs and answers; no decision depends on it.
    """

    sender: ModelId
    location: Location
    reason: str
    """The value `taken`, `not the best`, `not asked for`, or a `Reason`."""
    detail: str = ""
    pages: tuple[int, int] | None = None
    """Pages of the prompt, as a half-open range like `block`. None if no block was allowed."""
    block: tuple[int, int] | None = None
    quality: float | None = None
    """Quality as in the profile; 1 for an exact plan."""
    exact: bool = False
    bytes: int | None = None
    """Bytes to load on one rank."""
    e_corrected: bool = False
    """True if a map corrects the sender's E before the recompute."""
    ttft_s: float | None = None
    """Predicted TTFT with this option; compare it with `Considered.full_prefill_s`. None if the
    device's speed is unknown, or if there are too few pages."""
    saving_s: float | None = None


def weigh(considered: Considered, profiles: Profiles) -> list[Weighed]:
    """Return every option that `choose` considers, with the reason why it is taken or not."""
    demand, matches = considered.demand, considered.matches
    chosen = choose(demand, matches, profiles, considered.costs)
    return [way for it in matches for way in _ways(it, considered, profiles, chosen)]


def _ways(
    match: Match, considered: Considered, profiles: Profiles, chosen: Plan | NoReuse
) -> Iterator[Weighed]:
    demand = considered.demand
    way = Weighed(sender=match.model, location=match.location, reason="not asked for")
    if demand.requested.sender not in (None, match.model):
        yield way
        return
    options = _options(demand, match, profiles, considered.costs)
    if isinstance(options, NoReuse):
        yield msgspec.structs.replace(way, reason=options.reason.value, detail=options.detail)
        return
    for option in options:
        plan, miss = option.plan, option.miss
        yield msgspec.structs.replace(
            way,
            reason=miss.reason.value if miss else _TAKEN if plan == chosen else "not the best",
            detail=miss.detail if miss else "",
            pages=(plan.pages.start, plan.pages.stop),
            block=(plan.block.start, plan.block.stop) if len(plan.block) else None,
            quality=option.quality,
            exact=plan.is_exact,
            bytes=sum(bytes_of(plan, considered.costs)),
            e_corrected=bool(plan.e_map),
            ttft_s=option.ttft_s,
            saving_s=None if option.ttft_s is None else option.saving,
        )


def saving_s(plan: Plan, demand: Demand, costs: Costs) -> float | None:
    """Predict the seconds that the plan saves; None while the device's speed is unknown.

    Without the plan, the request would compute all tokens after the device's exact or approximate
    prefix, whichever is longer.
    """
    option = _priced(_Option(plan=plan, quality=1.0), demand, costs)
    return None if option.ttft_s is None else option.saving


def patience_for(plan: Plan, demand: Demand, costs: Costs) -> Patience | None:
    """Return how long a request may wait for the plan; None while the device's speed is unknown."""
    saved_s, times = saving_s(plan, demand, costs), times_of(plan, demand.page_size, costs)
    if saved_s is None or times is None:
        return None
    link = costs.links.get(plan.location, FREE_LINK)
    return Patience(saving_s=saved_s, wait_s=times.wait_s, link=link)


def choose(
    demand: Demand, matches: Sequence[Match], profiles: Profiles, costs: Costs
) -> Plan | NoReuse:
    """Return the plan for one request, or the reason why there is none."""
    takeable: list[_Option] = []
    misses = [NoReuse(reason=Reason.NO_MATCH, detail="no model of the family has this prefix")]
    for match in matches:
        if demand.requested.sender not in (None, match.model):
            continue
        options = _options(demand, match, profiles, costs)
        if isinstance(options, NoReuse):
            misses.append(options)
            continue
        missed = [it.miss for it in options if it.miss is not None]
        # Pages on the device need no plan.
        on_device = [it for it in missed if it.reason is Reason.ON_DEVICE]
        misses += on_device or missed
        if possible := [it for it in options if it.miss is None]:
            takeable.append(_by_load(demand, match, profiles, possible))
    if takeable:
        return max(takeable, key=lambda it: _rank(it, demand)).plan
    return max(misses, key=lambda miss: list(Reason).index(miss.reason))


def _rank(option: _Option, demand: Demand) -> tuple[bool, float, bool, int, float]:
    """Return a key that ranks options: first those that meet the TTFT target, then by saving. Among
    equal savings, exact options come first, then near ones, then those of high quality."""
    meets = _meets(option, demand)
    return (
        meets,
        option.saving,
        option.plan.is_exact,
        nearness(option.plan.location),
        option.quality,
    )


def _options(
    demand: Demand, match: Match, profiles: Profiles, costs: Costs
) -> list[_Option] | NoReuse:
    allowed = allowed_blocks(demand, match, profiles)
    if isinstance(allowed, NoReuse) and allowed.reason is Reason.UNGATED_BLOCK:
        return allowed
    if min(match.num_pages, demand.num_pages) - demand.first_page < demand.min_pages:
        have = f"{match.num_pages} pages of {match.model}, {demand.first_page} on the device"
        return NoReuse(reason=_few_left(demand, demand.first_page), detail=have)
    if isinstance(allowed, NoReuse):
        return allowed
    same = first_difference(demand, match.model, profiles.get((match.model, demand.receiver)))
    whole = [
        _Option(plan=_whole_plan(demand, match, it, same), quality=it.quality) for it in allowed
    ]
    starts = sorted({it.start for it in allowed})
    return [_fitted(it, demand, match, starts, costs) for it in whole]


def _few_left(demand: Demand, num_on_device: int) -> Reason:
    """Return the reason for too few pages to load: the device has them, or the prefix is short."""
    return Reason.ON_DEVICE if num_on_device >= demand.min_pages else Reason.TOO_SHORT


def _whole_plan(demand: Demand, match: Match, quality: BlockQuality, first_difference: int) -> Plan:
    """Make the plan for all pages of the match, even if some lack E."""
    stop = min(match.num_pages, demand.num_pages)
    plan = Plan(
        sender=match.model,
        receiver=demand.receiver,
        location=match.location,
        pages=Span(demand.first_page, max(demand.first_page, stop)),
        block=quality.block,
        num_layers=demand.num_layers,
        first_difference=first_difference,
        is_lossy=demand.is_lossy and not is_pool(match.location),
    )
    if plan.is_exact:
        return plan
    if quality.e_map is not None:
        plan = replace(plan, e_map=quality.e_map.sha256)
    if demand.first_approximate is None:
        return plan
    first = demand.first_approximate
    start = max(first, demand.num_head)
    head = Span(first, start) if first < start else EMPTY_SPAN
    return replace(plan, pages=Span(start, max(start, stop)), head=head)


def _fitted(
    option: _Option, demand: Demand, match: Match, starts: Sequence[int], costs: Costs
) -> _Option:
    """Cut the plan to the pages that have E and fit the limits, and predict its times. If too few
    are left, set `miss`. Its text names `starts`, the layers at which the allowed blocks start."""
    plan, start, stop = option.plan, option.plan.pages.start, option.plan.pages.stop
    with_e = min([stop, *(match.e_pages.get(layer, 0) for layer in plan.transition_layers)])
    staged = min(with_e, start + _most_staged_pages(demand, plan, costs))
    at_once = min(staged, start + _most_pages_of_a_step(demand, plan, costs))
    held = f"{match.num_pages} pages of {match.model}, {demand.first_approximate} approximate on"
    no_e = f"{match.model} lacks E at some of layers {starts} for pages from {demand.first_page}"
    staging_gb = (demand.max_fetch_bytes or 0) / _GIB
    full = f"{demand.min_pages} pages, the fewest worth a fetch, exceed staging_gb, {staging_gb:g}"
    for end, reason, detail in (
        (stop, _few_left(demand, plan.first_page), f"{held} the device"),
        (with_e, Reason.NO_E, no_e),
        (staged, Reason.STAGING_FULL, full),
        (at_once, Reason.RECOMPUTE_TOO_LONG, _TOO_LONG),
    ):
        if end - start < demand.min_pages:
            return replace(option, miss=NoReuse(reason=reason, detail=detail))
    fitted = _priced(replace(option, plan=replace(plan, pages=Span(start, at_once))), demand, costs)
    if demand.requested.block is None and not fitted.saving > 0:
        where = match.location.removesuffix(":")
        slower = f"{match.model} at {where}: full prefill is faster, or nearly so"
        return replace(fitted, miss=NoReuse(reason=Reason.SLOWER, detail=slower))
    return fitted


def _priced(option: _Option, demand: Demand, costs: Costs) -> _Option:
    """Predict the option's saving, and its TTFT with the prefill of the rest of the prompt."""
    plan, page_size, num_tokens = option.plan, demand.page_size, demand.num_tokens
    times = times_of(plan, page_size, costs)
    head = Span(plan.head.start * page_size, plan.head.stop * page_size)
    full_s = full_prefill_s(Span(demand.num_held * page_size, num_tokens), costs.prefill)
    rest_s = full_prefill_s(Span(plan.pages.stop * page_size, num_tokens), costs.prefill)
    head_s = full_prefill_s(head, costs.prefill) if head else 0.0
    if times is None or full_s is None or rest_s is None or head_s is None:
        in_vain = demand.num_layers * (demand.num_held - plan.first_page)
        return replace(option, saving=page_size * (_saved_page_layers(plan) - in_vain))
    ttft_s = head_s + times.ttft_s + rest_s
    return replace(option, ttft_s=ttft_s, saving=full_s - ttft_s)


def _by_load(
    demand: Demand, match: Match, profiles: Profiles, possible: Sequence[_Option]
) -> _Option:
    """Choose one of a match's blocks, by the queue and the TTFT target."""
    if demand.num_waiting == 0 and demand.ttft_target_s is not None:
        in_time = [it for it in possible if _meets(it, demand)]
        if in_time:
            return max(in_time, key=lambda it: (len(it.plan.block), it.quality))
        return min(possible, key=lambda it: it.ttft_s or 0.0)
    # All are equally fast while the device's speed is unknown.
    fastest_s = min(it.ttft_s or 0.0 for it in possible)
    possible = [it for it in possible if (it.ttft_s or 0.0) <= NEARLY * fastest_s]
    if demand.num_waiting == 0:
        profile = profiles.get((match.model, demand.receiver))
        recommended = profile.recommended if profile else None
        longest = max(len(it.plan.pages) for it in possible)
        for option in possible:
            is_recommended = recommended is not None and option.plan.block == recommended.block
            if is_recommended and len(option.plan.pages) == longest:
                return option
    return max(possible, key=lambda it: (_saved_page_layers(it.plan), it.quality))


def _meets(option: _Option, demand: Demand) -> bool:
    target_s = demand.ttft_target_s
    return target_s is None or option.ttft_s is None or option.ttft_s <= target_s


def _most_staged_pages(demand: Demand, plan: Plan, costs: Costs) -> int:
    """Return how many pages fit into the staging memory. All pages if the plan needs no staging."""
    is_there = plan.location == LOCAL or is_pool(plan.location)
    if is_there or demand.max_fetch_bytes is None:
        return demand.num_pages
    return demand.max_fetch_bytes // max(1, sum(bytes_of(_first_pages(plan, 1), costs)))


def _first_pages(plan: Plan, num_pages: int) -> Plan:
    start = plan.pages.start
    return replace(plan, pages=Span(start, start + num_pages))


def _most_pages_of_a_step(demand: Demand, plan: Plan, costs: Costs) -> int:
    """Return how many pages one scheduler step may recompute and copy, by `max_recompute_tokens`
    and `max_stall_s`."""
    most = [demand.num_pages]
    if layers_of_work(plan) and demand.max_recompute_tokens is not None:
        most.append(demand.max_recompute_tokens // demand.page_size)
    if demand.max_stall_s is not None:

        def seconds(num_pages: int) -> float:
            part = _first_pages(plan, num_pages)
            block_s = recompute_s(part, demand.page_size, costs.recompute) or 0.0
            return block_s + copy_s(part, costs)

        span = range(1, len(plan.pages) + 1)
        most.append(bisect_right(span, demand.max_stall_s, key=seconds))
    return min(most)


def _saved_page_layers(plan: Plan) -> int:
    return len(plan.pages) * len(plan.loaded_layers)
