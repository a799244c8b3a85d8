"""Predict a plan's times from sizes and from recent measurements. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cachetree.ids import Location, Span
from cachetree.planning.plan import Plan
from cachetree.planning.speeds import FREE_LINK, Link, PrefillCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Sizes of pages, and speeds measured so far. Unmeasured costs count as zero."""

    kv_page_bytes: int
    e_page_bytes: int
    prefill: PrefillCost | None = None
    """Cost of a prefill through all layers."""
    recompute: PrefillCost | None = None
    """Cost of one layer of a block."""
    links: Mapping[Location, Link] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Times:
    wait_s: float
    """Seconds until the block may begin. Until then the device does nothing for the request."""
    ttft_s: float
    """Seconds until the KV of all pages is on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Limit of a request's wait for its fetch.

    The request gives up when the fetch is late by as much time as reuse would save. It never waits
    longer than `most_s`: after that, reuse would take longer than a full prefill.
    """

    saving_s: float
    wait_s: float = 0.0
    """Predicted wait in seconds."""
    link: Link = FREE_LINK
    """State of the link when the fetch began."""

    @property
    def most_s(self) -> float:
        return self.saving_s + self.wait_s

    def limit_s(self, num_landed: int) -> float:
        """Longest wait in seconds since the fetch began, while only `num_landed` bytes arrive."""
        due_s = self.link.fixed_s + self.link.seconds(num_landed + self.link.frame_bytes)
        return self.saving_s + min(self.wait_s, due_s)


def times_of(plan: Plan, page_size: int, costs: Costs) -> Times | None:
    """Predict the plan's times. None while the device's speed is unknown.

    E is transferred first. Then KV is transferred while the block is recomputed. The block's last
    layer counts as no work, because only its K and V are computed. Copies to the device take time,
    too; copies of KV overlap the block. The forward over new tokens is not included.
    """
    compute_s = recompute_s(plan, page_size, costs.recompute)
    if compute_s is None or costs.recompute is None:
        return None
    e_bytes, kv_bytes = bytes_of(plan, costs)
    link = costs.links.get(plan.location, FREE_LINK)
    on_time, margin = replace(link, margin=1.0), costs.recompute.margin
    # One in ten times exceeds its margin; two at once are rare. So each case has one deviation: a
    # late transfer, a short recompute that hides less of the transfer, or a long recompute.
    cases = ((link, 1.0), (on_time, 1 / margin), (on_time, margin))
    times = [_times(at, e_bytes, kv_bytes, factor * compute_s) for at, factor in cases]
    return Times(max(it.wait_s for it in times), max(it.ttft_s for it in times))


def _times(link: Link, e_bytes: int, kv_bytes: int, compute_s: float) -> Times:
    has_e_s, has_all_s = link.seconds(e_bytes), link.seconds(e_bytes + kv_bytes)
    wait_s = link.fixed_s + max(has_e_s, has_all_s - compute_s)
    return Times(wait_s, wait_s + max(link.copy_s(e_bytes) + compute_s, link.copy_s(kv_bytes)))


def bytes_of(plan: Plan, costs: Costs) -> tuple[int, int]:
    """Return the bytes of E and of KV that a plan loads on one rank."""
    e_bytes = len(plan.pages) * len(plan.transition_layers) * costs.e_page_bytes
    return e_bytes, len(plan.pages) * len(plan.loaded_layers) * costs.kv_page_bytes


def copy_s(plan: Plan, costs: Costs) -> float:
    """Seconds to copy everything that a plan loads from host memory to the device."""
    return costs.links.get(plan.location, FREE_LINK).copy_s(sum(bytes_of(plan, costs)))


def full_prefill_s(tokens: Span, cost: PrefillCost | None) -> float | None:
    """Seconds of a full prefill by the receiver; None while the device's speed is unknown."""
    if cost is None or not cost.knows(len(tokens)):
        return None
    return cost.seconds(tokens.start, tokens.stop)


def recompute_s(plan: Plan, page_size: int, cost: PrefillCost | None) -> float | None:
    """Seconds predicted for a plan's recompute; None while the device's speed is unknown."""
    if cost is None:
        return None
    return layers_of_work(plan) * cost.seconds(
        plan.pages.start * page_size, plan.pages.stop * page_size
    )


def layers_of_work(plan: Plan) -> int:
    """Return how many full layers of work a block takes. Its last layer does not count, because it
    needs only K and V."""
    return max(0, len(plan.block) - 1)
