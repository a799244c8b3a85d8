"""The structure of the tree: nodes, the index of their pages, and how they split and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cachetree.entries import Node, Recency
from cachetree.ids import PageHash, Span


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive pages of one node, counted from the node's first."""

    node: Node
    pages: Span


class PageTrie:
    """A path-compressed trie over page hashes. It knows nothing of budgets and takes no lock.

    A page hash covers every page before it, so a page lies at one place only, and an index finds
    it without a walk. Pages that contradict this (a broken advert) are never put in.
    """

    def __init__(self) -> None:
        self.root: Final = Node(None, ())
        self.recency: Final = Recency()
        self._node_of: dict[PageHash, Node] = {}

    def find(self, page: PageHash) -> Node | None:
        return self._node_of.get(page)

    def depth(self, page: PageHash) -> int:
        """How many pages stand before `page`, which must be in the trie."""
        node = self._node_of[page]
        return node.start + node.pages.index(page)

    def after(self, parent: PageHash | None, pages: Sequence[PageHash]) -> Iterator[Piece]:
        """The pieces that hold the longest prefix of `pages` found right after `parent`."""
        if parent is None:
            return self._pieces(self.root, 0, pages)
        node = self._node_of[parent]
        return self._pieces(node, node.pages.index(parent) + 1, pages)

    def anywhere(self, pages: Sequence[PageHash]) -> Iterator[Piece]:
        """The pieces that hold the longest prefix of `pages`, wherever its first page is."""
        node = self._node_of.get(pages[0]) if pages else None
        return iter(()) if node is None else self._pieces(node, node.pages.index(pages[0]), pages)

    def _pieces(self, node: Node, index: int, pages: Sequence[PageHash]) -> Iterator[Piece]:
        offset = 0
        while offset < len(pages):
            if index == len(node.pages):
                child = node.children.get(pages[offset])
                if child is None:
                    return
                node, index = child, 0
            num = node.num_common(index, pages, offset)
            if not num:
                return
            yield Piece(node, Span(index, index + num))
            offset += num
            index += num

    def cover(self, parent: PageHash | None, pages: Sequence[PageHash]) -> list[Node]:
        """Nodes that hold exactly `pages` after `parent`, split off or made as needed.

        Ends early before a page that is already elsewhere in the trie or comes twice.
        """
        if not pages:
            return []
        node = self.root
        if parent is not None:
            node = self._node_of[parent]
            self.split(node, node.pages.index(parent) + 1)
        nodes: list[Node] = []
        offset = 0
        while offset < len(pages):
            child = node.children.get(pages[offset])
            if child is None:
                return nodes + self._grow(node, pages[offset:])
            num = child.num_common(0, pages, offset)
            self.split(child, num)
            nodes.append(child)
            node = child
            offset += num
        return nodes

    def _grow(self, parent: Node, pages: Sequence[PageHash]) -> list[Node]:
        fresh = dict.fromkeys(pages)
        num = next(
            (i for i, page in enumerate(fresh) if page in self._node_of or page != pages[i]),
            len(fresh),
        )
        if not num:
            return []
        node = Node(parent, pages[:num])
        parent.children[node.pages[0]] = node
        self._index(node)
        return [node]

    def split(self, node: Node, index: int) -> Node:
        """The node that starts at page `index` of `node`, which is cut there where it must be."""
        if index in (0, len(node.pages)):
            return node
        tail = node.split(index, self.recency)
        self._index(tail)
        return tail

    def prune(self, node: Node) -> None:
        """Take `node` out if nobody has an entry in it."""
        if node.is_empty and node.parent is not None:
            del node.parent.children[node.pages[0]]
            for page in node.pages:
                del self._node_of[page]

    def _index(self, node: Node) -> None:
        self._node_of.update(dict.fromkeys(node.pages, node))
