"""Decide whether a planned request's fetch is ready, too late, or no longer worth its time.

A request is held back until its data has arrived, or until it is predicted to arrive before the
recompute ends:

    E of the transition layer ──► staged ─┐ arriving when the rest will take no longer than the
    KV, layer after layer     ──► ........┘ recompute, at the rate seen so far

The wait counts from the first scheduler step that could have taken the request (`Patience`). The
request gives up once its fetch is later than predicted by the time that reuse should save. It gives
up earlier if the rate so far predicts this. So no peer can make a request take more than twice a
full prefill. One exception: the device evicts pages that a ready or settled request expects. Then
the wait of this request begins again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cachetree import LOCAL, FetchError
from cachetree.planning import Reason, Strategy, recompute_s
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine.names import UnifiedRadixCache
from sglang_droidspeak.request.controls import name_of
from sglang_droidspeak.request.planner import Planner, absence_of
from sglang_droidspeak.request.request import Phase, Request
from sglang_droidspeak.request.source import Sources

log = logging.getLogger(__name__)

NUM_NEXT: Final = 4
"""Number of requests at the front of the queue that each scheduler step checks again, as they may
load next. A step rarely admits more."""
_RATE_S: Final = 0.2
"""Seconds that a fetch must run before its rate predicts its end."""


@dataclass(eq=False)
class Arrivals:
    """Progress of the fetches of waiting requests. Scheduler thread only."""

    _sources: Sources
    _meter: Meter
    _planner: Planner

    def look(self, queue: Sequence[Request], tree: UnifiedRadixCache) -> Sequence[Phase]:
        """Return the phase that each planned request has now on this rank. SETTLED: the request
        gives up its plan.

        Also begin fetches that waited for staging memory, in the queue's order. Check again whether
        reuse saves time: for requests with a new phase, and for the front of the queue.
        """
        for request in queue:
            if not request.failure and request.source is None:
                request.fetch(self._sources, tree)
                if request.source is None:
                    break
        following = [*islice((it for it in queue if it.phase is not Phase.FETCHING), NUM_NEXT)]
        phases = [self._arrival(it) for it in queue]
        for number, request in enumerate(queue):
            is_asked = phases[number] is not request.phase or request in following
            if phases[number] >= Phase.ARRIVING and is_asked and not self._saves(request, tree):
                request.failure, phases[number] = Reason.SLOWER.value, Phase.SETTLED
        return phases

    def _saves(self, request: Request, tree: UnifiedRadixCache) -> bool:
        planned = request.planned
        if planned.demand is None:
            return True
        held = self._sources.pool_index.held(request.req, len(request.pages), tree)
        return self._planner.still_saves(planned.plan, planned.demand, held)

    def _arrival(self, request: Request) -> Phase:
        if request.failure:
            return Phase.SETTLED
        if request.source is None:
            return Phase.PLANNED
        try:
            request.source.check()
        except FetchError as exc:
            log.warning("request %s: %s; it does a full prefill", name_of(request.req.rid), exc)
            request.failure = f"fallback: {type(exc).__name__}"
            return Phase.SETTLED
        plan, source, staging = request.plan, request.source, request.source.staging
        if staging.is_complete:
            ended_s, is_seen_first = staging.completed_s, request.phase is Phase.FETCHING
            if is_seen_first and ended_s is not None and plan.location != LOCAL:
                self._meter.noticed(time.monotonic() - ended_s)
            return Phase.READY
        num_landed = staging.num_landed_bytes
        if request.left_s(num_landed) < 0:
            return self._too_late(request)
        compute_s = recompute_s(plan, self._sources.server.page_size, self._meter.recompute)
        if compute_s is None:
            return Phase.FETCHING
        if plan.strategy is not Strategy.PIPELINED:
            compute_s = 0.0
        elif source.has_e and source.rest_s <= compute_s:
            return Phase.ARRIVING
        patience, elapsed_s = request.patience, source.elapsed_s
        if request.runnable_s is None or not num_landed or elapsed_s <= _RATE_S:
            return Phase.FETCHING
        rest_s = patience.link.rest_s(elapsed_s, num_landed, staging.num_bytes) - compute_s
        is_too_slow = request.waited_s + rest_s > patience.most_s
        return self._too_late(request) if is_too_slow else Phase.FETCHING

    def _too_late(self, request: Request) -> Phase:
        staging = request.source.staging
        log.info(
            "request %s: %d of %d bytes came in %.3f s, and a full prefill is faster than the rest",
            name_of(request.req.rid),
            staging.num_landed_bytes,
            staging.num_bytes,
            request.waited_s,
        )
        is_gone = absence_of(request.plan.location, self._sources.cache.sources())
        request.failure = "fallback: FetchError" if is_gone else "fallback: SlowLink"
        return Phase.SETTLED
