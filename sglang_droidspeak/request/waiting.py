"""Plan each request in SGLang's queue, hold it back while it fetches, and load it when SGLang asks.

Each request is decided once: it gets a plan and its fetch begins, or it gets an outcome with the
reason. The first rank decides. It first waits for the answers of tiers that do not advertise their
entries, and for other requests that compute the same pages. The other ranks adopt its decisions.

The scheduler thread never waits for a fetch; transport threads fill the staging memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from cachetree import Location, Span
from cachetree.planning import Patience, Reason, full_prefill_s
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request import report
from sglang_droidspeak.request.arrivals import NUM_NEXT, Arrivals
from sglang_droidspeak.request.controls import name_of, parse_controls
from sglang_droidspeak.request.followers import Followers
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.planner import (
    UNMEASURED_S,
    Declined,
    Planned,
    Planner,
    absence_of,
)
from sglang_droidspeak.request.report import Labels, consider, must_stay_exact
from sglang_droidspeak.request.request import Phase, Request
from sglang_droidspeak.request.source import Sources
from sglang_droidspeak.start.config import at_rank

log = logging.getLogger(__name__)

_Decision = tuple[str, bool, Planned | None, int]
"""One decision of the first rank, for the other ranks: the request's id, whether to read
approximate KV, the plan or None, and `Request.num_there`."""


@dataclass(eq=False)
class WaitingRequests:
    """The requests in SGLang's queue, with one `Request` for each. Scheduler thread only."""

    _sources: Sources
    _meter: Meter
    _labels: Labels
    _planner: Planner
    _followers: Followers
    _ranks: Ranks
    _requests: dict[str, Request] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        server = self._sources.server
        self._arrivals = Arrivals(self._sources, self._meter, self._planner)
        self._pool_index = self._sources.pool_index
        self._page_size = server.page_size
        self._asks = server.settings.hicache_backend is not None and self._ranks.is_first

    def look(self, queue: Sequence[Req], tree: UnifiedRadixCache, *, is_decoding: bool) -> set[str]:
        """Plan new requests, forget requests that left, and return the ids of requests to hide."""
        self._is_decoding = is_decoding
        self._see_anew(queue, tree)
        requests = [self._known(req) or self._see(req, tree) for req in queue]
        if len(self._requests) > len(queue):
            for rid in self._requests.keys() - {req.rid for req in queue}:
                self._requests.pop(rid).settle()
        self._followers.prune(self._requests)
        seen = [it for it in requests if it.phase is Phase.SEEN]
        if seen:
            self._decide(seen, tree, num_waiting=len(queue) - 1)
        planned = [it for it in requests if it.is_waiting]
        phases = [Phase(it) for it in self._ranks.least(self._arrivals.look(planned, tree))]
        without = (it for it, phase in zip(planned, phases, strict=True) if phase is Phase.PLANNED)
        asked = {*seen, *islice(without, NUM_NEXT)}
        for request, phase in zip(planned, phases, strict=True):
            if phase is Phase.SETTLED:
                # If this rank knows no cause, another rank has failed.
                self._give_up(request, request.failure or "fallback: FetchError")
            request.reach(phase)
            if phase >= Phase.FETCHING:
                prefixes.move(request.req, approximate=request.planned.is_approximate)
            elif request in asked or phase is Phase.SETTLED:  # All ranks choose the same requests.
                self._read_what_is_there(request, tree)
        return {it.req.rid for it in requests if self._is_held(it)}

    def admitted(self, reqs: Sequence[Req]) -> None:
        """Forget requests that SGLang has put into a batch. A request that still waits for its load
        was admitted without the load, and does not use its plan."""
        for request in filter(None, (self._requests.pop(req.rid, None) for req in reqs)):
            if request.is_waiting:
                is_on_device = request.req.prefix_len >= request.plan.pages.stop * self._page_size
                cause = "no_slots" if request.source else "staging_full"
                self._give_up(request, Reason.ON_DEVICE.value if is_on_device else cause)
            request.settle()
            self._note_approximate(request, request.req.prefix_len // self._page_size)

    def pass_over(self, rids: Iterable[str]) -> None:
        """Note that the last scheduler step had room for these requests, which were held back."""
        for request in filter(None, map(self._requests.get, rids)):
            request.pass_over()

    def has_source(self, rid: str) -> bool:
        """Whether a request has a source, but no slots yet."""
        request = self._requests.get(rid)
        return request is not None and Phase.FETCHING <= request.phase <= Phase.READY

    def num_restorable(self, rid: str, first_key: str) -> int:
        """Number of pages that can be loaded from SGLang's page `first_key` on.

        While other requests decode, at most as many as one scheduler step can recompute.
        """
        if not self.has_source(rid):
            return 0
        request = self._requests[rid]
        first, span = prefixes.page_hash(first_key), request.plan.pages
        if first not in request.own_pages[request.plan.first_page : span.stop]:
            return 0
        start = request.own_pages.index(first)
        num_pages, num_head = span.stop - start, max(0, span.start - start)
        if self._is_decoding:
            num_pages = min(num_pages, num_head + self._most_pages(request))
        return num_pages if num_pages > num_head else 0

    def step_tokens(self, rid: str, num_tokens: int) -> int:
        """Return how many tokens of a scheduler step's budget `num_tokens` loaded tokens use up."""
        if not self.has_source(rid):
            return 0
        request = self._requests[rid]
        num_head = min(num_tokens, len(request.plan.head) * self._page_size)
        return num_head + math.ceil((num_tokens - num_head) * _step_share(request))

    def take(self, rid: str, keys: Sequence[str], slots: torch.Tensor) -> bool:
        """Let the next batch load the pages of `keys` into `slots`. Return False if that is
        impossible now."""
        if self.num_restorable(rid, keys[0]) < len(keys):
            return False
        request = self._requests[rid]
        if request.phase < Phase.ARRIVING or not request.source.admit():
            return False
        planned = request.planned
        request.req.skip_radix_cache_insert |= planned.is_experiment and not planned.plan.is_exact
        first = request.own_pages.index(prefixes.page_hash(keys[0]))
        pages = Span(max(first, planned.plan.pages.start), first + len(keys))
        at = Span(pages.start * self._page_size, pages.stop * self._page_size)
        head = Span(first * self._page_size, at.start)
        request.begin_load(at, slots[len(head) :] if head else slots, head)
        self._note_approximate(request, first, 0 if planned.plan.is_exact else len(at))
        if planned.is_approximate:
            where = prefixes.approximate_of(request.req)
            self._pool_index.note_loaded(where, request.pages[pages.start : pages.stop])
        return True

    def cancel(self, rid: str) -> bool:
        """Drop a load, because SGLang takes its slots back before the batch starts. The request
        will be planned again. Return False if it has no load."""
        request = self._requests.get(rid)
        if request is None or request.phase is not Phase.LOADING:
            return False
        del self._requests[rid]
        request.settle()
        return True

    def start(self) -> list[Request]:
        """Remove and return the requests that load with the batch that starts now."""
        loading = [it for it in self._requests.values() if it.phase is Phase.LOADING]
        for request in loading:
            del self._requests[request.req.rid]
        return loading

    def clear(self) -> None:
        for request in self._requests.values():
            request.settle()
        self._requests.clear()
        self._followers.clear()

    def _note_approximate(self, request: Request, num_read: int, num_loaded: int = 0) -> None:
        """Note on the request how many of its tokens are approximate. The request reads `num_read`
        pages from the device, and loads `num_loaded` approximate tokens."""
        req = request.req
        if prefixes.is_approximate(req):
            pages = request.pages[:num_read]
            num_pages = self._pool_index.num_loaded(prefixes.approximate_of(req), pages)
            num_loaded += num_pages * self._page_size
        prefixes.note_approximate(req, num_loaded)

    def _is_held(self, request: Request) -> bool:
        """Whether SGLang may not admit the request yet.

        Until all bytes have arrived, the load may turn into a full prefill. If other requests
        decode, such a prefill has to fit into one scheduler step.
        """
        if request.phase is Phase.ARRIVING and self._is_decoding:
            return self._most_pages(request) < len(request.plan.pages)
        return request.phase in (Phase.SEEN, Phase.FETCHING)

    def _most_pages(self, request: Request) -> int:
        """Return how many loaded pages fit into one scheduler step, beside the plan's head and one
        page of new tokens."""
        share, page_size = _step_share(request), self._page_size
        num_left = self._meter.step_tokens - (1 + len(request.plan.head)) * page_size
        most = num_left / (share * page_size) if share else math.inf
        return int(min(most, len(request.plan.pages)))

    def _see_anew(self, queue: Sequence[Req], tree: UnifiedRadixCache) -> None:
        """Plan the next requests again if the device has evicted pages that they expect: loaded
        pages have to follow the device's pages. A wait that has not ended does not restart."""
        known = filter(None, map(self._requests.get, (req.rid for req in queue)))
        for request in islice((it for it in known if it.num_there), NUM_NEXT):
            held = self._pool_index.held(request.req, request.num_there, tree)
            is_approximate = prefixes.is_approximate(request.req)
            if (held.approximate if is_approximate else held.exact) < request.num_there:
                was_over = request.phase in (Phase.READY, Phase.SETTLED)
                begun_s = None if was_over else request.runnable_s
                self._see(request.req, tree).runnable_s = begun_s

    def _known(self, req: Req) -> Request | None:
        """Return the `Request` of `req`, not that of an earlier request with the same id."""
        request = self._requests.get(req.rid)
        return request if request is not None and request.req is req else None

    def _see(self, req: Req, tree: UnifiedRadixCache) -> Request:
        """Make a new `Request`. Ask the HiCache backend for the prompt's pages, if the device lacks
        at least `min_tokens` tokens."""
        if req.rid in self._requests:
            self._requests[req.rid].settle()
        request = self._requests[req.rid] = Request(req)
        req.refresh_fill_ids()  # All ranks look up its pages on the device.
        prefixes.move(req, approximate=False)  # Until the first rank has decided.
        self._planner.note(req)
        self._planner.meet(req)
        if not self._asks or self._planner.refusal(req):
            return request
        # An error here occurs again in planning, which reports it.
        with contextlib.suppress(Exception):
            if parse_controls(req.sampling_params.custom_params).mode != "off":
                request.pages = pages = prefixes.reusable_pages(req, self._page_size)
                num_new = len(pages) - self._pool_index.held(req, len(pages), tree).exact
                num_tokens = num_new * self._page_size
                if num_tokens >= self._sources.server.settings.min_tokens:
                    searches = self._sources.cache.search(pages)
                    request.may_be_planned = lambda: all(it.is_over for it in searches)
                    full_s = full_prefill_s(Span(0, num_tokens), self._meter.prefill)
                    request.patience = Patience(saving_s=UNMEASURED_S if full_s is None else full_s)
        return request

    def _decide(self, seen: Sequence[Request], tree: UnifiedRadixCache, num_waiting: int) -> None:
        """Plan all requests that can be planned now. The other ranks follow the first rank's
        decisions."""
        for request in seen if self._ranks.is_first else ():
            may_be = request.may_be_planned() or request.left_s() < 0
            choice = self._plan(request, tree, num_waiting) if may_be else None
            if isinstance(choice, Planned):
                self._take_up(request, choice, tree)  # The next plan counts this fetch.
            elif choice is not None:
                self._decline(request, choice)
        mine: list[_Decision] = []
        for request in seen:
            if request.phase != Phase.SEEN:
                sent = replace(request.planned, considered=None) if request.is_waiting else None
                mine.append(
                    (
                        request.req.rid,
                        prefixes.is_approximate(request.req),
                        sent,
                        request.num_there,
                    )
                )
        shared = self._ranks.share(mine, list[_Decision])
        for rid, is_approximate, planned, num_there in () if self._ranks.is_first else shared:
            request = self._requests[rid]
            if planned is not None:
                self._take_up(request, planned, tree)
            else:
                prefixes.move(request.req, approximate=is_approximate)
                request.settle()
                request.num_there = num_there

    def _plan(
        self, request: Request, tree: UnifiedRadixCache, num_waiting: int
    ) -> Planned | Declined | None:
        """Plan one request, or say why not. None if it should wait for another request."""
        req = request.req
        try:
            if refusal := self._planner.refusal(req):
                return Declined(refusal)
            request.pages = request.pages or prefixes.reusable_pages(req, self._page_size)
            choice = self._planner.plan(req, request.pages, tree, num_waiting)
            consider(req, choice.considered)
            if isinstance(choice, Planned) and not choice.plan.is_exact and must_stay_exact(req):
                choice = Declined(Reason.OFF.value)
            if isinstance(choice, Declined) and choice.may_be_approximate:
                self._read_what_is_there(request, tree)
                if prefixes.is_approximate(req):
                    return choice  # No other model can read the KV of this request.
            return None if self._followers.follow(request, choice, tree) else choice
        except Exception:
            log.exception("request %s: planning failed; it does a full prefill", name_of(req.rid))
            return Declined("error")

    def _decline(self, request: Request, why: Declined) -> None:
        request.settle()
        report.matched(request, why.outcome)
        provenance = RequestProvenance(outcome=why.outcome, detail=why.detail or None)
        self._labels.note(request.req, provenance)
        few_left = (Reason.TOO_SHORT.value, Reason.ON_DEVICE.value)
        if why.outcome in few_left and why.considered is not None:
            demand, is_approximate = why.considered.demand, prefixes.is_approximate(request.req)
            exact, approximate = demand.first_page, demand.first_approximate or 0
            request.num_there = approximate if is_approximate else exact

    def _read_what_is_there(self, request: Request, tree: UnifiedRadixCache) -> None:
        """Choose the KV on the device that a request reads if it loads nothing: approximate KV if
        it covers more of the prompt, otherwise exact KV."""
        is_better = False
        if self._pool_index.has_approximate and not must_stay_exact(request.req):
            held = self._pool_index.held(request.req, len(request.pages), tree)
            is_better = held.approximate > max(held.exact, prefixes.num_head(request.req))
        prefixes.move(request.req, approximate=is_better)

    def _take_up(self, request: Request, planned: Planned, tree: UnifiedRadixCache) -> None:
        """Begin to fetch this rank's shard of the plan's pages."""
        req, plan = request.req, planned.plan
        plan = replace(plan, location=Location(at_rank(plan.location, self._ranks.rank)))
        # Take up the plan even if this rank fails: all ranks need the same planned requests.
        request.take_up(replace(planned, plan=plan))
        prefixes.move(req, approximate=planned.is_approximate)
        try:
            request.pages = request.pages or prefixes.reusable_pages(req, self._page_size)
            request.own_pages = (
                prefixes.own_pages_of(req, len(request.pages) * self._page_size, self._page_size)
                if prefixes.place_of(req)
                else request.pages
            )
            request.match_s = request.age_s
            report.matched(request)
            request.fetch(self._sources, tree)
        except Exception:
            log.exception("request %s: this rank cannot do as planned", name_of(req.rid))
            request.failure = "error"

    def _give_up(self, request: Request, outcome: str) -> None:
        """Settle a planned request that will not use its plan."""
        if outcome != Reason.ON_DEVICE.value:
            report.given_up(request, outcome.removeprefix("fallback: "))
            self._labels.metrics.count_saving(request.plan, -request.delay_s)
        queued_ms = round(1000 * request.age_s, 3)
        is_fault = outcome.startswith("fallback")
        gone = is_fault and absence_of(request.plan.location, self._sources.cache.sources())
        provenance = RequestProvenance(outcome=outcome, detail=gone or None, queued_ms=queued_ms)
        self._labels.note(request.req, provenance)


def _step_share(request: Request) -> float:
    """Return the cost of one loaded token, in tokens of SGLang's budget for a scheduler step. While
    KV still arrives, the cost is at least 1, because the load may become a full prefill."""
    share = request.planned.step_share
    return max(share, 1.0) if request.phase is Phase.ARRIVING else share
