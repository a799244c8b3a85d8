"""Where a page is: a dict to the run of pages that it came with, and bisection in its nodes.

A page costs its key, 8 bytes in its run, and a place in one flat dict; neither refers to anything
that garbage collection would follow. A split changes a run's nodes and no page's place.
"""

from __future__ import annotations

from bisect import bisect_right, insort_right
from collections.abc import Sequence
from itertools import chain, count
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from cachetree.ids import PageHash
from cachetree.tree.hashing import join_hashes


class Part(Protocol):
    """What covers pages of a run, from page `first` of it on; `start` pages stand before."""

    first: int
    num_pages: int
    start: int


P = TypeVar("P", bound=Part)

_first: Final = attrgetter("first")
_start: Final = attrgetter("start")


class Run(Generic[P]):
    """Pages that came into the trie together. Nodes cover parts of it and are cut by arithmetic.

    Pages that are no node's any more stay until they are the greater part.
    """

    __slots__ = ("id", "nodes", "num_indexed_pages", "pages")

    def __init__(self, pages: Sequence[PageHash], id: int) -> None:
        self.pages = tuple(pages)
        self.id: Final = id
        """Given by the index."""
        self.nodes: list[P] = []
        """In the order of their pages."""
        self.num_indexed_pages = len(self)

    def __len__(self) -> int:
        return len(self.pages)

    def pages_of(self, part: Part) -> tuple[PageHash, ...]:
        return self.pages[part.first : part.first + part.num_pages]

    def node_at(self, index: int) -> P:
        """The node that covers page `index`, which is indexed."""
        return self.nodes[bisect_right(self.nodes, index, key=_first) - 1]

    def node_with(self, page: PageHash, depth: int) -> P | None:
        """The node in which `page` stands after `depth` others; None where it does not."""
        at = bisect_right(self.nodes, depth, key=_start) - 1
        if at < 0:
            return None
        node = self.nodes[at]
        index = depth - node.start
        is_there = index < node.num_pages and self.pages[node.first + index] == page
        return node if is_there else None

    def add(self, node: P) -> None:
        insort_right(self.nodes, node, key=_first)

    def drop(self, node: P) -> None:
        self.nodes.remove(node)

    def compact(self) -> None:
        """Drop the pages that are no node's if they are the greater part."""
        if 2 * self.num_indexed_pages >= len(self):
            return
        self.pages = tuple(chain.from_iterable([self.pages_of(node) for node in self.nodes]))
        first = 0
        for node in self.nodes:
            node.first = first
            first += node.num_pages


class PageIndex(Generic[P]):
    """Finds the run that holds a page. Takes no lock.

    Values are numbers of runs and not runs, so that the dict holds nothing that garbage collection
    has to look at, however many pages there are.
    """

    def __init__(self) -> None:
        self._run_ids: dict[PageHash, int] = {}
        self._runs: dict[int, Run[P]] = {}
        self._new_ids = count(1)

    def find(self, page: PageHash) -> tuple[P, int] | None:
        """The node that holds `page`, and which page of the node's run it is."""
        run_id = self._run_ids.get(page)
        if run_id is None:
            return None
        run = self._runs[run_id]
        index = run.pages.index(page)
        return run.node_at(index), index

    def find_at(self, page: PageHash, depth: int) -> P | None:
        """The node that holds `page` after `depth` others; None where it is elsewhere, too."""
        run_id = self._run_ids.get(page)
        return None if run_id is None else self._runs[run_id].node_with(page, depth)

    def add(self, pages: Sequence[PageHash]) -> Run[P] | None:
        """Index a new run of `pages`, up to the first that is here already or comes twice."""
        join_hashes(pages)  # Raises ValueError.
        run: Run[P] = Run(pages, next(self._new_ids))
        new = dict.fromkeys(pages, run.id)
        if len(new) < len(pages) or not self._run_ids.keys().isdisjoint(new):
            num_new = self._num_new(pages)
            return self.add(pages[:num_new]) if num_new else None
        self._runs[run.id] = run
        self._run_ids.update(new)
        return run

    def remove(self, parts: Sequence[tuple[Run[P], int, int]]) -> None:
        """Forget pages `[start, stop)` of each run, and runs with their last page."""
        for run, start, stop in parts:
            for page in run.pages[start:stop]:
                del self._run_ids[page]
            run.num_indexed_pages -= stop - start
            if not run.num_indexed_pages:
                del self._runs[run.id]

    def _num_new(self, pages: Sequence[PageHash]) -> int:
        """How many of the first of `pages` are new."""
        seen: set[PageHash] = set()
        for index, page in enumerate(pages):
            if page in seen or page in self._run_ids:
                return index
            seen.add(page)
        return len(pages)
