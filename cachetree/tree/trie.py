"""The structure of the tree: nodes, the index of their pages, how they split and go, and the walk
that says for all models and locations at once who has the longest prefix of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

from cachetree.ids import LOCAL, Location, ModelId, PageHash
from cachetree.planning import Match
from cachetree.tree.entries import EReach, LocalEntry, Node, RemoteEntry, RemoteKey
from cachetree.tree.eviction import Eviction
from cachetree.tree.hashing import join_hashes


class Place(NamedTuple):
    """Pages `[start, stop)` of one node, counted from the node's first."""

    node: Node
    start: int
    stop: int


class PageIndex:
    """Finds the node that has a page. Takes no lock.

    A page costs its key, 8 bytes in its node, and a place in one flat dict, from it to the number
    of the node; neither refers to anything that garbage collection would follow, however many pages
    there are.
    """

    def __init__(self) -> None:
        self._ids: dict[PageHash, int] = {}
        self._nodes: dict[int, Node] = {}
        self._new_ids = count(1)

    def find(self, page: PageHash) -> Node | None:
        id = self._ids.get(page)
        return None if id is None else self._nodes[id]

    def find_at(self, page: PageHash, depth: int) -> Node | None:
        """The node that has `page` after `depth` others; None where it is elsewhere, too."""
        id = self._ids.get(page)  # Not by `find`, which makes it dearer by a third.
        if id is None:
            return None
        node = self._nodes[id]
        index = depth - node.start
        is_there = 0 <= index < len(node.pages) and node.pages[index] == page
        return node if is_there else None

    def put_new(self, node: Node) -> int:
        """It has its leading pages up to the first that is here already or comes twice; how many.

        Raises ValueError for a hash of a wrong size.
        """
        pages, id = node.pages, next(self._new_ids)
        join_hashes(pages)
        new = dict.fromkeys(pages, id)
        if len(new) < len(pages) or not self._ids.keys().isdisjoint(pages):
            new = {}
            for page in pages:
                if page in new or page in self._ids:
                    break
                new[page] = id
        if new:
            self._nodes[id] = node
            self._ids.update(new)
        return len(new)

    def split(self, head: Node, tail: Node) -> None:
        """`tail` was cut off `head`: the shorter of the two takes a new number."""
        id, new_id = self._ids[head.pages[0]], next(self._new_ids)
        long, short = (head, tail) if head.num_pages > tail.num_pages else (tail, head)
        self._nodes[id], self._nodes[new_id] = long, short
        self._ids.update(dict.fromkeys(short.pages, new_id))

    def remove(self, node: Node) -> None:
        """Forget its pages."""
        ids = self._ids
        del self._nodes[ids[node.pages[0]]]
        for page in node.pages:
            del ids[page]


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

    def deepest(
        self,
        pages: Sequence[PageHash],
        has: Callable[[Node], bool] | None = None,
        parent: Place | None = None,
    ) -> Place | None:
        """The end of the longest prefix of `pages`, right after `parent`; None where it is empty.

        Only nodes count that `has` is true of, if it is given; then it is of all above them, too.
        With a `parent` it has to be given, and to be true of what is local alone.

        `pages` are trusted to be a chain, so a page that is in its place says that all before it
        are, and the last such page is found by halving, whatever nodes they are in. What was
        advertised is not trusted: a page that lies below others than `pages` is none that was
        found.
        """
        node: Node | None = None
        first, num_found, stop = depth_of(parent), 0, len(pages)
        probe = stop - 1
        while num_found < stop:
            found = self._index.find_at(pages[probe], first + probe)
            if found is None or (has and not has(found)):
                stop = probe
            else:
                node, num_found = found, probe + 1
            probe = (num_found + stop) // 2
        if node is None or not self._is_after(node, pages):
            return self.last(pages, has, parent)
        stop = first + num_found - node.start
        return Place(node, max(0, stop - num_found), stop)

    def _is_after(self, node: Node, pages: Sequence[PageHash]) -> bool:
        """Whether the nodes from the root to `node`, in which one of `pages` was found, have at
        both of their ends what belongs there.

        What is in a node here was computed here or stored as the exact KV of its pages, and so is
        all above it: one page of it that is right says that all before are. Of what was only
        advertised, who has the first page of a node has no other node in its place; who has the
        last one, where it is right, has all of the node right.
        """
        while not node.local and (above := node.parent) is not None:
            at = node.start
            if node.pages[0] != pages[at] or (at and above.pages[-1] != pages[at - 1]):
                return False
            node = above
        return True

    def last(
        self,
        pages: Sequence[PageHash],
        has: Callable[[Node], bool] | None = None,
        parent: Place | None = None,
    ) -> Place | None:
        """As `deepest`; every page is compared, so that it holds for any."""
        node, index = (self.root, 0) if parent is None else (parent.node, parent.stop)
        pages, num = tuple(pages), 0
        while num < len(pages):
            if index == node.num_pages:
                child = node.children.get(pages[num])
                if child is None or (has and not has(child)):
                    break
                node, index = child, 0
            num_here = node.num_common(index, pages, num)
            if not num_here:
                break
            num += num_here
            index += num_here
        return Place(node, max(0, index - num), index) if num else None

    def path_anywhere(self, pages: Sequence[PageHash]) -> list[Place]:
        """The places that hold the longest prefix of `pages`, wherever the first of them is."""
        first = self.find(pages[0]) if pages else None
        if first is None:
            return []
        before = first._replace(stop=first.start)
        return list(upwards(self.last(pages, None, before), depth_of(before)))[::-1]

    def find_local(self, model: ModelId, page: PageHash) -> Place | None:
        place = self.find(page)
        return place if place is not None and model in place.node.local else None

    def last_with(
        self,
        model: ModelId,
        place: Place | None,
        pages: Sequence[PageHash],
        e_layers: Collection[int],
    ) -> Place | None:
        """The end of the leading `pages` after `place` that the model has, up to the first that
        storing it again would add E to; `place` where there are none."""
        stop = depth_of(place)
        if not pages or self._index.find_at(pages[0], stop) is None:
            return place  # As mostly, at one look.
        # Without E no page between the two ends is looked up, so that they need not be compared.
        find = self.last if e_layers else self.deepest
        last = find(pages, lambda node: model in node.local, place) or place
        nodes = [it.node for it in upwards(last, stop)] if e_layers else []
        starts = [node.start for node in nodes if node.local[model].gains(e_layers)]
        if not starts:
            return last
        return self.find(pages[starts[-1] - stop - 1]) if starts[-1] > stop else place

    def bottom_up(self, pages: Sequence[PageHash]) -> Iterator[Node]:
        """The nodes of all prompts that begin with `pages`, then those above; children first.

        As it goes on, any of them may be taken out or split.
        """
        last = self.last(pages)
        if depth_of(last) < len(pages):
            return
        top = last.node if last else self.root
        yield from top.bottom_up()
        while top.parent is not None:
            top = top.parent
            yield top

    def cover(self, parent: PageHash | None, pages: Sequence[PageHash]) -> list[Node]:
        """Nodes that hold exactly `pages` after `parent`, split off or made as needed.

        Ends early before a page that is already elsewhere in the trie or comes twice. `parent`
        must be in the trie.
        """
        if not pages:
            return []
        node, pages = self.root, tuple(pages)
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
                new = Node(node, pages[offset:])
                new.cut(self._index.put_new(new))
                if new.pages:
                    node.children[new.pages[0]] = new
                    nodes.append(new)
                break
            num = child.num_common(0, pages, offset)
            self.split(child, num)
            nodes.append(child)
            node = child
            offset += num
        return nodes

    def split(self, node: Node, index: int) -> Node:
        """The node that starts at page `index` of `node`, which is cut there where it must be."""
        if index in (0, node.num_pages):
            return node
        tail = node.split(index)
        self._index.split(node, tail)
        for model, entry in tail.local.items():
            self._eviction.split(node.local[model], entry)
            if entry.is_evictable:
                self._eviction.free(entry)
        return tail

    def prune(self, node: Node) -> None:
        """It has lost an entry, and goes with the last one."""
        if not (node.local or node.remote):
            assert node.parent is not None
            del node.parent.children[node.pages[0]]
            self._index.remove(node)


def depth_of(place: Place | None) -> int:
    """How many pages there are from the root to the end of `place`."""
    return 0 if place is None else place.node.start + place.stop


def upwards(place: Place | None, depth: int) -> Iterator[Place]:
    """All pages from the root to the end of `place` but the first `depth`, node by node."""
    while place is not None and place.node.start > depth:
        yield place
        above = place.node.parent
        place = Place(above, 0, above.num_pages) if above is not None else None
    if place is not None and depth_of(place) > depth:
        yield place._replace(start=depth - place.node.start)


def find_matches(
    trie: PageTrie, pages: Sequence[PageHash]
) -> tuple[list[Match], Collection[LocalEntry], Collection[RemoteEntry]]:
    """The longest prefix of `pages` per (model, location), and the entries where they end."""
    found: list[Match] = []
    used: dict[ModelId, LocalEntry] = {}
    known: dict[RemoteKey, RemoteEntry] = {}
    place = trie.deepest(pages)
    if place is None:
        return found, (), ()
    top = trie.root.children[pages[0]]
    node, num_pages = place.node, depth_of(place)
    # Upwards: whoever has an entry in a node has one in every node above it.
    while node.parent is not None:
        if len(node.local) > len(used):
            for model, entry in node.local.items():
                if model not in used:
                    used[model] = entry
                    found.append(_match(LOCAL, model, num_pages, entry.e_reach))
        if len(node.remote) > len(known):
            for key, remote in node.remote.items():
                if key not in known:
                    known[key] = remote
                    found.append(_match(*key, num_pages, remote.e_reach))
        if len(used) == len(top.local) and len(known) == len(top.remote):
            break
        node, num_pages = node.parent, node.start
    return found, used.values(), known.values()


def _match(location: Location, model: ModelId, num_pages: int, e_reach: EReach) -> Match:
    return Match(
        model=model, location=location, num_pages=num_pages, e_pages=e_reach.pages(num_pages)
    )
