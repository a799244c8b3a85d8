"""A linked list through local entries, whose links are the entries' own."""

from __future__ import annotations

from cachetree.tree.entries import LocalEntry


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
