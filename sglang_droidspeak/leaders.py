"""Requests that compute what others are waiting to read.

Ten adapters that are sent one new document at the same time would each prefill it. So the first one
leads: those after it, whose models may reuse its model's KV, wait until it is in the pool.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from cachetree.ids import Location, ModelId, PageHash
from cachetree.policy import Reason
from sglang_droidspeak.pool import pool_of
from sglang_droidspeak.prefixes import namespace_of

if TYPE_CHECKING:
    from cachetree.tree import CacheTree
    from sglang_droidspeak.compat.names import Req
    from sglang_droidspeak.meter import Meter
    from sglang_droidspeak.models import Models
    from sglang_droidspeak.planner import Planned, Planner

_PATIENCE: Final = 2.0
"""A leader is followed for so many times the prefill that it is predicted to take, and a second."""
_UNKNOWN_PREFILL_S: Final = 30.0
_READS_NOBODY: Final = (Reason.OFF.value, "bad_controls")
"""Outcomes of requests that compute all themselves, whatever others have."""


@dataclass(slots=True, eq=False)
class Leader:
    """One request in full prefill: these pages will be in the pool as `model`'s."""

    req: Req
    model: ModelId
    pages: Sequence[PageHash]
    place: Location = field(init=False)
    started_s: float | None = None
    """When it was first seen to have left the queue."""

    def __post_init__(self) -> None:
        self.place = pool_of(namespace_of(self.req))


@dataclass(frozen=True, slots=True)
class Following:
    leader: Leader
    num_pages: int
    """Pages that the two prompts share."""


class Leaders:
    """Scheduler thread only."""

    def __init__(
        self, tree: CacheTree, planner: Planner, models: Models, meter: Meter, page_size: int
    ) -> None:
        self._page_size: Final = page_size
        self._tree: Final = tree
        self._planner: Final = planner
        self._models: Final = models
        self._meter: Final = meter
        self._leaders: dict[str, Leader] = {}

    def follow(
        self, req: Req, pages: Sequence[PageHash], planned: Planned | str
    ) -> Following | None:
        """Whom to wait for rather than do as planned; else this request may lead from now on."""
        part = self._models.part_of(req)
        if len(self._models) == 1 or part is None or not pages:
            return None
        pages = part.of(pages, self._page_size)
        num_planned = 0 if isinstance(planned, str) else planned.plan.pages.stop
        others = [] if planned in _READS_NOBODY else self._others(req)
        following = [Following(it, _num_common(it.pages, pages)) for it in others]
        for it in sorted(following, key=lambda it: -it.num_pages):
            leader, shared = it.leader, pages[: it.num_pages]
            if it.num_pages <= num_planned:
                break
            if self._planner.would_reuse(req, shared, leader.model, leader.place):
                return it
        if isinstance(planned, str):
            self._leaders[req.rid] = Leader(req, part.model, pages)
        return None

    def is_over(self, following: Following, waiting: Container[str]) -> bool:
        """Whether the pages are there, or are no longer worth waiting for."""
        leader = following.leader
        wanted = leader.pages[: following.num_pages]
        reach = self._tree.reach(leader.place, leader.model, wanted)
        if leader.req.finished() or reach == len(wanted):
            return True
        if leader.req.rid in waiting:
            return False
        leader.started_s = leader.started_s or time.monotonic()
        return time.monotonic() - leader.started_s > self._patience_s(leader)

    def clear(self) -> None:
        self._leaders.clear()

    def _others(self, req: Req) -> list[Leader]:
        """Those of other adapters that are not done."""
        for rid, leader in list(self._leaders.items()):
            reach = self._tree.reach(leader.place, leader.model, leader.pages)
            if reach == len(leader.pages) or leader.req.finished():
                del self._leaders[rid]
        mine = pool_of(namespace_of(req))
        return [it for it in self._leaders.values() if it.place != mine]

    def _patience_s(self, leader: Leader) -> float:
        prefill_s = self._meter.full_prefill_s(len(leader.req.full_untruncated_fill_ids))
        return _PATIENCE * (_UNKNOWN_PREFILL_S if prefill_s is None else prefill_s) + 1.0


def _num_common(ours: Sequence[PageHash], theirs: Sequence[PageHash]) -> int:
    """A page hash covers all pages before it: equal up to somewhere, and different from there."""
    most = min(len(ours), len(theirs))
    return bisect_left(range(most), True, key=lambda index: ours[index] != theirs[index])
