"""The thread that writes what comes into the tree to a backend, behind it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from cachetree import Deadline, Kind, ModelId, PageHash, Span, Step, give_way
from cachetree.tree import CacheTree, Change, Lease
from sglang_droidspeak.hicache.lane import Lane, Turns

MAX_WAITING: Final = 4096
"""Entries that wait to be written; they hold page hashes, no pages."""
_MAX_WRITE_S: Final = 60.0
_GRACE_S: Final = 0.5
"""To notice that it is time to end."""

Show = Callable[[ModelId, PageHash | None, Sequence[PageHash], Collection[int]], None]
"""Adds an entry of the backend to the tree."""


class Writer:
    """Writes entries in the order in which they come, through slots of its own.

    E of each layer comes first, then KV in `Objects.written` order: a page is found only when all
    of it is there.
    """

    def __init__(self, tree: CacheTree, lane: Lane, show: Show) -> None:
        self.num_late = 0
        """Entries that were evicted or refused before they were written."""
        self._tree = tree
        self._lane = lane
        self._show = show
        self._closes_at_s = float("inf")
        self._turns: Turns[Change] = Turns("hicache-write", self._write_all)
        there, self._unsubscribe = tree.subscribe(self._enqueue)
        for change in there:
            self._enqueue(change)

    def close(self, timeout_s: float) -> bool:
        """Write what waits until then; whether the thread has ended."""
        self._unsubscribe()
        self._closes_at_s = self._lane.clock() + timeout_s
        return self._turns.close(timeout_s + _GRACE_S)

    def _enqueue(self, change: Change) -> None:
        """Called under the tree's lock."""
        if not change.added:
            return
        if self._turns.num_waiting < MAX_WAITING and not self._lane.guard.is_open:
            self._turns.put(change)
        else:
            self.num_late += 1

    # In the thread.

    def _write_all(self, changes: Iterator[Change]) -> None:
        give_way()
        for change in changes:
            try:
                is_written = self._lane.clock() < self._closes_at_s and self._write(change)
                self.num_late += not is_written
            except Exception as exc:  # noqa: BLE001  # The guard counts it, and says so.
                self._lane.count("failed", 1)
                self._lane.guard.fail(repr(exc))

    def _write(self, change: Change) -> bool:
        """Whether all of the entry is in the backend."""
        if self._lane.guard.is_open:
            return False
        model, pages = change.model, change.pages
        deadline = Deadline.after(_MAX_WRITE_S, self._lane.clock)
        lease = self._tree.lease(model, pages, "the HiCache writer", deadline, is_use=False)
        if lease is None:
            return False
        e_steps = [(Step(Kind.E, layer),) for layer in change.e_layers]
        with lease:
            is_whole = all(
                self._write_steps(lease, model, pages, steps)
                for steps in (*e_steps, self._lane.objects.written)
            )
        if is_whole:
            self._lane.guard.succeed()
            self._show(model, change.parent, pages, change.e_layers)
        return is_whole

    def _write_steps(
        self, lease: Lease, model: ModelId, pages: Sequence[PageHash], steps: Sequence[Step]
    ) -> bool:
        """Write of each step what is not there, by the first and the last of the steps."""
        lane, start = self._lane, len(pages)
        for step in dict.fromkeys((steps[0], steps[-1])):
            start = lane.num_leading(model, pages[:start], step)
        for batch in lane.batches(model, pages[start:], steps):
            if lane.clock() >= self._closes_at_s:
                return False
            for index, piece in enumerate(batch):
                payload = _leased(lease, piece.step, start + piece.page)
                lane.objects.seal(piece.key, piece.step, payload, lane.memory(index))
            is_taken = lane.write(batch)
            lane.count("written" if is_taken else "failed", len(batch))
            if not is_taken:
                lane.guard.fail("it does not take what is written")
                return False
        return True


def _leased(lease: Lease, step: Step, page: int) -> memoryview:
    (view,) = lease.views(step, Span(page, page + 1))
    return view.cast("B")
