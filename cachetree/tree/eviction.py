"""Order in which local entries are evicted: the least recently used first. With a time to live,
unused entries are evicted even if there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import Final

import msgspec

from cachetree.clock import Clock
from cachetree.errors import ConfigError
from cachetree.tree.entries import LocalEntry

_SLACK: Final = 64

_Item = tuple[int, int, LocalEntry]
"""An entry's last use, a number that makes the item unique, and the entry."""


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for when unused entries leave memory, and for how much memory pins may keep."""

    ttl_s: float | None = None
    """Seconds after which an unused entry leaves memory. None: entries stay until their room is
    needed."""
    max_pinned_share: float = 0.5
    """Share of the memory budget that all pins together may keep, from 0 to 1."""

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"ttl_s is {self.ttl_s}; give a positive number, or leave it out")
        if not 0 <= self.max_pinned_share <= 1:
            raise ConfigError(f"max_pinned_share is {self.max_pinned_share}; give 0 to 1")


class Eviction:
    """Queue of the local entries that may be evicted, the least recently used first. The caller
    holds the tree's lock.

    Only the last entry of a used prefix notes the use, which counts for all entries above it, too.
    Entries without children are evicted first. An evicted entry passes its last use on to its
    parents.

    Each use gives the entry a larger number, and does not touch the queue. If an entry reaches the
    front with an outdated number, it is queued again with its present number. If it has children or
    is held, it leaves the queue until `free` adds it again.

    An item with the largest number so far is appended to `_line`. All other items go into a heap.
    With all items in the heap, an eviction takes a fifth longer.
    """

    def __init__(self, ttl_s: float | None, clock: Clock) -> None:
        self.ttl_s: Final = ttl_s
        self._clock = clock
        self._num_uses = 0
        self._queued: dict[LocalEntry, int] = {}
        """Last use with which each entry is queued. An item with another last use is outdated."""
        self._line: deque[_Item] = deque()
        self._heap: list[_Item] = []
        self._num_put = 0

    def add(self, last: LocalEntry) -> None:
        """Queue the last entry of a new prefix, and count it as used now."""
        self.use((last,))
        self.free(last)

    def use(self, entries: Iterable[LocalEntry]) -> None:
        """Count these entries as used now. Each is the last entry of a used prefix."""
        now_s = 0.0 if self.ttl_s is None else self._clock()
        for entry in entries:
            self._num_uses += 1
            entry.last_use = self._num_uses
            entry.used_at_s = now_s

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        """Move the last use from `head` to `tail`, the second part of an entry that was cut in two.
        Only `tail` has children of the whole entry.

        If `tail` may be evicted, the caller calls `free` next.
        """
        tail.last_use, head.last_use = head.last_use, 0
        tail.used_at_s = head.used_at_s

    def free(self, entry: LocalEntry) -> None:
        """Queue an entry that may be evicted from now on. For example, its last hold has ended, or
        its last child was evicted."""
        last_use = entry.last_use
        if self._queued.get(entry, last_use + 1) > last_use:
            self._queued[entry] = last_use
            self._num_put += 1
            item = last_use, self._num_put, entry
            if not self._line or self._line[-1] < item:
                self._line.append(item)
            else:
                heappush(self._heap, item)

    def remove(self, entry: LocalEntry, parents: Iterable[LocalEntry]) -> None:
        """Remove an entry without children. Its parents inherit its last use, and may be evicted
        next."""
        queued = self._queued
        queued.pop(entry, None)
        if len(self._heap) + len(self._line) > 2 * len(queued) + _SLACK:
            # List comprehensions: function calls would hold the tree's lock three times as long.
            self._line = deque([it for it in self._line if queued.get(it[2]) == it[0]])
            self._heap = [it for it in self._heap if queued.get(it[2]) == it[0]]
            heapify(self._heap)
        for parent in parents:
            parent.last_use = max(parent.last_use, entry.last_use)
            parent.used_at_s = max(parent.used_at_s, entry.used_at_s)
            if parent.is_evictable:
                self.free(parent)

    def victims(self) -> Iterator[LocalEntry]:
        """Yield evictable entries, least recently used first. The caller removes each at once."""
        while self._line or self._heap:
            line, heap = self._line, self._heap
            is_in_line = bool(line) and (not heap or line[0] < heap[0])
            last_use, _, entry = line[0] if is_in_line else heap[0]
            is_valid = self._queued.get(entry) == last_use
            if is_valid and entry.is_evictable and entry.last_use == last_use:
                yield entry
                continue
            if is_in_line:
                line.popleft()
            else:
                heappop(heap)
            if is_valid:
                del self._queued[entry]
                if entry.is_evictable:
                    self.free(entry)

    def expired(self) -> Iterator[LocalEntry]:
        """Yield entries as `victims` does, until one was used within the time to live."""
        assert self.ttl_s is not None
        before_s = self._clock() - self.ttl_s
        return takewhile(lambda it: it.used_at_s <= before_s, self.victims())
