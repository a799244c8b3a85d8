"""What becomes of a request that was seen: once, a plan whose source is begun, or none, and why.

The first rank decides, as soon as it knows enough: what tiers answer that do not advertise, and
whether another request computes the same pages right now. The other ranks do as it did.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cachetree import Location, Span
from cachetree.planning import Patience, Reason, full_prefill_s
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request import traces
from sglang_droidspeak.request.controls import name_of, parse_controls
from sglang_droidspeak.request.in_flight import InFlightPrefills
from sglang_droidspeak.request.labels import Labels, consider, must_stay_exact
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.planner import UNMEASURED_S, Declined, Planned, Planner
from sglang_droidspeak.request.request import Phase, Request
from sglang_droidspeak.request.source import Sources
from sglang_droidspeak.start.config import at_rank

log = logging.getLogger(__name__)

_Decision = tuple[str, bool, Planned | None, int]
"""What the first rank tells the others: of which request, whether it is to read approximate KV,
what it was planned to do, if anything, and on how many pages of the device's it counts."""


@dataclass(eq=False)
class Decisions:
    """Scheduler thread only."""

    _sources: Sources
    _meter: Meter
    _labels: Labels
    _planner: Planner
    _in_flight: InFlightPrefills
    _ranks: Ranks
    _refusal: str = field(default="", init=False)

    def __post_init__(self) -> None:
        server = self._sources.server
        self._page_size: Final = server.page_size
        self._asks: Final = server.settings.hicache_backend is not None and self._ranks.is_first

    def see(self, req: Req, tree: UnifiedRadixCache) -> Request:
        """Ask the tiers that do not advertise, where they could have enough to matter."""
        request = Request(req)
        self._planner.meet(req)
        if not self._asks or self._refusal or prefixes.refusal(req):
            return request
        # What goes wrong here goes wrong again in planning, which reports it.
        with contextlib.suppress(Exception):
            if parse_controls(req.sampling_params.custom_params).mode != "off":
                request.pages = pages = prefixes.reusable_pages(req, self._page_size)
                num_new = len(pages) - self._sources.pool_index.held(req, len(pages), tree).exact
                num_tokens = num_new * self._page_size
                if num_tokens >= self._sources.server.settings.min_tokens:
                    request.searches = self._sources.cache.search(pages)
                    full_s = full_prefill_s(Span(0, num_tokens), self._meter.prefill)
                    request.patience = Patience(saving_s=UNMEASURED_S if full_s is None else full_s)
        return request

    def decide(self, seen: Sequence[Request], tree: UnifiedRadixCache, num_waiting: int) -> None:
        """Plan what can be planned now, on the first rank; the others do as it did."""
        if self._ranks.is_first:
            for request in seen:
                if self._may_decide(request):
                    self._decide(request, tree, num_waiting)
        mine: list[_Decision] = []
        for it in seen:
            if it.phase != Phase.SEEN:
                told = replace(it.planned, considered=None) if it.is_waiting else None
                mine.append((it.req.rid, prefixes.is_approximate(it.req), told, it.num_counted_on))
        by_rid = {it.req.rid: it for it in seen}
        for rid, is_approximate, planned, num_there in self._ranks.share(mine, list[_Decision]):
            if not self._ranks.is_first:
                request = by_rid[rid]
                prefixes.move(request.req, approximate=is_approximate)
                self._obey(request, planned, tree)
                request.num_counted_on = num_there

    def has_lost(self, request: Request, tree: UnifiedRadixCache) -> bool:
        """Whether the device has less, where it reads, than it counts on."""
        held = self._sources.pool_index.held(request.req, request.num_there, tree)
        num_there = held.approximate if prefixes.is_approximate(request.req) else held.exact
        return num_there < request.num_there

    def read_what_is_there(self, request: Request, tree: UnifiedRadixCache) -> None:
        """Have a request without a load read the namespace of which the device has more."""
        is_better, index = False, self._sources.pool_index
        if index.has_approximate and not must_stay_exact(request.req):
            is_better = index.held(request.req, len(request.pages), tree).is_approximate_longer
        prefixes.move(request.req, approximate=is_better)

    def retire(self) -> None:
        """Plan nothing any more: the loaded weights are not the identified ones."""
        self._refusal = "weights_updated"

    def _may_decide(self, request: Request) -> bool:
        if request.left_s() < 0:
            return True
        if request.following is not None:
            return self._in_flight.is_over(request.following)
        return all(search.is_over for search in request.searches)

    def _decide(self, request: Request, tree: UnifiedRadixCache, num_waiting: int) -> None:
        req = request.req
        try:
            if outcome := self._refusal or prefixes.refusal(req):
                declined: Declined | None = Declined(outcome)
            else:
                if not request.pages:
                    request.pages = prefixes.reusable_pages(req, self._page_size)
                declined = self._plan(request, tree, num_waiting)
        except Exception:
            log.exception("request %s: planning failed; it does a full prefill", name_of(req.rid))
            declined = Declined("error")
        if declined is not None:
            request.settle()
            if not declined.may_be_approximate:
                prefixes.move(req, approximate=False)
            told = RequestProvenance(outcome=declined.outcome, detail=declined.detail or None)
            if declined.outcome == Reason.TOO_SHORT.value and declined.considered is not None:
                demand = declined.considered.demand
                is_approximate = prefixes.is_approximate(req)
                request.num_counted_on = (
                    demand.first_approximate or 0 if is_approximate else demand.first_page
                )
            traces.matched(request, declined.outcome)
            self._labels.note(req, told)

    def _plan(self, request: Request, tree: UnifiedRadixCache, num_waiting: int) -> Declined | None:
        """Take up a plan, or wait for another request; else why there is none."""
        req = request.req
        planned = self._planner.plan(req, request.pages, tree, num_waiting)
        consider(req, planned.considered)
        if isinstance(planned, Planned) and not planned.plan.is_exact and must_stay_exact(req):
            planned = Declined(Reason.SLOWER.value, "it is exact so far")
        if isinstance(planned, Declined) and planned.may_be_approximate:
            self.read_what_is_there(request, tree)
            if prefixes.is_approximate(req):
                return planned  # Nobody can read what it will leave.
        if request.following is None:  # Once is enough.
            outcome = planned.outcome if isinstance(planned, Declined) else planned
            request.following = self._in_flight.follow(req, request.pages, outcome)
            if request.following is not None:
                request.patience = Patience(saving_s=request.following.patience_s)
                return None
        if isinstance(planned, Declined):
            return planned
        request.take_up(planned)
        self._fetch(request, tree)
        return None

    def _obey(self, request: Request, planned: Planned | None, tree: UnifiedRadixCache) -> None:
        """Plan a request as the first rank did, with this rank's shard of the same pages."""
        if planned is None:
            request.settle()
            return
        plan = planned.plan
        plan = replace(plan, location=Location(at_rank(plan.location, self._ranks.rank)))
        # Taken up even where this rank fails: all ranks count the same requests.
        request.take_up(replace(planned, plan=plan))
        try:
            request.pages = prefixes.reusable_pages(request.req, self._page_size)
            self._fetch(request, tree)
        except Exception as exc:
            log.exception("request %s: this rank cannot do as planned", name_of(request.req.rid))
            request.failure = type(exc).__name__

    def _fetch(self, request: Request, tree: UnifiedRadixCache) -> None:
        """Begin to bring together what the plan needs."""
        req, num_tokens = request.req, len(request.pages) * self._page_size
        prefixes.move(req, approximate=request.planned.is_approximate)
        request.own_pages = (
            prefixes.own_pages_of(req, num_tokens, self._page_size)
            if prefixes.place_of(req)
            else request.pages
        )
        request.match_s = request.age_s
        traces.matched(request)
        request.fetch(self._sources, tree)
