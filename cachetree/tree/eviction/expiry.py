"""Entries that nobody has used for a while go, whether or not room is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cachetree.clock import Clock
from cachetree.tree.entries import LocalEntry
from cachetree.tree.eviction.leaf_heap import LeafHeap
from cachetree.tree.eviction.protocol import Eviction


class Expiry:
    """A policy, and beside it the same entries in the order of the time of their last use."""

    def __init__(self, policy: Eviction, ttl_s: float, clock: Clock) -> None:
        self._policy = policy
        self._ttl_s = ttl_s
        self._clock = clock
        self._heap = LeafHeap(lambda entry: entry.used_at_s, _inherit)
        self.victims = policy.victims

    def add(self, entries: Sequence[LocalEntry]) -> None:
        self._policy.add(entries)
        entries[-1].used_at_s = self._clock()
        self._heap.put(entries[-1])

    def use(self, entries: Iterable[LocalEntry]) -> None:
        used = list(entries)
        self._policy.use(used)
        now_s = self._clock()
        for entry in used:
            entry.used_at_s = now_s

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        self._policy.split(head, tail)
        tail.used_at_s = head.used_at_s

    def remove(self, entry: LocalEntry) -> None:
        self._policy.remove(entry)
        self._heap.remove(entry)

    def free(self, entry: LocalEntry) -> None:
        self._policy.free(entry)
        self._heap.put(entry)

    def expired(self) -> Iterator[LocalEntry]:
        """As `victims`, but only those that have not been used for the time to live."""
        before_s = self._clock() - self._ttl_s
        for entry in self._heap.leaves():
            if entry.used_at_s > before_s:
                return
            yield entry


def _inherit(above: LocalEntry, entry: LocalEntry) -> None:
    above.used_at_s = max(above.used_at_s, entry.used_at_s)
