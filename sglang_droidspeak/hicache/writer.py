"""The thread that writes what comes into the tree to a backend, behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cachetree import Kind, ModelId, PageHash, Span, Step, WriteBehind
from cachetree.tree import CacheTree, Change, Lease
from sglang_droidspeak.hicache.lane import Lane
from sglang_droidspeak.hicache.objects import HICACHE


class Writer:
    """Writes entries in the order in which they come, through slots of its own.

    E of each layer comes first, then KV in `Objects.written` order: a page is found only when all
    of it is there.
    """

    def __init__(self, tree: CacheTree, lane: Lane) -> None:
        self._tree = tree
        self._lane = lane
        self.behind: Final = WriteBehind(tree, "hicache-write", self._write, lane.clock)

    # In the thread.

    def _write(self, change: Change, lease: Lease, is_over: Callable[[], bool]) -> bool:
        """Whether all of the entry is in the backend, or the backend has failed."""
        breaker, model, pages = self._lane.breaker, change.model, change.pages
        if breaker.is_open:
            return False
        steps = [*((Step(Kind.E, layer),) for layer in change.e_layers), self._lane.objects.written]
        try:
            for each in steps:
                if not self._write_steps(lease, model, pages, each, is_over):
                    return False
        except Exception as exc:  # noqa: BLE001  # The breaker counts it, and says so.
            self._lane.count("failed", 1)
            breaker.fail(repr(exc))
            return True
        breaker.succeed()
        self._tree.add_remote(HICACHE, model, change.parent, pages, change.e_layers)
        return True

    def _write_steps(
        self,
        lease: Lease,
        model: ModelId,
        pages: Sequence[PageHash],
        steps: Sequence[Step],
        is_over: Callable[[], bool],
    ) -> bool:
        """Write of each step what is not there, by the first and the last of the steps."""
        lane, start = self._lane, len(pages)
        for step in dict.fromkeys((steps[0], steps[-1])):
            start = lane.num_leading(model, pages[:start], step)
        for batch in lane.batches(model, pages[start:], steps):
            if is_over():
                return False
            for index, piece in enumerate(batch):
                page = start + piece.page
                (payload,) = lease.views(piece.step, Span(page, page + 1))
                lane.objects.seal(piece.key, piece.step, payload.cast("B"), lane.memory(index))
            is_taken = lane.write(batch)
            lane.count("written" if is_taken else "failed", len(batch))
            if not is_taken:
                lane.breaker.fail("it does not take what is written")
                return False
        return True
