"""Where a page is: a dict to the number of the node that has it.

A page costs its key, 8 bytes in its node, and a place in one flat dict; neither refers to anything
that garbage collection would follow, however many pages there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from cachetree.ids import PageHash
from cachetree.tree.entries import Node
from cachetree.tree.hashing import join_hashes


class PageIndex:
    """Finds the node that has a page. Takes no lock."""

    def __init__(self) -> None:
        self._ids: dict[PageHash, int] = {}
        self._nodes: dict[int, Node] = {}
        self._new_ids = count(1)

    def find(self, page: PageHash) -> Node | None:
        id = self._ids.get(page)
        return None if id is None else self._nodes[id]

    def find_at(self, page: PageHash, depth: int) -> Node | None:
        """The node that has `page` after `depth` others; None where it is elsewhere, too."""
        node = self.find(page)
        if node is None:
            return None
        index = depth - node.start
        is_there = 0 <= index < len(node.pages) and node.pages[index] == page
        return node if is_there else None

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

    def put(self, node: Node) -> None:
        """It has its pages from now on, whoever had them before."""
        id = next(self._new_ids)
        self._nodes[id] = node
        self._ids.update(dict.fromkeys(node.pages, id))

    def remove(self, node: Node) -> None:
        """Forget its pages."""
        ids = self._ids
        del self._nodes[ids[node.pages[0]]]
        for page in node.pages:
            del ids[page]
