"""Requests that wait in SGLang's queue: matched and planned once, then staged while they wait.

The scheduler thread only looks; transport threads fill the staging. Where a tier has to be asked
what it has, a request is planned when the answer is there, or is late. A request is held back until
what it needs has arrived, or is predicted to have arrived by the time its recompute is done:

    E of the transition layer ──► staged ─┐ admit when the rest will take no longer than the
    KV, layer after layer     ──► ........┘ recompute, at the rate seen so far

It waits no longer than reuse is predicted to save, counted from the first step that could have
taken it. So nothing that others do, or fail to do, makes it take more than twice a full prefill.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from cachetree import (
    DeadlineExceeded,
    FetchError,
    Location,
    PageHash,
    Span,
    is_pool,
)
from cachetree.planning import Demand, Plan, Reason, Strategy, layers_of_work
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.request.controls import parse_controls
from sglang_droidspeak.request.job import Job
from sglang_droidspeak.request.labels import must_stay_exact
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.planner import UNMEASURED_S, Declined, Planned
from sglang_droidspeak.start.config import at_rank

if TYPE_CHECKING:
    import torch

    from cachetree import Search
    from sglang_droidspeak.cost import Meter
    from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
    from sglang_droidspeak.ranks import Ranks
    from sglang_droidspeak.request.in_flight import AwaitedPrefill, InFlightPrefills
    from sglang_droidspeak.request.labels import Labels
    from sglang_droidspeak.request.planner import Planner
    from sglang_droidspeak.request.source import Arrival, Source, Sources

log = logging.getLogger(__name__)

_RATE_S = 0.2
"""How long a fetch has to run before its rate tells when it will end."""
_ANSWER_S = 0.1
"""A worker that has sent nothing for so long counts as failing."""
_ARRIVAL_MARGIN = 1.05
"""How much longer than predicted the rest of a fetch may take without holding up a forward."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """What the first rank tells the others of one request."""

    rid: str
    plan: Plan | None
    is_optional: bool
    is_experiment: bool
    is_approximate: bool
    patience_s: float
    step_share: float


class Progress(IntEnum):
    """How far a planned request is on one rank; on all, it is as far as the least of them."""

    FAILED = 0
    UNSTAGED = 1
    """No staging memory: admitted as it is, it does a full prefill."""
    WAITING = 2
    READY = 3


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingRequest:
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
    source: Source | None = None
    following: AwaitedPrefill | None = None
    """It waits to be planned until that request has left its pages in the pool."""
    is_optional: bool = True
    """Chosen by the server, which may think again; not asked for by name."""
    is_experiment: bool = False
    """Its KV serves this request only."""
    demand: Demand | None = None
    """What the plan answers; None where another rank made it, which plans again for all."""
    runnable_s: float | None = None
    """When a step first could have taken it, on monotonic time: its wait counts from then."""
    patience_s: float = math.inf
    """The longest that it may wait: what it is predicted to save."""
    step_share: float = 0.0
    """How much of SGLang's tokens of one step a recomputed token takes."""
    failure: str = ""
    """Why this rank cannot go on with the plan."""

    @property
    def waited_s(self) -> float:
        return 0.0 if self.runnable_s is None else time.monotonic() - self.runnable_s

    @property
    def is_approximate(self) -> bool:
        """Whether it is to read and leave approximate KV where others find it."""
        return self.plan is not None and not (self.plan.is_exact or self.is_experiment)

    def release(self) -> None:
        if self.source is not None:
            self.source.release()
        self.source = None

    def give_up(self) -> None:
        self.release()
        self.plan = None


class WaitingRequests:
    """One entry per request in the queue; scheduler thread only."""

    def __init__(
        self,
        sources: Sources,
        meter: Meter,
        labels: Labels,
        planner: Planner,
        leaders: InFlightPrefills,
        ranks: Ranks,
    ) -> None:
        self._sources = sources
        self._site = site = sources.site
        self._planner = planner
        self._pool = sources.noted
        self._leaders = leaders
        self._ranks = ranks
        self._meter = meter
        self._labels = labels
        self._reuses: dict[str, WaitingRequest] = {}
        self._refusal = ""
        self._asks = site.settings.hicache_backend is not None and ranks.is_first

    def look(self, queue: Sequence[Req], tree: UnifiedRadixCache, *, is_decoding: bool) -> set[str]:
        """Plan new requests, forget those that have left, and return the rids to hold back."""
        self._tree, self._is_decoding = tree, is_decoding
        reuses = [self._reuses.get(req.rid) or self._begin(req, tree) for req in queue]
        if len(self._reuses) > len(queue):
            for rid in self._reuses.keys() - {req.rid for req in queue}:
                self._reuses.pop(rid).give_up()
        self._leaders.prune(self._reuses)
        new = [it for it in reuses if not it.is_planned]
        if new:
            self._decide_all(new, tree, num_waiting=len(queue) - 1)
        held = {it.req.rid for it in new if not it.is_planned}
        planned = [it for it in reuses if it.plan is not None]
        progress = self._ranks.least([self._progress(it) for it in planned])
        for it, state in zip(planned, progress, strict=True):
            prefixes.move(it.req, approximate=it.is_approximate)
            if state == Progress.FAILED:
                self._report_fallback(it)
                it.give_up()
                self._take_what_is_there(it, tree)
            elif state == Progress.UNSTAGED:
                it.release()
                self._take_what_is_there(it, tree)
            elif state == Progress.WAITING:
                held.add(it.req.rid)
        return held

    def admitted(self, reqs: Sequence[Req]) -> None:
        """SGLang has put these into a batch; those that had a plan and are still known here read
        nothing by it."""
        for reuse in filter(None, (self._reuses.pop(req.rid, None) for req in reqs)):
            if reuse.plan is not None:
                is_on_device = reuse.req.prefix_len >= reuse.plan.pages.stop * self._site.page_size
                cause = "staging_full" if reuse.source is None else "no_slots"
                outcome = Reason.TOO_SHORT.value if is_on_device else cause
                self._labels.note(reuse.req, RequestProvenance(outcome=outcome))
            reuse.give_up()

    def pass_over(self, rids: Iterable[str]) -> None:
        """The step that was just made could have taken these, had they not been held back."""
        now_s = time.monotonic()
        for reuse in filter(None, map(self._reuses.get, rids)):
            reuse.runnable_s = reuse.runnable_s or now_s

    def has_source(self, rid: str) -> bool:
        reuse = self._reuses.get(rid)
        return reuse is not None and reuse.source is not None

    def num_restorable(self, rid: str, first_key: str) -> int:
        """How many pages from SGLang's page `first_key` on can be loaded.

        While others decode, so many at most that one step can recompute them.
        """
        if not self.has_source(rid):
            return 0
        reuse = self._reuses[rid]
        first, span = prefixes.page_hash(first_key), reuse.plan.pages
        if first not in reuse.own_pages[span.start : span.stop]:
            return 0
        num_pages = span.stop - reuse.own_pages.index(first)
        page_share = reuse.step_share * self._site.page_size
        if self._is_decoding and page_share:
            # A page stays for the request's own tokens.
            most = (self._meter.step_tokens - self._site.page_size) / page_share
            num_pages = min(num_pages, int(most))
        return num_pages

    def step_tokens(self, rid: str, num_tokens: int) -> int:
        """What the recompute of so many loaded tokens takes of SGLang's tokens of one step."""
        reuse = self._reuses.get(rid)
        return 0 if reuse is None else math.ceil(num_tokens * reuse.step_share)

    def take(self, rid: str, keys: Sequence[str], slots: torch.Tensor) -> Job | None:
        """Turn a staged request into a job that loads the pages of `keys` into `slots`."""
        if self.num_restorable(rid, keys[0]) < len(keys):
            return None
        reuse = self._reuses[rid]
        if not reuse.source.admit():
            return None
        reuse.req.skip_radix_cache_insert |= reuse.is_experiment and not reuse.plan.is_exact
        del self._reuses[rid]
        start = reuse.own_pages.index(prefixes.page_hash(keys[0]))
        return Job(
            rid=rid,
            plan=reuse.plan,
            source=reuse.source,
            pages=Span(start, start + len(keys)),
            slots=slots,
            page_size=self._site.page_size,
            match_s=reuse.match_s,
            patience_s=max(0.0, reuse.patience_s - reuse.waited_s),
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

    def _begin(self, req: Req, tree: UnifiedRadixCache) -> WaitingRequest:
        """Ask the tiers that do not advertise, where they could have enough to matter."""
        reuse = self._reuses[req.rid] = WaitingRequest(req=req, first_seen_s=time.monotonic())
        if not self._asks or self._refusal or prefixes.refusal(req):
            return reuse
        # What goes wrong here goes wrong again in planning, which reports it.
        with contextlib.suppress(Exception):
            if parse_controls(req.sampling_params.custom_params).mode != "off":
                page_size = self._site.page_size
                reuse.pages = prefixes.reusable_pages(req, page_size)
                num_tokens = len(reuse.pages) * page_size
                num_tokens -= self._pool.held(req, len(reuse.pages), tree).exact * page_size
                if num_tokens >= self._site.settings.min_tokens:
                    reuse.searches = self._sources.cache.search(reuse.pages)
                    most_s = self._meter.full_prefill_s(num_tokens)
                    reuse.patience_s = UNMEASURED_S if most_s is None else most_s
        return reuse

    def _decide_all(
        self, new: Sequence[WaitingRequest], tree: UnifiedRadixCache, num_waiting: int
    ) -> None:
        """Plan what can be planned now, on the first rank; the others do as it did."""
        if self._ranks.is_first:
            for reuse in new:
                if self._may_plan(reuse):
                    self._decide(reuse, tree, num_waiting)
        mine = [
            Decision(
                rid=it.req.rid,
                plan=it.plan,
                is_optional=it.is_optional,
                is_experiment=it.is_experiment,
                is_approximate=prefixes.is_approximate(it.req),
                patience_s=it.patience_s,
                step_share=it.step_share,
            )
            for it in new
            if it.is_planned
        ]
        for decision in self._ranks.share(mine, list[Decision]):
            if not self._ranks.is_first:
                self._obey(decision, tree)

    def _obey(self, decision: Decision, tree: UnifiedRadixCache) -> None:
        """Plan a request as the first rank did, with this rank's shard of the same pages."""
        reuse, plan = self._reuses[decision.rid], decision.plan
        reuse.is_planned = True
        prefixes.move(reuse.req, approximate=decision.is_approximate)
        if plan is None:
            return
        plan = replace(plan, location=Location(at_rank(plan.location, self._ranks.rank)))
        # Kept even where this rank fails: all ranks count the same requests.
        reuse.plan = plan
        try:
            reuse.pages = prefixes.reusable_pages(reuse.req, self._site.page_size)
            if is_pool(plan.location) and not self._pool.find(plan, reuse.pages, reuse.req, tree):
                raise FetchError("the pool has none of it")
            self._take_up(
                reuse,
                Planned(
                    plan=plan,
                    is_optional=decision.is_optional,
                    is_experiment=decision.is_experiment,
                    patience_s=decision.patience_s,
                    step_share=decision.step_share,
                ),
            )
        except Exception as exc:
            log.exception("request %s: this rank cannot do as planned", decision.rid)
            reuse.failure = type(exc).__name__

    def _may_plan(self, reuse: WaitingRequest) -> bool:
        if reuse.waited_s > reuse.patience_s:
            return True
        if reuse.following is not None:
            return self._leaders.is_over(reuse.following)
        return all(search.is_over for search in reuse.searches)

    def _decide(self, reuse: WaitingRequest, tree: UnifiedRadixCache, num_waiting: int) -> None:
        reuse.is_planned, reuse.searches = True, ()
        req = reuse.req
        try:
            if outcome := self._refusal or prefixes.refusal(req):
                declined: Declined | None = Declined(outcome)
            else:
                if not reuse.pages:
                    reuse.pages = prefixes.reusable_pages(req, self._site.page_size)
                declined = self._plan(reuse, tree, num_waiting)
        except Exception:
            log.exception("request %s: planning failed; it does a full prefill", req.rid)
            reuse.give_up()
            declined = Declined("error")
        if declined is not None:
            if not declined.may_be_approximate:
                prefixes.move(req, approximate=False)
            told = RequestProvenance(outcome=declined.outcome, detail=declined.detail or None)
            self._labels.note(req, told)

    def _plan(
        self, reuse: WaitingRequest, tree: UnifiedRadixCache, num_waiting: int
    ) -> Declined | None:
        """Fill in the plan and begin to stage it, or say why there is none."""
        req = reuse.req
        planned = self._planner.plan(req, reuse.pages, tree, num_waiting)
        if isinstance(planned, Planned) and not planned.plan.is_exact and must_stay_exact(req):
            planned = Declined(Reason.SLOWER.value, "it is exact so far")
        if isinstance(planned, Declined) and planned.may_be_approximate:
            self._take_what_is_there(reuse, tree)
            if prefixes.is_approximate(req):
                return planned  # Nobody can read what it will leave.
        if reuse.following is None:  # Once is enough.
            outcome = planned.outcome if isinstance(planned, Declined) else planned
            reuse.following = self._leaders.follow(req, reuse.pages, outcome)
            if reuse.following is not None:
                reuse.is_planned, reuse.patience_s = False, reuse.following.patience_s
                return None
        if isinstance(planned, Declined):
            return planned
        self._take_up(reuse, planned)
        return None

    def _take_what_is_there(self, reuse: WaitingRequest, tree: UnifiedRadixCache) -> None:
        """Have a request without a load read the namespace of which the device has more."""
        is_better = False
        if self._pool.has_approximate and not must_stay_exact(reuse.req):
            is_better = self._pool.held(reuse.req, len(reuse.pages), tree).is_approximate_longer
        prefixes.move(reuse.req, approximate=is_better)

    def _take_up(self, reuse: WaitingRequest, planned: Planned) -> None:
        """Begin to bring together what the plan needs."""
        reuse.plan, reuse.is_optional = planned.plan, planned.is_optional
        reuse.is_experiment, reuse.demand = planned.is_experiment, planned.demand
        reuse.patience_s, reuse.step_share = planned.patience_s, planned.step_share
        req, page_size = reuse.req, self._site.page_size
        prefixes.move(req, approximate=reuse.is_approximate)
        reuse.own_pages = (
            prefixes.own_pages_of(req, len(reuse.pages) * page_size, page_size)
            if prefixes.place_of(req)
            else reuse.pages
        )
        reuse.match_s = time.monotonic() - reuse.first_seen_s
        self._stage(reuse)

    def _stage(self, reuse: WaitingRequest) -> None:
        """Begin the fetch; where staging memory is used up, the next look tries again."""
        reuse.source = self._sources.of(reuse.plan, reuse.pages, reuse.req, self._tree)

    def _report_fallback(self, reuse: WaitingRequest) -> None:
        cause = reuse.failure or FetchError.__name__
        outcome = cause if cause == Reason.SLOWER.value else f"fallback: {cause}"
        queued_ms = round(1000 * (time.monotonic() - reuse.first_seen_s), 3)
        self._labels.note(reuse.req, RequestProvenance(outcome=outcome, queued_ms=queued_ms))

    def _recompute_s(self, plan: Plan) -> float | None:
        """Predicted; None until something was measured."""
        cost, page_size = self._meter.recompute, self._site.page_size
        if cost is None:
            return None
        seconds = cost.seconds(plan.pages.start * page_size, plan.pages.stop * page_size)
        return layers_of_work(plan) * seconds

    def _progress(self, reuse: WaitingRequest) -> Progress:
        """What could be admitted is planned again: with what has come, and what the device has."""
        state = self._arrival(reuse)
        if state != Progress.READY or reuse.demand is None or not reuse.is_optional:
            return state
        held = self._pool.held(reuse.req, len(reuse.pages), self._tree)
        if self._planner.still_saves(reuse.plan, reuse.demand, held):
            return state
        reuse.failure = Reason.SLOWER.value
        return Progress.FAILED

    def _arrival(self, reuse: WaitingRequest) -> Progress:
        if reuse.failure:
            return Progress.FAILED
        if reuse.source is None:
            self._stage(reuse)
        if reuse.source is None:
            return Progress.UNSTAGED
        try:
            arrival = reuse.source.progress()
        except FetchError as exc:
            log.warning("request %s: %s; it does a full prefill", reuse.req.rid, exc)
            reuse.failure = type(exc).__name__
            return Progress.FAILED
        if arrival.is_complete:
            return Progress.READY
        if reuse.waited_s > reuse.patience_s:
            return self._too_late(reuse, arrival)
        plan = reuse.plan
        recompute_s = self._recompute_s(plan)
        if recompute_s is None or not arrival.num_landed_bytes:
            return Progress.WAITING
        num_left = arrival.num_bytes - arrival.num_landed_bytes
        rest_s = arrival.elapsed_s * num_left / arrival.num_landed_bytes * _ARRIVAL_MARGIN
        if plan.strategy is Strategy.PIPELINED and arrival.has_e:
            rest_s -= recompute_s
            if rest_s <= 0:
                return Progress.READY
        left_s = math.inf if reuse.runnable_s is None else reuse.patience_s - reuse.waited_s
        if arrival.elapsed_s > _RATE_S and rest_s > left_s:
            return self._too_late(reuse, arrival)
        return Progress.WAITING

    def _too_late(self, reuse: WaitingRequest, arrival: Arrival) -> Progress:
        """Reuse would save less than the request waits for it."""
        log.info(
            "request %s: %d of %d bytes came in the %.3f s that are worth waiting for",
            reuse.req.rid,
            arrival.num_landed_bytes,
            arrival.num_bytes,
            reuse.patience_s,
        )
        if not arrival.num_landed_bytes and arrival.elapsed_s > _ANSWER_S:
            reuse.source.fail(DeadlineExceeded(f"no answer for {_ANSWER_S} s"))
        reuse.failure = "SlowLink"
        return Progress.FAILED
