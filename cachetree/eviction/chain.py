"""A linked list through local entries, whose links are the entries' own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachetree.entries import LocalEntry


class Chain:
    """Entries from the oldest end to the newest. Every operation takes constant time."""

    def __init__(self) -> None:
        self.oldest: LocalEntry | None = None
        self.newest: LocalEntry | None = None

    def has(self, entry: LocalEntry) -> bool:
        """Whether `entry`, which is in no other chain, is in this one."""
        return entry.older is not None or entry is self.oldest

    def insert_after(self, entry: LocalEntry, place: LocalEntry | None) -> None:
        """None is the oldest end."""
        following = place.newer if place else self.oldest
        entry.older, entry.newer = place, following
        if place is None:
            self.oldest = entry
        else:
            place.newer = entry
        if following is None:
            self.newest = entry
        else:
            following.older = entry

    def take_out(self, entry: LocalEntry) -> None:
        if not self.has(entry):
            return
        if entry.older is None:
            self.oldest = entry.newer
        else:
            entry.older.newer = entry.newer
        if entry.newer is None:
            self.newest = entry.older
        else:
            entry.newer.older = entry.older
        entry.older = entry.newer = None


class Queue:
    """A chain that counts bytes. An entry remembers its queue also while it is not in it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._chain = Chain()

    @property
    def oldest(self) -> LocalEntry | None:
        return self._chain.oldest

    def has(self, entry: LocalEntry) -> bool:
        return entry.queue is self and self._chain.has(entry)

    def append(self, entry: LocalEntry) -> None:
        self._insert(entry, self._chain.newest)

    def put_back(self, entry: LocalEntry) -> None:
        """At the oldest end, where its turn was when it was taken out."""
        self._insert(entry, None)

    def take_out(self, entry: LocalEntry) -> None:
        if self.has(entry):
            self._chain.take_out(entry)
            self.num_bytes -= entry.num_bytes

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        """`tail` comes right before `head`, of which it was a part."""
        tail.queue = self
        if self._chain.has(head):
            self._chain.insert_after(tail, head.older)

    def _insert(self, entry: LocalEntry, place: LocalEntry | None) -> None:
        entry.queue = self
        self._chain.insert_after(entry, place)
        self.num_bytes += entry.num_bytes
