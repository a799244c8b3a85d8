"""Requests that compute what others are waiting to read.

Ten adapters that are sent one new document at the same time would each prefill it. So the first one
leads: those after it, whose models may reuse its model's KV, wait until it is in the pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from cachetree import Location, ModelId, PageHash
from cachetree.planning import Patience, Reason
from cachetree.tree import CacheTree
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
from sglang_droidspeak.engine.prefixes import namespace_of
from sglang_droidspeak.request.planner import Declined, Planned, Planner
from sglang_droidspeak.request.report import must_stay_exact
from sglang_droidspeak.request.request import Request
from sglang_droidspeak.store.pool import pool_of

_READS_NOBODY: Final = (Reason.OFF.value, "bad_controls")
"""Outcomes of requests that compute all themselves, whatever others have."""


@dataclass(frozen=True, slots=True)
class Leader:
    """One request in full prefill: these pages will be in the pool as `model`'s."""

    req: Req
    model: ModelId
    place: Location
    pages: Sequence[PageHash]


@dataclass(eq=False)
class Followers:
    """Scheduler thread only."""

    _tree: CacheTree
    _planner: Planner
    _models: Models
    _page_size: int
    _leaders: dict[str, Leader] = field(default_factory=dict, init=False)

    def follow(self, request: Request, found: Planned | Declined, tree: UnifiedRadixCache) -> bool:
        """Whether it is to wait, once and no longer than that saves, for a request that computes
        pages of both, rather than do as was found; else it may lead from now on."""
        req, owner = request.req, self._models.owner_of(request.req)
        if len(self._models) == 1 or owner is None or not request.pages or request.has_followed:
            return False
        pages = owner.pages_of(request.pages, self._page_size)
        place = pool_of(namespace_of(req))
        is_declined, known = isinstance(found, Declined), found.considered
        num_planned, saving_s = (0, 0.0) if is_declined else (found.plan.pages.stop, found.saving_s)
        longest: dict[Location, Leader] = {}
        leaders = () if is_declined and found.outcome in _READS_NOBODY else self._leaders.values()
        for it in leaders:
            num_pages = 0 if it.place == place else _num_common(it.pages, pages)
            if num_pages > (len(longest[it.place].pages) if it.place in longest else num_planned):
                longest[it.place] = replace(it, pages=pages[:num_pages])
        if longest:
            demand = known.demand if known else self._planner.demand(req, owner, len(pages), tree)
        for it in sorted(longest.values(), key=lambda it: -len(it.pages)):
            saved_s = self._planner.would_save_s(
                demand, len(it.pages), it.model, it.place, exactly=must_stay_exact(req)
            )
            if saved_s > saving_s and not self._has_left(it):
                request.may_be_planned, request.has_followed = partial(self._is_over, it), True
                request.patience = Patience(saving_s=saved_s - saving_s)
                return True
        if is_declined:
            self._leaders[req.rid] = Leader(req, owner.model, place, pages)
        return False

    def _is_over(self, awaited: Leader) -> bool:
        """Whether the pages are there, or will not come."""
        leader = self._leaders.get(awaited.req.rid)
        return leader is None or leader.req is not awaited.req or self._has_left(awaited)

    def prune(self, waiting: Container[str]) -> None:
        """Forget whom nobody needs to follow any more, given the requests that wait."""
        for rid, leader in list(self._leaders.items()):
            if rid not in waiting and not _is_in_prefill(leader.req):
                del self._leaders[rid]

    def clear(self) -> None:
        self._leaders.clear()

    def _has_left(self, it: Leader) -> bool:
        return self._tree.remote.reach(it.place, it.model, it.pages) == len(it.pages)


def _is_in_prefill(req: Req) -> bool:
    """Whether one that has left the queue still computes its prompt: it has slots, which an aborted
    one does not get, and no answer yet, before whose first token it leaves what others may read."""
    return req.kv.holds_kv and not req.output_ids


def _num_common(ours: Sequence[PageHash], theirs: Sequence[PageHash]) -> int:
    """A page hash covers all pages before it: equal up to somewhere, and different from there."""
    most = min(len(ours), len(theirs))
    return bisect_left(range(most), True, key=lambda index: ours[index] != theirs[index])
