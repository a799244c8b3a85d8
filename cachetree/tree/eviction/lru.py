"""`lru`: what has not been used for longest goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cachetree.tree.entries import LocalEntry
from cachetree.tree.eviction.leaf_heap import LeafHeap


class Lru:
    """Local entries in the order of their last use, exactly: `used` counts the uses."""

    def __init__(self) -> None:
        self._heap = LeafHeap(lambda entry: entry.used, _inherit)
        self._num_uses = 0
        self.remove = self._heap.remove
        self.free = self._heap.put
        self.victims = self._heap.leaves

    def add(self, entries: Sequence[LocalEntry]) -> None:
        self.use(entries[-1:])
        self._heap.put(entries[-1])

    def use(self, entries: Iterable[LocalEntry]) -> None:
        for entry in entries:
            self._num_uses += 1
            entry.used = self._num_uses

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        tail.used = head.used


def _inherit(above: LocalEntry, entry: LocalEntry) -> None:
    above.used = max(above.used, entry.used)
