"""The local entry that goes next: the least recently used. With a time to live, the unused go too.

The disk store below the tree keeps to LRU: what it moves between its files follows the order of
use, whatever memory does.
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
"""An entry's last use, the number of this item among all, and the entry."""


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What leaves memory unasked, and how much may be kept in it by force."""

    ttl_s: float | None = None
    """Entries in memory that nobody has used for so long go at the next sweep, which comes with
    every new entry; None keeps them until room is needed."""
    max_pinned_share: float = 0.5
    """Of the budget of memory, how much pins may keep at once."""

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"ttl_s is {self.ttl_s}; give a positive number, or leave it out")
        if not 0 <= self.max_pinned_share <= 1:
            raise ConfigError(f"max_pinned_share is {self.max_pinned_share}; give 0 to 1")


class Eviction:
    """Local entries that may go, least recently used first. The tree calls it under its lock.

    A walk is noted at the entry where it ended only, and counts for all above that one too. It need
    not be noted there: eviction is leaf first, so an entry's turn comes when the last one below it
    has gone, which leaves it its last use.

    A use only ever raises a number, and costs nothing here: an entry that comes first with a number
    that is no longer its own goes back under the right one. One that comes first while it has
    children or is held is left out, until it is put in again. So no search meets the same obstacle
    twice.

    Most come with the largest number so far, and wait in a line. With all in one heap, whose depth
    is walked for each that leaves it, an eviction takes a fifth longer.
    """

    def __init__(self, ttl_s: float | None, clock: Clock) -> None:
        self.ttl_s: Final = ttl_s
        self._clock = clock
        self._num_uses = 0
        self._queued: dict[LocalEntry, int] = {}
        """The use under which each one lies below; what lies there under another is void."""
        self._line: deque[_Item] = deque()
        self._heap: list[_Item] = []
        self._num_put = 0

    def add(self, last: LocalEntry) -> None:
        """The last of new entries of one path; it has been used."""
        self.use((last,))
        self.free(last)

    def use(self, entries: Iterable[LocalEntry]) -> None:
        """Walks ended at these, all at once."""
        now_s = 0.0 if self.ttl_s is None else self._clock()
        for entry in entries:
            self._num_uses += 1
            entry.last_use = self._num_uses
            entry.used_at_s = now_s

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        """`head` has been cut in two; `tail` is new and has its children, and takes its last use.

        If `tail` may go, `free` says so next.
        """
        tail.last_use, head.last_use = head.last_use, 0
        tail.used_at_s = head.used_at_s

    def free(self, entry: LocalEntry) -> None:
        """This one may go now: nobody holds it any more, or it was cut off one that is held."""
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
        """An entry without children goes, and leaves its last use to what it hung on, which may be
        next."""
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
        """Evictable entries, those to go first first; each is removed before the next is asked."""
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
        """As `victims`, but only those that have not been used for the time to live; with one.

        Entries come in the order of their last uses, so the first young one ends the search.
        """
        assert self.ttl_s is not None
        before_s = self._clock() - self.ttl_s
        return takewhile(lambda it: it.used_at_s <= before_s, self.victims())
