"""How far the fetch of a planned request is: ready, too late, or not worth it any more.

A request is held back until what it needs has arrived, or is predicted to have arrived by the time
its recompute is done:

    E of the transition layer ──► staged ─┐ ready when the rest will take no longer than the
    KV, layer after layer     ──► ........┘ recompute, at the rate seen so far

It waits no longer than reuse is predicted to save, counted from the first step that could have
taken it. So nothing that others do, or fail to do, makes it take more than twice a full prefill.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Final

from cachetree import LOCAL, DeadlineExceeded, FetchError, is_pool
from cachetree.planning import Reason, Strategy, recompute_s
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine.names import UnifiedRadixCache
from sglang_droidspeak.request.planner import Planner
from sglang_droidspeak.request.request import Phase, Request
from sglang_droidspeak.request.source import Arrival, Sources

log = logging.getLogger(__name__)

_RATE_S: Final = 0.2
"""How long a fetch has to run before its rate tells when it will end."""
_ANSWER_S: Final = 0.1
"""A worker that has sent nothing for so long counts as failing."""


@dataclass(eq=False)
class Arrivals:
    """Scheduler thread only."""

    _sources: Sources
    _meter: Meter
    _planner: Planner

    def look(self, request: Request, tree: UnifiedRadixCache) -> Phase:
        """How far it is on this rank, SETTLED where it has failed; with its fetch begun, if it
        could not be before.

        What could be admitted is planned again: with what has come, and what the device has.
        """
        if not request.failure and request.source is None:
            request.fetch(self._sources, tree)
        phase = self._arrival(request)
        planned = request.planned
        if phase != Phase.READY or planned.demand is None:
            return phase
        held = self._sources.noted.held(request.req, len(request.pages), tree)
        if self._planner.still_saves(planned.plan, planned.demand, held):
            return phase
        request.failure = Reason.SLOWER.value
        return Phase.SETTLED

    def _arrival(self, request: Request) -> Phase:
        if request.failure:
            return Phase.SETTLED
        if request.source is None:
            return Phase.PLANNED
        try:
            arrival = request.source.progress()
        except FetchError as exc:
            log.warning("request %s: %s; it does a full prefill", request.req.rid, exc)
            request.failure = type(exc).__name__
            return Phase.SETTLED
        if arrival.is_complete and arrival.has_e:
            location = request.plan.location
            is_here = location == LOCAL or is_pool(location)
            is_seen_first = request.phase is Phase.FETCHING
            if is_seen_first and arrival.completed_s is not None and not is_here:
                self._meter.noticed(time.monotonic() - arrival.completed_s)
            return Phase.READY
        if request.is_impatient:
            return self._too_late(request, arrival)
        page_size, rest_s = self._sources.server.page_size, arrival.rest_s
        compute_s = recompute_s(request.plan, page_size, self._meter.recompute)
        if compute_s is None or rest_s == math.inf:
            return Phase.FETCHING
        if request.plan.strategy is Strategy.PIPELINED and arrival.has_e:
            rest_s -= compute_s
            if rest_s <= 0:
                return Phase.READY
        left_s = math.inf if request.runnable_s is None else request.patience_s - request.waited_s
        if arrival.elapsed_s > _RATE_S and rest_s > left_s:
            return self._too_late(request, arrival)
        return Phase.FETCHING

    def _too_late(self, request: Request, arrival: Arrival) -> Phase:
        """Reuse would save less than the request waits for it."""
        log.info(
            "request %s: %d of %d bytes came in the %.3f s that are worth waiting for",
            request.req.rid,
            arrival.num_landed_bytes,
            arrival.num_bytes,
            request.patience_s,
        )
        if not arrival.num_landed_bytes and arrival.elapsed_s > _ANSWER_S:
            request.source.fail(DeadlineExceeded(f"no answer for {_ANSWER_S} s"))
        request.failure = "SlowLink"
        return Phase.SETTLED
