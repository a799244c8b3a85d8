"""The structure of the tree: nodes, the index of their pages, and how they split and go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from cachetree.ids import ModelId, PageHash
from cachetree.tree.entries import Node
from cachetree.tree.eviction import Eviction
from cachetree.tree.page_index import PageIndex


class Place(NamedTuple):
    """Pages `[start, stop)` of one node, counted from the node's first."""

    node: Node
    start: int
    stop: int


class PageTrie:
    """A path-compressed trie over page hashes. It knows nothing of budgets and takes no lock.

    A page hash covers every page before it, so a page lies at one place only, and an index finds
    it without a walk. Pages that contradict this (a broken advert) are never put in.
    """

    def __init__(self, eviction: Eviction) -> None:
        self.root: Final = Node(None, ())
        self._eviction = eviction
        self._index = PageIndex()

    def find(self, page: PageHash) -> Place | None:
        """Where `page` is."""
        node = self._index.find(page)
        if node is None:
            return None
        # Mostly the last one, after which others come.
        index = node.num_pages - 1 if node.pages[-1] == page else node.pages.index(page)
        return Place(node, index, index + 1)

    def deepest(self, parent: Place | None, pages: Sequence[PageHash]) -> Place | None:
        """The end of the longest prefix of `pages` found right after `parent`; None if it is empty.

        A page lies at one place only, below all pages before it. So where one step to a child does
        not end the search, it goes on in the middle of what is left, and takes a number of steps
        that grows with the logarithm of the number of nodes. For the same reason the last page that
        a node shares speaks for those before it. `pages` are trusted to be a chain. What was
        advertised is not: a page that lies below others than `pages` is none that was found.
        """
        node, index = (self.root, 0) if parent is None else (parent.node, parent.stop)
        depth = node.start + index
        num_found, stop = 0, len(pages)
        place: Place | None = None
        while num_found < stop:
            if index == node.num_pages:
                child = node.children.get(pages[num_found])
                if child is None:
                    return place
                node, index = child, 0
            num = node.num_chained(index, pages, num_found)
            if not num:
                return place
            num_found += num
            index += num
            place = Place(node, index - num, index)
            if index < node.num_pages:
                return place
            probe = stop - 1 if stop == len(pages) else (num_found + stop) // 2
            while probe > num_found:
                found = self._index.find_at(pages[probe], depth + probe)
                if found is not None and _leads_to(found, node, pages, depth):
                    node, index = found, depth + probe - found.start
                    num_found = probe
                    break
                stop = probe
                probe = (num_found + stop) // 2
        return place

    def path(self, parent: Place | None, pages: Sequence[PageHash]) -> list[Place]:
        """The places that hold the longest prefix of `pages` found right after `parent`.

        Every page is compared, so it holds for any `pages`.
        """
        node, index = (self.root, 0) if parent is None else (parent.node, parent.stop)
        places: list[Place] = []
        offset, num_pages = 0, len(pages)
        while offset < num_pages:
            if index == node.num_pages:
                child = node.children.get(pages[offset])
                if child is None:
                    break
                node, index = child, 0
            num = node.num_common(index, pages, offset)
            if not num:
                break
            places.append(Place(node, index, index + num))
            offset += num
            index += num
        return places

    def path_anywhere(self, pages: Sequence[PageHash]) -> list[Place]:
        """As `path`, wherever the first page is."""
        first = self.find(pages[0]) if pages else None
        return [] if first is None else self.path(first._replace(stop=first.start), pages)

    def find_local(self, model: ModelId, page: PageHash) -> Place | None:
        place = self.find(page)
        return place if place is not None and model in place.node.local else None

    def last_local(
        self, model: ModelId, place: Place | None, pages: Sequence[PageHash]
    ) -> Place | None:
        """The end of the leading `pages` after `place` that the model has; `place` where none."""
        last = self.deepest(place, pages)
        if last is None:
            return place
        node, stop = last.node, last.stop
        while model not in node.local:
            if node.parent is None:
                return None
            node = node.parent
            stop = node.num_pages
        return Place(node, 0, stop) if node.num_pages else None

    def last_with(
        self,
        model: ModelId,
        place: Place | None,
        pages: Sequence[PageHash],
        e_layers: Collection[int],
    ) -> Place | None:
        """As `last_local`, but what comes before the first that storing it again would add E to."""
        last = above = self.last_local(model, place, pages)
        stop = depth_of(place)
        while e_layers and above is not None and depth_of(above) > stop:
            node = above.node
            up = node.parent if node.start > stop else None
            before = Place(up, 0, up.num_pages) if up is not None else place
            if node.local[model].gains(e_layers):
                last = before
            above = before
        return last

    def upwards(self, pages: Sequence[PageHash]) -> list[Node]:
        """The nodes of all prompts that begin with `pages`, then those above; children first."""
        place = self.deepest(None, pages)
        if depth_of(place) < len(pages):
            return []
        node = self.root if place is None else place.node
        nodes = list(node.walk())[::-1]
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes

    def cover(self, parent: PageHash | None, pages: Sequence[PageHash]) -> list[Node]:
        """Nodes that hold exactly `pages` after `parent`, split off or made as needed.

        Ends early before a page that is already elsewhere in the trie or comes twice. `parent`
        must be in the trie.
        """
        if not pages:
            return []
        node = self.root
        if parent is not None:
            place = self.find(parent)
            assert place is not None
            node = place.node
            self.split(node, place.stop)
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
        num_new = self._index.num_new(pages)
        if not num_new:
            return []
        node = Node(parent, tuple(pages[:num_new]))
        parent.children[pages[0]] = node
        self._index.put(node)
        return [node]

    def split(self, node: Node, index: int) -> Node:
        """The node that starts at page `index` of `node`, which is cut there where it must be."""
        if index in (0, node.num_pages):
            return node
        tail = node.split(index)
        self._index.put(tail)
        for model, entry in tail.local.items():
            self._eviction.split(node.local[model], entry)
            if entry.is_evictable:
                self._eviction.free(entry)
        return tail

    def prune(self, nodes: Iterable[Node]) -> None:
        """Take out those of `nodes` in which nobody has an entry."""
        for node in {node for node in nodes if node.is_empty}:
            assert node.parent is not None
            del node.parent.children[node.pages[0]]
            self._index.remove(node)


def _leads_to(below: Node, above: Node, pages: Sequence[PageHash], depth: int) -> bool:
    """Whether the nodes from `above`, which ends in `pages`, to `below`, which has one of them,
    have at both of their ends what belongs there.

    Who has the first page of a node has no other node in its place; who has the last one, where it
    is right, has all of the node right. `depth` pages stand before the first.
    """
    node, stop = below, above.stop
    while node.start > stop:
        at, parent = node.start - depth, node.parent
        assert parent is not None
        if node.pages[0] != pages[at] or parent.pages[-1] != pages[at - 1]:
            return False
        node = parent
    return node.parent is above and node.pages[0] == pages[node.start - depth]


def depth_of(place: Place | None) -> int:
    """How many pages there are from the root to the end of `place`."""
    return 0 if place is None else place.node.start + place.stop
