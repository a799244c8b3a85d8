"""The thread that writes what comes into the tree to a backend, behind it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final

from cachetree import Clock, Deadline, Kind, ModelId, PageHash, Span, Step, give_way
from cachetree.tree import CacheTree, Change, Lease
from sglang_droidspeak.hicache.counts import Counts
from sglang_droidspeak.hicache.guard import Guard
from sglang_droidspeak.hicache.objects import ObjectBackend, Objects

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

    def __init__(
        self,
        tree: CacheTree,
        backend: ObjectBackend,
        objects: Objects,
        lane: range,
        show: Show,
        guard: Guard,
        counts: Counts,
        clock: Clock,
    ) -> None:
        self.num_late = 0
        """Entries that were evicted or refused before they were written."""
        self._tree = tree
        self._backend = backend
        self._objects = objects
        self._lane = lane
        self._show = show
        self._guard = guard
        self._counts = counts
        self._clock = clock
        self._closes_at_s = float("inf")
        self._waiting: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._write_for_ever, name="hicache-write", daemon=True
        )
        there, self._unsubscribe = tree.subscribe(self._enqueue)
        for change in there:
            self._enqueue(change)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Write what waits until then; whether the thread has ended."""
        self._unsubscribe()
        self._closes_at_s = self._clock() + timeout_s
        self._waiting.put(None)
        self._thread.join(timeout_s + _GRACE_S)
        return not self._thread.is_alive()

    def _enqueue(self, change: Change) -> None:
        """Called under the tree's lock."""
        if not change.added:
            return
        if self._waiting.qsize() < MAX_WAITING and not self._guard.is_open:
            self._waiting.put(change)
        else:
            self.num_late += 1

    # In the thread.

    def _write_for_ever(self) -> None:
        give_way()
        while (change := self._waiting.get()) is not None:
            try:
                is_written = self._clock() < self._closes_at_s and self._write(change)
                self.num_late += not is_written
            except Exception as exc:  # noqa: BLE001  # The guard counts it, and says so.
                self._counts.add("failed")
                self._guard.fail(repr(exc))

    def _write(self, change: Change) -> bool:
        """Whether all of the entry is in the backend."""
        if self._guard.is_open:
            return False
        model, pages = change.model, change.pages
        deadline = Deadline.after(_MAX_WRITE_S, self._clock)
        lease = self._tree.lease(model, pages, "the HiCache writer", deadline, is_use=False)
        if lease is None:
            return False
        e_steps = [(Step(Kind.E, layer),) for layer in change.e_layers]
        with lease:
            is_whole = all(
                self._write_steps(lease, model, pages, steps)
                for steps in (*e_steps, self._objects.written)
            )
        if is_whole:
            self._guard.succeed()
            self._show(model, change.parent, pages, change.e_layers)
        return is_whole

    def _write_steps(
        self, lease: Lease, model: ModelId, pages: Sequence[PageHash], steps: Sequence[Step]
    ) -> bool:
        """Write of each step what is not there, by the first and the last of the steps."""
        start = len(pages)
        for step in dict.fromkeys((steps[0], steps[-1])):
            with self._guard.call():
                start = self._objects.num_leading(self._backend, model, pages[:start], step)
        for batch in self._objects.batches(model, pages[start:], steps, len(self._lane)):
            if self._clock() >= self._closes_at_s:
                return False
            slots = self._lane[: len(batch)]
            for piece, slot in zip(batch, slots, strict=True):
                payload = _leased(lease, piece.step, start + piece.page)
                self._objects.seal(piece.key, piece.step, payload, self._backend.slots[slot])
            sizes = [self._objects.size(piece.step) for piece in batch]
            with self._guard.call():
                is_taken = self._backend.write([it.key for it in batch], slots, sizes)
            self._counts.add("written" if is_taken else "failed", len(batch))
            if not is_taken:
                self._guard.fail("it does not take what is written")
                return False
        return True


def _leased(lease: Lease, step: Step, page: int) -> memoryview:
    (view,) = lease.views(step, Span(page, page + 1))
    return view.cast("B")
