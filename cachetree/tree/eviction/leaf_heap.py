"""Evictable entries, least key first, where a use only ever raises a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final

from cachetree.tree.entries import LocalEntry

_SLACK: Final = 64


class LeafHeap:
    """A use costs nothing here: it raises the key, and an entry that comes to the top with a key
    that is no longer its own goes back under the right one. Entries that came to the top while they
    had children or were held are left out until they are put in again."""

    def __init__(
        self,
        key: Callable[[LocalEntry], float],
        inherit: Callable[[LocalEntry, LocalEntry], None],
    ) -> None:
        """`inherit` gives an entry what is known of uses of one below it, which goes."""
        self._key = key
        self._inherit = inherit
        self._queued: dict[LocalEntry, float] = {}
        """The key under which each one lies in the heap; what lies there under another is void."""
        self._heap: list[tuple[float, int, LocalEntry]] = []
        self._num_put = 0

    def put(self, entry: LocalEntry) -> None:
        """Put in an evictable entry, or one whose key may have fallen."""
        key = self._key(entry)
        if self._queued.get(entry, inf) > key:
            self._queued[entry] = key
            heappush(self._heap, self._item(key, entry))

    def remove(self, entry: LocalEntry) -> None:
        """An entry without children goes. The one above it, which has lost it, may be next."""
        self._queued.pop(entry, None)
        if (parent := entry.parent) is not None:
            self._inherit(parent, entry)
            if parent.is_evictable:
                self.put(parent)
        if len(self._heap) > 2 * len(self._queued) + _SLACK:
            self._heap = [item for item in self._heap if self._is_valid(item)]
            heapify(self._heap)

    def leaves(self) -> Iterator[LocalEntry]:
        """Each is removed before the next is asked for."""
        while self._heap:
            item = self._heap[0]
            entry = item[2]
            key = self._key(entry) if self._is_valid(item) and entry.is_evictable else None
            if key == item[0]:
                yield entry
            elif key is not None:
                self._queued[entry] = key
                heapreplace(self._heap, self._item(key, entry))
            else:
                heappop(self._heap)
                if self._is_valid(item):
                    del self._queued[entry]

    def _item(self, key: float, entry: LocalEntry) -> tuple[float, int, LocalEntry]:
        self._num_put += 1
        return key, self._num_put, entry

    def _is_valid(self, item: tuple[float, int, LocalEntry]) -> bool:
        return self._queued.get(item[2]) == item[0]
