"""Requests that wait in SGLang's queue: matched and planned once, then staged while they wait.

The scheduler thread only looks; transport threads fill the staging. Where a tier has to be asked
what it has, a request is planned when the answer is there, or is late. A request is held back until
what it needs has arrived, or is predicted to have arrived by the time its recompute is done:

    E of the transition layer ──► staged ─┐ admit when the rest will take no longer than the
    KV, layer after layer     ──► ........┘ recompute, at the rate seen so far
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachetree.clock import Deadline
from cachetree.errors import DeadlineExceeded
from cachetree.ids import PageHash, Span
from cachetree.plan import Kind, Plan, Step
from cachetree.policy import recompute_s
from cachetree.schedule import Strategy
from sglang_droidspeak import prefixes
from sglang_droidspeak.controls import parse_controls
from sglang_droidspeak.job import Job
from sglang_droidspeak.meta_info import RequestProvenance, report
from sglang_droidspeak.pool import PoolPages

if TYPE_CHECKING:
    import torch

    from cachetree.budget import BudgetedStaging
    from cachetree.cache import Cache
    from cachetree.tier import Search
    from sglang_droidspeak.activated import Activated
    from sglang_droidspeak.capture import Provenance
    from sglang_droidspeak.compat.names import Req, UnifiedRadixCache
    from sglang_droidspeak.leaders import Following, Leaders
    from sglang_droidspeak.meter import Meter
    from sglang_droidspeak.metrics import Metrics
    from sglang_droidspeak.planner import Planner
    from sglang_droidspeak.pool import PoolIndex
    from sglang_droidspeak.site import Site

log = logging.getLogger(__name__)

_PATIENCE_S = 0.2
"""A fetch is not given up for being slow before this, nor for being slower by less."""
_ARRIVAL_MARGIN = 1.05
"""How much longer than predicted the rest of a fetch may take without holding up a forward."""


@dataclass(slots=True, kw_only=True, eq=False)
class Reuse:
    """What was decided for one waiting request. Without a plan it does a full prefill."""

    req: Req
    first_seen_s: float
    searches: Sequence[Search] = ()
    """What it waits for before it is planned: answers of tiers that do not advertise."""
    is_planned: bool = False
    match_s: float = 0.0
    pages: Sequence[PageHash] = ()
    own_pages: Sequence[PageHash] = ()
    """The same as SGLang names them."""
    plan: Plan | None = None
    staging: BudgetedStaging | PoolPages | None = None
    following: Following | None = None
    """It waits to be planned until that request has left its pages in the pool."""
    is_optional: bool = True
    """Chosen by the server, which may think again; not asked for by name."""

    def give_up(self) -> None:
        if self.staging is not None:
            self.staging.release()
        self.plan = self.staging = None


class WaitingRequests:
    """One entry per request in the queue; scheduler thread only."""

    def __init__(
        self,
        site: Site,
        cache: Cache,
        provenance: Provenance,
        meter: Meter,
        metrics: Metrics,
        planner: Planner,
        pool: PoolIndex,
        activated: Activated,
        leaders: Leaders,
    ) -> None:
        self._site = site
        self._planner = planner
        self._pool = pool
        self._activated = activated
        self._leaders = leaders
        self._cache = cache
        self._provenance = provenance
        self._meter = meter
        self._metrics = metrics
        self._reuses: dict[str, Reuse] = {}
        self._refusal = ""
        self._asks = site.settings.hicache_backend is not None

    def look(self, queue: Sequence[Req], tree: UnifiedRadixCache, *, is_decoding: bool) -> set[str]:
        """Plan new requests, forget those that have left, and return the rids to hold back."""
        self._tree = tree
        held = set()
        budget = StepBudget(self._site.settings.max_stall_s if is_decoding else None)
        for req in queue:
            reuse = self._reuses.get(req.rid)
            if reuse is None:
                reuse = self._reuses[req.rid] = self._begin(req, tree)
            if not reuse.is_planned:
                if not self._may_plan(reuse):
                    held.add(req.rid)
                    continue
                self._decide(reuse, tree, num_waiting=len(queue) - 1)
                if not reuse.is_planned:
                    held.add(req.rid)
                    continue
            if reuse.plan is not None and reuse.staging is None:
                self._stage(reuse)
            if reuse.staging is not None and (
                self._must_hold(req, reuse) or not budget.take(self._recompute_s(reuse.plan))
            ):
                held.add(req.rid)
        if len(self._reuses) > len(queue):
            for rid in self._reuses.keys() - {req.rid for req in queue}:
                self._reuses.pop(rid).give_up()
        return held

    def has_staging(self, rid: str) -> bool:
        reuse = self._reuses.get(rid)
        return reuse is not None and reuse.staging is not None

    def num_restorable(self, rid: str, first_key: str) -> int:
        """How many pages from SGLang's page `first_key` on can be loaded."""
        if not self.has_staging(rid):
            return 0
        reuse = self._reuses[rid]
        first, span = prefixes.page_hash(first_key), reuse.plan.pages
        if first not in reuse.own_pages[span.start : span.stop]:
            return 0
        return span.stop - reuse.own_pages.index(first)

    def take(self, rid: str, keys: Sequence[str], slots: torch.Tensor) -> Job | None:
        """Turn a staged request into a job that loads the pages of `keys` into `slots`."""
        if self.num_restorable(rid, keys[0]) < len(keys):
            return None
        reuse = self._reuses[rid]
        if isinstance(reuse.staging, PoolPages):
            # What was found when it was planned may have been evicted, for these slots even.
            locked = self._pool.lock(reuse.plan, reuse.pages, reuse.req, self._tree)
            if locked is None:
                return None
            reuse.staging = locked
        del self._reuses[rid]
        start = reuse.own_pages.index(prefixes.page_hash(keys[0]))
        return Job(
            rid=rid,
            plan=reuse.plan,
            staging=reuse.staging,
            pages=Span(start, start + len(keys)),
            slots=slots,
            page_size=self._site.page_size,
            match_s=reuse.match_s,
            queued_s=time.monotonic() - reuse.first_seen_s,
        )

    def clear(self) -> None:
        for reuse in self._reuses.values():
            reuse.give_up()
        self._reuses.clear()
        self._leaders.clear()

    def retire(self) -> None:
        """Plan nothing any more: the loaded weights are not the identified ones."""
        self.clear()
        self._refusal = "weights_updated"

    def _begin(self, req: Req, tree: UnifiedRadixCache) -> Reuse:
        """Ask the tiers that do not advertise, where they could have enough to matter."""
        reuse = Reuse(req=req, first_seen_s=time.monotonic())
        self._activated.meet(req)
        if not self._asks or self._refusal or prefixes.refusal(req):
            return reuse
        # What goes wrong here goes wrong again in planning, which reports it.
        with contextlib.suppress(Exception):
            if parse_controls(req.sampling_params.custom_params).mode != "off":
                page_size = self._site.page_size
                reuse.pages = prefixes.reusable_pages(req, page_size)
                num_tokens = len(reuse.pages) * page_size
                num_tokens -= len(prefixes.slots_on_device(req, len(reuse.pages), tree))
                if num_tokens >= self._site.settings.min_tokens:
                    reuse.searches = self._cache.search(reuse.pages)
        return reuse

    def _may_plan(self, reuse: Reuse) -> bool:
        if reuse.following is not None:
            return self._leaders.is_over(reuse.following, self._reuses)
        return all(search.is_over for search in reuse.searches)

    def _decide(self, reuse: Reuse, tree: UnifiedRadixCache, num_waiting: int) -> None:
        reuse.is_planned, reuse.searches = True, ()
        req, is_exact = reuse.req, True
        try:
            outcome = self._refusal or prefixes.refusal(req)
            if not outcome:
                if not reuse.pages:
                    reuse.pages = prefixes.reusable_pages(req, self._site.page_size)
                outcome = self._plan(reuse, tree, num_waiting)
                if not reuse.is_planned:
                    return
                if self._provenance.any_approximate:
                    on_device = prefixes.slots_on_device(req, len(reuse.pages), tree)
                    is_exact = self._provenance.is_exact(on_device)
        except Exception:
            log.exception("request %s: planning failed; it does a full prefill", req.rid)
            reuse.give_up()
            outcome = "error"
        if outcome:
            self._metrics.count_outcome(outcome)
        # What a planned request keeps that is admitted without its load after all:
        planned = "staging_full" if reuse.staging is None else "no_slots"
        report(req, RequestProvenance(outcome=outcome or planned, exact=is_exact))

    def _plan(self, reuse: Reuse, tree: UnifiedRadixCache, num_waiting: int) -> str:
        """Fill in the plan and begin to stage it; returns why there is none, or nothing."""
        req = reuse.req
        planned = self._planner.plan(req, reuse.pages, tree, num_waiting)
        if reuse.following is None:  # Once is enough.
            reuse.following = self._leaders.follow(req, reuse.pages, planned)
            if reuse.following is not None:
                reuse.is_planned = False
                return ""
        if isinstance(planned, str):
            return planned
        reuse.plan, reuse.is_optional = planned.plan, planned.is_optional
        if not reuse.is_optional and self._site.settings.gate == "off":
            # An experiment's KV serves its own request only.
            req.skip_radix_cache_insert |= not reuse.plan.is_exact
        reuse.own_pages = (
            reuse.pages
            if req.lora_id is None
            else prefixes.own_pages_of(
                req, len(reuse.pages) * self._site.page_size, self._site.page_size
            )
        )
        reuse.match_s = time.monotonic() - reuse.first_seen_s
        reuse.staging = planned.pool_pages
        if reuse.staging is None:
            self._stage(reuse)
        return ""

    def _stage(self, reuse: Reuse) -> None:
        """Begin the fetch; where staging memory is used up, the next look tries again."""
        deadline = Deadline.after(self._site.settings.fetch_deadline_s)
        reuse.staging = self._cache.fetch(reuse.plan, reuse.pages, deadline)

    def _report(self, req: Req, outcome: str) -> None:
        self._metrics.count_outcome(outcome)
        report(req, RequestProvenance(outcome=outcome))

    def _recompute_s(self, plan: Plan) -> float:
        speed = self._meter.s_per_token_layer or 0.0
        return recompute_s(plan, len(plan.pages) * self._site.page_size, speed)

    def _must_hold(self, req: Req, reuse: Reuse) -> bool:
        staging = reuse.staging
        if staging.is_complete:
            return False
        if staging.deadline.has_passed:
            staging.fail(DeadlineExceeded("the fetch did not end in time"))
        if staging.error is not None:
            log.warning("request %s: %s; it does a full prefill", req.rid, staging.error)
            self._report(req, f"fallback: {type(staging.error).__name__}")
            reuse.give_up()
            return False
        if self._meter.s_per_token_layer is None or not staging.num_landed_bytes:
            return True
        plan = reuse.plan
        elapsed_s = time.monotonic() - staging.started_s
        num_left = staging.num_bytes - staging.num_landed_bytes
        rest_s = elapsed_s * num_left / staging.num_landed_bytes
        full_s = self._meter.full_prefill_s(len(plan.pages) * self._site.page_size) or 0.0
        if reuse.is_optional and min(elapsed_s, rest_s - full_s) > _PATIENCE_S:
            log.info("request %s: the link is slower than a full prefill", req.rid)
            self._report(req, "fallback: SlowLink")
            reuse.give_up()
            return False
        has_e = all(staging.has_landed(Step(Kind.E, layer)) for layer in plan.transition_layers)
        may_overlap = plan.strategy is Strategy.PIPELINED and has_e
        return not may_overlap or rest_s * _ARRIVAL_MARGIN > self._recompute_s(plan)


class StepBudget:
    """Seconds that the partial prefills of one step may take together, None for any number."""

    def __init__(self, seconds: float | None) -> None:
        self._left_s = math.inf if seconds is None else seconds
        self._is_unused = True

    def take(self, seconds: float) -> bool:
        """Whether one more fits; the first always does, for it has been cut to fit a step."""
        if seconds and not self._is_unused and seconds > self._left_s:
            return False
        self._left_s -= seconds
        self._is_unused = self._is_unused and not seconds
        return True
