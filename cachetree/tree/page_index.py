"""Where a page is: a dict to the number of the node that has it.

A page costs its key, 8 bytes in its node, and a place in one flat dict; neither refers to anything
that garbage collection would follow, however many pages there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Generic, Protocol, TypeVar

from cachetree.ids import PageHash
from cachetree.tree.hashing import join_hashes


class Holder(Protocol):
    """What has consecutive pages; `start` others stand before the first."""

    pages: tuple[PageHash, ...]
    start: int


H = TypeVar("H", bound=Holder)


class PageIndex(Generic[H]):
    """Finds what holds a page. Takes no lock."""

    def __init__(self) -> None:
        self._ids: dict[PageHash, int] = {}
        self._holders: dict[int, H] = {}
        self._new_ids = count(1)

    def find(self, page: PageHash) -> H | None:
        id = self._ids.get(page)
        return None if id is None else self._holders[id]

    def find_at(self, page: PageHash, depth: int) -> H | None:
        """What holds `page` after `depth` others; None where it is elsewhere, too."""
        holder = self.find(page)
        if holder is None:
            return None
        index = depth - holder.start
        is_there = 0 <= index < len(holder.pages) and holder.pages[index] == page
        return holder if is_there else None

    def num_new(self, pages: Sequence[PageHash]) -> int:
        """How many there are before the first that is here already or comes twice.

        Raises ValueError for a hash of a wrong size.
        """
        join_hashes(pages)
        if len(new := set(pages)) == len(pages) and self._ids.keys().isdisjoint(new):
            return len(pages)
        seen: set[PageHash] = set()
        for index, page in enumerate(pages):
            if page in seen or page in self._ids:
                return index
            seen.add(page)
        return len(pages)

    def put(self, holder: H) -> None:
        """It has its pages from now on, whoever had them before."""
        id = next(self._new_ids)
        self._holders[id] = holder
        self._ids.update(dict.fromkeys(holder.pages, id))

    def remove(self, holder: H) -> None:
        """Forget its pages."""
        ids = self._ids
        del self._holders[ids[holder.pages[0]]]
        for page in holder.pages:
            del ids[page]
