"""`lru`: what has not been used for longest goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cachetree.tree.entries import LocalEntry
from cachetree.tree.eviction.chain import Chain


class Lru:
    """Local entries in the order of their last use, exactly: `used` counts the uses."""

    def __init__(self) -> None:
        self._chain = Chain()
        self._num_uses = 0

    def add(self, entries: Sequence[LocalEntry]) -> None:
        self._num_uses += 1
        entries[-1].used = self._num_uses
        self._chain.insert_after(entries[-1], self._chain.newest)

    def use(self, entries: Iterable[LocalEntry]) -> None:
        self._num_uses += 1
        chain = self._chain
        for entry in entries:
            entry.used = self._num_uses
            if entry is not chain.newest:
                chain.take_out(entry)
                chain.insert_after(entry, chain.newest)

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        tail.used = head.used
        if self._chain.has(head):
            self._chain.insert_after(tail, head.older)

    def remove(self, entry: LocalEntry) -> None:
        self._chain.take_out(entry)
        parent = entry.parent
        if parent is not None:
            parent.used = max(parent.used, entry.used)
            if parent.is_evictable:
                self.free(parent)

    def free(self, entry: LocalEntry) -> None:
        """It was passed by at the oldest end, so its place is near it."""
        if self._chain.has(entry):
            return
        place, following = None, self._chain.oldest
        while following is not None and following.used < entry.used:
            place, following = following, following.newer
        self._chain.insert_after(entry, place)

    def victims(self) -> Iterator[LocalEntry]:
        while (entry := self._chain.oldest) is not None:
            if entry.is_evictable:
                yield entry
            else:
                self._chain.take_out(entry)
