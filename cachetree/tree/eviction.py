"""The order in which local entries are evicted: the least recently used first. With a time to live,
unused entries are evicted, too.

The disk store below the tree always uses LRU: its moves between files follow the order of use.
"""

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
"""An entry's last use, a number that makes items unique, and the entry."""


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for what leaves memory by itself, and for how much pins may keep in it."""

    ttl_s: float | None = None
    """Seconds after which an unused entry leaves memory. None: entries stay until their room is
    needed."""
    max_pinned_share: float = 0.5
    """Share of the memory's budget that pins may keep at once."""

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"ttl_s is {self.ttl_s}; give a positive number, or leave it out")
        if not 0 <= self.max_pinned_share <= 1:
            raise ConfigError(f"max_pinned_share is {self.max_pinned_share}; give 0 to 1")


class Eviction:
    """Local entries that may be evicted, least recently used first. The tree calls it with its lock
    held.

    A walk is noted only at the entry where it ended, and also counts for all entries above.
    Eviction begins with the leaves: an entry's turn comes after the last entry below it, which
    passes its last use on.

    Each use gives an entry a larger number, and leaves the queue as it is. An entry that reaches
    the front of the queue with an outdated number is queued again with its present one. An entry
    that reaches the front while it has children or is held is removed from the queue, until it is
    added again. So no search meets the same entry twice in vain.

    Most new items have the largest number so far, and are appended to a line; the others go into a
    heap. With all items in the heap, an eviction takes a fifth longer.
    """

    def __init__(self, ttl_s: float | None, clock: Clock) -> None:
        self.ttl_s: Final = ttl_s
        self._clock = clock
        self._num_uses = 0
        self._queued: dict[LocalEntry, int] = {}
        """Last use with which each entry is queued. Items of the same entry with another use are
        outdated."""
        self._line: deque[_Item] = deque()
        self._heap: list[_Item] = []
        self._num_put = 0

    def add(self, last: LocalEntry) -> None:
        """Add the deepest of the new entries of a path, and count it as used now."""
        self.use((last,))
        self.free(last)

    def use(self, entries: Iterable[LocalEntry]) -> None:
        """Note that a walk ended at these entries."""
        now_s = 0.0 if self.ttl_s is None else self._clock()
        for entry in entries:
            self._num_uses += 1
            entry.last_use = self._num_uses
            entry.used_at_s = now_s

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        """Pass on the last use of `head`, which was cut in two. `tail` is the new second part, and
        now has the children.

        If `tail` may be evicted, the caller calls `free` next.
        """
        tail.last_use, head.last_use = head.last_use, 0
        tail.used_at_s = head.used_at_s

    def free(self, entry: LocalEntry) -> None:
        """Queue an entry that may be evicted from now on: its last hold has ended, or it was cut
        off a held entry."""
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
        """Remove an entry without children. Pass its last use on to its parents, which may be
        evicted next."""
        queued = self._queued
        queued.pop(entry, None)
        if len(self._heap) + len(self._line) > 2 * len(queued) + _SLACK:
            # In lists: calls would take three times as long, with the lock of the tree held.
            self._line = deque([it for it in self._line if queued.get(it[2]) == it[0]])
            self._heap = [it for it in self._heap if queued.get(it[2]) == it[0]]
            heapify(self._heap)
        for parent in parents:
            parent.last_use = max(parent.last_use, entry.last_use)
            parent.used_at_s = max(parent.used_at_s, entry.used_at_s)
            if parent.is_evictable:
                self.free(parent)

    def victims(self) -> Iterator[LocalEntry]:
        """Yield evictable entries in order. The caller removes each before it asks for the next."""
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
        """Yield entries like `victims`, but only those that were unused for the time to live.

        Entries are in the order of their last use, so the first entry that is too young ends the
        search.
        """
        assert self.ttl_s is not None
        before_s = self._clock() - self.ttl_s
        return takewhile(lambda it: it.used_at_s <= before_s, self.victims())
