"""Requests from SGLang's queue to their batch: which are held back, and what the others may load.

The scheduler thread only looks; transport threads fill the staging.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from cachetree import FetchError, Span
from cachetree.planning import Reason
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request import traces
from sglang_droidspeak.request.arrivals import NUM_NEXT, Arrivals
from sglang_droidspeak.request.decisions import Decisions
from sglang_droidspeak.request.in_flight import InFlightPrefills
from sglang_droidspeak.request.labels import Labels
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.planner import Planner
from sglang_droidspeak.request.request import Phase, Request
from sglang_droidspeak.request.source import Sources


class WaitingRequests:
    """One entry per request in the queue; scheduler thread only."""

    def __init__(
        self,
        sources: Sources,
        meter: Meter,
        labels: Labels,
        planner: Planner,
        in_flight: InFlightPrefills,
        ranks: Ranks,
    ) -> None:
        self._decisions = Decisions(sources, meter, labels, planner, in_flight, ranks)
        self._arrivals = Arrivals(sources, meter, planner)
        self._in_flight = in_flight
        self._ranks = ranks
        self._meter = meter
        self._labels = labels
        self._page_size = sources.server.page_size
        self._pool_index = sources.pool_index
        self._requests: dict[str, Request] = {}

    def look(self, queue: Sequence[Req], tree: UnifiedRadixCache, *, is_decoding: bool) -> set[str]:
        """Plan new requests, forget those that have left, and return the rids to hold back."""
        self._is_decoding = is_decoding
        self._see_anew(queue, tree)
        requests = [self._known(req) or self._see(req, tree) for req in queue]
        if len(self._requests) > len(queue):
            for rid in self._requests.keys() - {req.rid for req in queue}:
                self._requests.pop(rid).settle()
        self._in_flight.prune(self._requests)
        seen = [it for it in requests if it.phase is Phase.SEEN]
        if seen:
            self._decisions.decide(seen, tree, num_waiting=len(queue) - 1)
        planned = [it for it in requests if it.is_waiting]
        phases = [Phase(it) for it in self._ranks.least(self._arrivals.look(planned, tree))]
        without = (it for it, phase in zip(planned, phases, strict=True) if phase is Phase.PLANNED)
        asked = {*seen, *islice(without, NUM_NEXT)}
        for request, phase in zip(planned, phases, strict=True):
            if phase is Phase.SETTLED:
                self._report_fallback(request)
            request.reach(phase)
            if phase >= Phase.FETCHING:
                prefixes.move(request.req, approximate=request.planned.is_approximate)
            elif request in asked or phase is Phase.SETTLED:  # The same on all ranks.
                self._decisions.read_what_is_there(request, tree)
        return {it.req.rid for it in requests if it.phase in (Phase.SEEN, Phase.FETCHING)}

    def admitted(self, reqs: Sequence[Req]) -> None:
        """SGLang has put these into a batch; those that had a plan and are still known here read
        nothing by it."""
        for request in filter(None, (self._requests.pop(req.rid, None) for req in reqs)):
            if request.is_waiting:
                is_on_device = request.req.prefix_len >= request.plan.pages.stop * self._page_size
                cause = "no_slots" if request.source else "staging_full"
                outcome = Reason.TOO_SHORT.value if is_on_device else cause
                if not is_on_device:
                    traces.given_up(request, cause)
                self._labels.note(request.req, RequestProvenance(outcome=outcome))
            request.settle()

    def pass_over(self, rids: Iterable[str]) -> None:
        """The step that was just made could have taken these, had they not been held back."""
        for request in filter(None, map(self._requests.get, rids)):
            request.pass_over()

    def has_source(self, rid: str) -> bool:
        """Of a request without slots."""
        request = self._requests.get(rid)
        return request is not None and request.has_source

    def num_restorable(self, rid: str, first_key: str) -> int:
        """How many pages from SGLang's page `first_key` on can be loaded.

        While others decode, so many at most that one step can recompute them.
        """
        if not self.has_source(rid):
            return 0
        request = self._requests[rid]
        first, span = prefixes.page_hash(first_key), request.plan.pages
        if first not in request.own_pages[span.start : span.stop]:
            return 0
        num_pages = span.stop - request.own_pages.index(first)
        page_share = request.planned.step_share * self._page_size
        if self._is_decoding and page_share:
            # A page stays for the request's own tokens.
            most = (self._meter.step_tokens - self._page_size) / page_share
            num_pages = min(num_pages, int(most))
        return num_pages

    def step_tokens(self, rid: str, num_tokens: int) -> int:
        """What the recompute of so many loaded tokens takes of SGLang's tokens of one step."""
        if not self.has_source(rid):
            return 0
        return math.ceil(num_tokens * self._requests[rid].planned.step_share)

    def take(self, rid: str, keys: Sequence[str], slots: torch.Tensor) -> bool:
        """Have the pages of `keys` loaded into `slots` with the next batch; False where that
        cannot be."""
        request = self._requests.get(rid)
        if request is None or self.num_restorable(rid, keys[0]) < len(keys):
            return False
        if request.phase is not Phase.READY or not request.source.admit():
            return False
        planned = request.planned
        self._pool_index.has_approximate |= planned.is_approximate
        request.req.skip_radix_cache_insert |= planned.is_experiment and not planned.plan.is_exact
        start = request.own_pages.index(prefixes.page_hash(keys[0])) * self._page_size
        request.begin_load(Span(start, start + len(keys) * self._page_size), slots)
        return True

    def cancel(self, rid: str) -> bool:
        """SGLang takes the slots back before the batch starts; the request will be seen anew."""
        request = self._requests.get(rid)
        if request is None or request.phase is not Phase.LOADING:
            return False
        del self._requests[rid]
        request.settle()
        return True

    def start(self) -> list[Request]:
        """Those that load with the batch that starts now; they are known here no more."""
        loading = [it for it in self._requests.values() if it.phase is Phase.LOADING]
        for request in loading:
            del self._requests[request.req.rid]
        return loading

    def clear(self) -> None:
        for request in self._requests.values():
            request.settle()
        self._requests.clear()
        self._in_flight.clear()

    def retire(self) -> None:
        """As `clear`, and nothing is planned any more."""
        self.clear()
        self._decisions.retire()

    def _see_anew(self, queue: Sequence[Req], tree: UnifiedRadixCache) -> None:
        """Of the next in the queue those that count on pages which the device has no more: what is
        loaded has to follow on what is there. They wait no longer for it, taken together."""
        known = filter(None, map(self._requests.get, (req.rid for req in queue)))
        for request in islice((it for it in known if it.num_there), NUM_NEXT):
            if self._decisions.has_lost(request, tree):
                self._see(request.req, tree).runnable_s = request.runnable_s

    def _known(self, req: Req) -> Request | None:
        """Not another request of its name, which has left the queue since the last look."""
        request = self._requests.get(req.rid)
        return request if request is not None and request.req is req else None

    def _see(self, req: Req, tree: UnifiedRadixCache) -> Request:
        if req.rid in self._requests:
            self._requests[req.rid].settle()
        request = self._requests[req.rid] = self._decisions.see(req, tree)
        return request

    def _report_fallback(self, request: Request) -> None:
        cause = request.failure or FetchError.__name__
        outcome = cause if cause == Reason.SLOWER.value else f"fallback: {cause}"
        queued_ms = round(1000 * request.age_s, 3)
        traces.given_up(request, cause)
        self._labels.note(request.req, RequestProvenance(outcome=outcome, queued_ms=queued_ms))
