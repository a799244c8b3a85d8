"""Which local entries have not been used for longest."""

from __future__ import annotations

from collections.abc import Iterable

from cachetree.entries import LocalEntry


class Recency:
    """Local entries in the order of their last use, as a linked list.

    A use moves one entry per model, that at which the walk ended, and counts for those above it
    too. These come after all entries below them anyway, as eviction is leaf first: one that the
    search for a leaf comes by leaves the list, and takes the place of its last child as that goes.
    """

    def __init__(self) -> None:
        self.oldest: LocalEntry | None = None
        self._newest: LocalEntry | None = None
        self._num_uses = 0

    def use(self, entries: Iterable[LocalEntry]) -> None:
        """Mark these as used now, all at once."""
        self._num_uses += 1
        for entry in entries:
            entry.used = self._num_uses
            if entry is not self._newest:
                self._take_out(entry)
                self._insert_after(entry, self._newest)

    def add(self, entry: LocalEntry) -> None:
        """A new entry, without children; the caller marks it, or one below it, as used."""
        if entry.parent is not None:
            entry.parent.num_children += 1
        self._insert_after(entry, self._newest)

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        """`head` has been cut in two; `tail` takes its children."""
        tail.used = head.used
        tail.num_children, head.num_children = head.num_children, 1
        if self._has(head):
            self._insert_after(tail, head.older)

    def remove(self, entry: LocalEntry) -> LocalEntry | None:
        """Take out an entry without children; returns the one to consider for eviction next."""
        before = entry.older
        self._take_out(entry)
        parent = entry.parent
        if parent is not None:
            parent.used = max(parent.used, entry.used)
            parent.num_children -= 1
            if not parent.num_children and not self._has(parent):
                self._insert_in_order(parent, before)
        return before.newer if before else self.oldest

    def pass_by(self, entry: LocalEntry) -> LocalEntry | None:
        """The next one to consider after `entry`, which has children or is held."""
        following = entry.newer
        if entry.num_children:
            self._take_out(entry)
        return following

    def _has(self, entry: LocalEntry) -> bool:
        return entry.older is not None or entry is self.oldest

    def _insert_in_order(self, entry: LocalEntry, place: LocalEntry | None) -> None:
        """Not before `place`; as a rule right there, further on only if `entry` had been held."""
        following = place.newer if place else self.oldest
        while following is not None and following.used < entry.used:
            place, following = following, following.newer
        self._insert_after(entry, place)

    def _insert_after(self, entry: LocalEntry, place: LocalEntry | None) -> None:
        """None is the oldest end."""
        following = place.newer if place else self.oldest
        entry.older, entry.newer = place, following
        if place is None:
            self.oldest = entry
        else:
            place.newer = entry
        if following is None:
            self._newest = entry
        else:
            following.older = entry

    def _take_out(self, entry: LocalEntry) -> None:
        if not self._has(entry):
            return
        if entry.older is None:
            self.oldest = entry.newer
        else:
            entry.older.newer = entry.newer
        if entry.newer is None:
            self._newest = entry.older
        else:
            entry.newer.older = entry.older
        entry.older = entry.newer = None
