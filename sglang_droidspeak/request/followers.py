"""Let requests wait for another request that computes the same pages.

Ten adapters that get the same new document at once would each prefill it. So the first request
leads. A later request follows if its model may reuse the leader's KV: it waits until the KV pool
has the leader's KV.
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
"""Outcomes of requests that never reuse another model's KV."""


@dataclass(frozen=True, slots=True)
class Leader:
    """A request in full prefill, which later requests may follow. The KV pool will have KV of
    `model` for `pages`, at the location `place`."""

    req: Req
    model: ModelId
    place: Location
    pages: Sequence[PageHash]


@dataclass(eq=False)
class Followers:
    """Requests in full prefill that later requests with the same pages may wait for. Scheduler
    thread only."""

    _tree: CacheTree
    _planner: Planner
    _models: Models
    _page_size: int
    _leaders: dict[str, Leader] = field(default_factory=dict, init=False)

    def follow(self, request: Request, choice: Planned | Declined, tree: UnifiedRadixCache) -> bool:
        """Decide whether the request should wait for a leader that computes shared pages, instead
        of using its own plan `choice`. A request waits once, at most as long as waiting saves. A
        request that does not wait may lead from now on."""
        req, owner = request.req, self._models.owner_of(request.req)
        if len(self._models) == 1 or owner is None or not request.pages or request.has_followed:
            return False
        pages = owner.pages_of(request.pages, self._page_size)
        place = pool_of(namespace_of(req))
        is_declined, known = isinstance(choice, Declined), choice.considered
        num_planned, saving_s = (
            (0, 0.0) if is_declined else (choice.plan.pages.stop, choice.saving_s)
        )
        longest: dict[Location, Leader] = {}
        leaders = () if is_declined and choice.outcome in _READS_NOBODY else self._leaders.values()
        for leader in leaders:
            num_pages = 0 if leader.place == place else _num_common(leader.pages, pages)
            if num_pages > (
                len(longest[leader.place].pages) if leader.place in longest else num_planned
            ):
                longest[leader.place] = replace(leader, pages=pages[:num_pages])
        if longest:
            demand = known.demand if known else self._planner.demand(req, owner, len(pages), tree)
        for leader in sorted(longest.values(), key=lambda it: -len(it.pages)):
            saved_s = self._planner.would_save_s(
                demand, len(leader.pages), leader.model, leader.place, exactly=must_stay_exact(req)
            )
            if saved_s > saving_s and not self._has_left(leader):
                request.may_be_planned, request.has_followed = partial(self._is_over, leader), True
                request.patience = Patience(saving_s=saved_s - saving_s)
                return True
        if is_declined:
            self._leaders[req.rid] = Leader(req, owner.model, place, pages)
        return False

    def _is_over(self, awaited: Leader) -> bool:
        """Whether the awaited pages are in the KV pool, or will never be."""
        leader = self._leaders.get(awaited.req.rid)
        return leader is None or leader.req is not awaited.req or self._has_left(awaited)

    def prune(self, waiting: Container[str]) -> None:
        """Forget leaders that are neither in the queue nor computing. `waiting` has the ids of
        requests in the queue."""
        for rid, leader in list(self._leaders.items()):
            if rid not in waiting and not _is_in_prefill(leader.req):
                del self._leaders[rid]

    def clear(self) -> None:
        self._leaders.clear()

    def _has_left(self, leader: Leader) -> bool:
        return self._tree.remote.reach(leader.place, leader.model, leader.pages) == len(
            leader.pages
        )


def _is_in_prefill(req: Req) -> bool:
    """Whether a request that has left the queue still computes its prompt. Such a request has slots
    and no output yet; an aborted request has no slots. Its KV is in the tree before its first
    output token."""
    return req.kv.holds_kv and not req.output_ids


def _num_common(ours: Sequence[PageHash], theirs: Sequence[PageHash]) -> int:
    """Return how many leading pages are equal. A page hash covers all pages before it, so a binary
    search finds the first difference."""
    most = min(len(ours), len(theirs))
    return bisect_left(range(most), True, key=lambda index: ours[index] != theirs[index])
