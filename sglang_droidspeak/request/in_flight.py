"""Requests that compute what others are waiting to read.

Ten adapters that are sent one new document at the same time would each prefill it. So the first one
leads: those after it, whose models may reuse its model's KV, wait until it is in the pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from cachetree import Location, ModelId, PageHash
from cachetree.planning import Reason
from sglang_droidspeak.engine.prefixes import namespace_of
from sglang_droidspeak.store.pool import pool_of

if TYPE_CHECKING:
    from cachetree.tree import CacheTree
    from sglang_droidspeak.adapters.models import Models
    from sglang_droidspeak.engine.names import Req
    from sglang_droidspeak.request.planner import Planned, Planner

_READS_NOBODY: Final = (Reason.OFF.value, "bad_controls")
"""Outcomes of requests that compute all themselves, whatever others have."""


@dataclass(slots=True, eq=False)
class InFlightPrefill:
    """One request in full prefill: these pages will be in the pool as `model`'s."""

    req: Req
    model: ModelId
    pages: Sequence[PageHash]
    place: Location = field(init=False)

    def __post_init__(self) -> None:
        self.place = pool_of(namespace_of(self.req))


@dataclass(frozen=True, slots=True)
class AwaitedPrefill:
    leader: InFlightPrefill
    num_pages: int
    """Pages that the two prompts share."""
    patience_s: float = 0.0
    """What reading them is predicted to save, and the longest that the follower waits for them."""


class InFlightPrefills:
    """Scheduler thread only."""

    def __init__(self, tree: CacheTree, planner: Planner, models: Models, page_size: int) -> None:
        self._page_size: Final = page_size
        self._tree: Final = tree
        self._planner: Final = planner
        self._models: Final = models
        self._leaders: dict[str, InFlightPrefill] = {}

    def follow(
        self, req: Req, pages: Sequence[PageHash], planned: Planned | str
    ) -> AwaitedPrefill | None:
        """Whom to wait for rather than do as planned; else this request may lead from now on."""
        part = self._models.part_of(req)
        if len(self._models) == 1 or part is None or not pages:
            return None
        pages = part.of(pages, self._page_size)
        num_planned = 0 if isinstance(planned, str) else planned.plan.pages.stop
        others = [] if planned in _READS_NOBODY else self._others(req)
        following = [AwaitedPrefill(it, _num_common(it.pages, pages)) for it in others]
        for it in sorted(following, key=lambda it: -it.num_pages):
            leader, shared = it.leader, pages[: it.num_pages]
            if it.num_pages <= num_planned:
                break
            saved_s = self._planner.would_save_s(req, shared, leader.model, leader.place)
            if saved_s > 0:
                return replace(it, patience_s=saved_s)
        if isinstance(planned, str):
            self._leaders[req.rid] = InFlightPrefill(req, part.model, pages)
        return None

    def is_over(self, following: AwaitedPrefill) -> bool:
        """Whether the pages are there, or will not come."""
        leader = following.leader
        wanted = leader.pages[: following.num_pages]
        return self._leaders.get(leader.req.rid) is not leader or self._has_left(leader, wanted)

    def prune(self, waiting: Container[str]) -> None:
        """Forget whom nobody needs to follow any more, given the requests that wait."""
        for rid, leader in list(self._leaders.items()):
            is_over = rid not in waiting and not _is_in_prefill(leader.req)
            if is_over or self._has_left(leader, leader.pages):
                del self._leaders[rid]

    def clear(self) -> None:
        self._leaders.clear()

    def _others(self, req: Req) -> list[InFlightPrefill]:
        """Those of other adapters."""
        mine = pool_of(namespace_of(req))
        return [it for it in self._leaders.values() if it.place != mine]

    def _has_left(self, leader: InFlightPrefill, pages: Sequence[PageHash]) -> bool:
        return self._tree.reach(leader.place, leader.model, pages) == len(pages)


def _is_in_prefill(req: Req) -> bool:
    """Whether one that has left the queue still computes its prompt: it has slots, which an aborted
    one does not get, and no answer yet, before whose first token it leaves what others may read."""
    return req.kv.holds_kv and not req.output_ids


def _num_common(ours: Sequence[PageHash], theirs: Sequence[PageHash]) -> int:
    """A page hash covers all pages before it: equal up to somewhere, and different from there."""
    most = min(len(ours), len(theirs))
    return bisect_left(range(most), True, key=lambda index: ours[index] != theirs[index])
