"""Consecutive pages in one piece of memory, 16 bytes each."""

from __future__ import annotations

from bisect import bisect_right, insort_right
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from cachetree.ids import PAGE_HASH_BYTES, PageHash

NO_PAGES: Final[frozenset[PageHash]] = frozenset()


class Part(Protocol):
    """What covers pages of a run, from page `first` of it on; `start` pages stand before."""

    first: int
    num_pages: int

    @property
    def start(self) -> int: ...


P = TypeVar("P", bound=Part)


class Run(Generic[P]):
    """Pages that came into the trie together. Nodes cover parts of it and are cut by arithmetic.

    Pages that are no node's any more stay until they are the greater part.
    """

    __slots__ = ("hashes", "id", "nodes", "num_indexed_pages", "spilled")

    def __init__(self, hashes: bytes, id: int) -> None:
        self.hashes = hashes
        self.id: Final = id
        """Given by the index."""
        self.spilled: frozenset[PageHash] = NO_PAGES
        """The index's: pages for which its table had no room."""
        self.nodes: list[P] = []
        """In the order of their pages."""
        self.num_indexed_pages = len(self)

    def __len__(self) -> int:
        return len(self.hashes) // PAGE_HASH_BYTES

    def page(self, index: int) -> PageHash:
        return PageHash(self.hashes_of(index, index + 1))

    def hashes_of(self, start: int, stop: int) -> bytes:
        return self.hashes[start * PAGE_HASH_BYTES : stop * PAGE_HASH_BYTES]

    def index_of(self, page: PageHash) -> int:
        """Which of the pages it is; -1 where it is none of them."""
        at = self.hashes.find(page)
        while at % PAGE_HASH_BYTES:  # Found across two pages; -1 has a remainder too.
            if at < 0:
                return -1
            at = self.hashes.find(page, at + 1)
        return at // PAGE_HASH_BYTES

    def node_at(self, index: int) -> P | None:
        """The node that covers page `index`; None where it has gone, or for -1."""
        at = bisect_right(self.nodes, index, key=_first) - 1
        if at < 0:
            return None
        node = self.nodes[at]
        return node if index < node.first + node.num_pages else None

    def node_with(self, page: PageHash, depth: int) -> P | None:
        """The node in which `page` stands after `depth` others; None where it does not."""
        at = bisect_right(self.nodes, depth, key=_start) - 1
        if at < 0:
            return None
        node = self.nodes[at]
        index = depth - node.start
        is_there = index < node.num_pages and self.has(page, node.first + index)
        return node if is_there else None

    def has(self, page: PageHash, index: int) -> bool:
        return self.hashes.startswith(page, index * PAGE_HASH_BYTES)

    def add(self, node: P) -> None:
        insort_right(self.nodes, node, key=_first)

    def drop(self, node: P) -> None:
        self.nodes.remove(node)

    def compact(self) -> None:
        """Drop the pages that are no node's if they are the greater part."""
        if 2 * self.num_indexed_pages >= len(self):
            return
        self.hashes = b"".join(
            [self.hashes_of(node.first, node.first + node.num_pages) for node in self.nodes]
        )
        first = 0
        for node in self.nodes:
            node.first = first
            first += node.num_pages


_first: Final = attrgetter("first")
_start = attrgetter("start")


def num_common_pages(ours: bytes, theirs: bytes) -> int:
    """How many leading pages of two equally long runs are the same."""
    if ours == theirs:
        return len(ours) // PAGE_HASH_BYTES
    same, different = 0, len(ours) // PAGE_HASH_BYTES
    while different - same > 1:
        middle = (same + different) // 2
        part = slice(same * PAGE_HASH_BYTES, middle * PAGE_HASH_BYTES)
        if ours[part] == theirs[part]:
            same = middle
        else:
            different = middle
    return same
