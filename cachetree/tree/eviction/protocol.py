"""What a policy has to say, and what it is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from cachetree.tree.entries import LocalEntry


class Eviction(Protocol):
    """Orders the local entries of a tree. Not thread-safe: the tree calls it under its lock.

    A walk is noted at the entry where it ended only, and counts for all above that one too. It need
    not be noted there: eviction is leaf first, so an entry's turn comes when the last one below it
    has gone, which leaves it what it knew of uses. A policy may therefore forget the place of an
    entry that `victims` came by while others stood below it or somebody held it; `remove` of the
    last below, or `free`, puts it back. So no search meets the same obstacle twice.
    """

    def add(self, entries: Sequence[LocalEntry]) -> None:
        """New entries of one path, top first; the last one has been used."""

    def use(self, entries: Iterable[LocalEntry]) -> None:
        """Walks ended at these, all at once."""

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        """`head` has been cut in two; `tail` is new and has its children, and takes its uses.

        If `tail` may go, `free` says so next.
        """

    def remove(self, entry: LocalEntry) -> None:
        """An entry without children goes. The one above it, which has lost it, may be next."""

    def free(self, entry: LocalEntry) -> None:
        """This one may go now: nobody holds it any more, or it was cut off one that is held."""

    def victims(self) -> Iterator[LocalEntry]:
        """Evictable entries, those to go first first; each is removed before the next is asked."""
