"""The tree's structure: its nodes, and an index of their pages. One walk finds the longest cached
prefix of a prompt, for all models and locations at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Final, NamedTuple

from cachetree.ids import KV, LOCAL, Location, ModelId, PageHash, Span
from cachetree.memory import Slab
from cachetree.planning import Match
from cachetree.tree.entries import LocalEntry, LocalKey, Node, RemoteEntry, RemoteKey
from cachetree.tree.eviction import Eviction
from cachetree.tree.hashing import join_hashes

Has = Callable[[Node], bool]
"""Function that returns whether a node has an entry with the wanted key."""


class Place(NamedTuple):
    """Pages `[start, stop)` of one node. Page 0 is the node's first page."""

    node: Node
    start: int
    stop: int

    def in_slab(self, key: LocalKey) -> tuple[Slab, Span]:
        """Return the memory (slab) of the local entry with `key`, and these pages' span in it."""
        entry = self.node.local[key]
        return entry.slab, Span(entry.first + self.start, entry.first + self.stop)


class PageIndex:
    """Index from a page to the nodes that have it. The caller holds the tree's lock.

    Each page takes memory for its hash, 8 bytes in its node, and one item in a flat dict of node
    numbers. Garbage collection does not visit the pages. Contradictory adverts put a page into
    several nodes; only such pages take more memory.
    """

    def __init__(self) -> None:
        self._ids: dict[PageHash, int] = {}
        self._more: dict[PageHash, list[int]] = {}
        """Numbers of further nodes, for pages in several nodes. `_ids` has the first node."""
        self._nodes: dict[int, Node] = {}
        self._new_ids = count(1)

    def find(self, page: PageHash, has: Has | None = None) -> Node | None:
        """Return the first node with `page`. With `has`, skip nodes for which it is false."""
        id = self._ids.get(page)
        if id is None:
            return None
        node = self._nodes[id]
        if has is None or has(node):
            return node
        return next(filter(has, self._others(page)), None)

    def find_at(self, page: PageHash, depth: int, has: Has | None = None) -> Node | None:
        """Find a node as `find` does, but only one with `page` as page `depth` of the prompt."""
        id = self._ids.get(page)  # A call of `find` would take a third longer.
        if id is None:
            return None
        node = self._nodes[id]
        if _is_at(node, page, depth) and (has is None or has(node)):
            return node
        others = (it for it in self._others(page) if _is_at(it, page, depth))
        return next(filter(has, others), None)

    def put_new(self, node: Node) -> None:
        """Add a node. No page may be in it twice. Raises ValueError for a page hash of the wrong
        size."""
        join_hashes(node.pages)
        id = next(self._new_ids)
        self._nodes[id] = node
        new = dict.fromkeys(node.pages, id)
        if not self._ids.keys().isdisjoint(new):
            for page in [it for it in node.pages if it in self._ids]:
                self._more.setdefault(page, []).append(id)
                del new[page]
        self._ids.update(new)

    def split(self, head: Node, tail: Node) -> None:
        """Note that `tail` was cut off the end of `head`. The shorter node gets a new number."""
        id, new_id = self._id_of(head), next(self._new_ids)
        long, short = (head, tail) if head.num_pages > tail.num_pages else (tail, head)
        self._nodes[id], self._nodes[new_id] = long, short
        pages: Sequence[PageHash] = short.pages
        if self._more:
            for page in self._more.keys() & pages:
                self._more[page] = [new_id if it == id else it for it in self._more[page]]
            pages = [page for page in pages if self._ids[page] == id]
        self._ids.update(dict.fromkeys(pages, new_id))

    def remove(self, node: Node) -> None:
        """Forget `node` and its pages."""
        id = self._id_of(node)
        del self._nodes[id]
        for page in node.pages:
            if page not in self._more:
                del self._ids[page]
                continue
            ids = [it for it in (self._ids[page], *self._more.pop(page)) if it != id]
            self._ids[page] = ids[0]
            if ids[1:]:
                self._more[page] = ids[1:]

    def num_free(self, pages: Sequence[PageHash], node: Node | None, is_own: Has) -> int:
        """Return how many leading `pages` one node may have, because no other node for which
        `is_own` is true has them. `node` has `pages`, or is None for a new node."""
        known = self._ids if node is None else self._more
        if not known.keys().isdisjoint(pages):
            for at, page in enumerate(pages):
                if page in known and self.find(page, lambda it: it is not node and is_own(it)):
                    return at
        return len(pages)

    def _others(self, page: PageHash) -> Iterator[Node]:
        return map(self._nodes.__getitem__, self._more.get(page, ()))

    def _id_of(self, node: Node) -> int:
        page = node.pages[0]
        ids = [self._ids[page], *self._more.get(page, [])]
        return next(id for id in ids if self._nodes[id] is node)


def _is_at(node: Node, page: PageHash, depth: int) -> bool:
    index = depth - node.start
    return 0 <= index < len(node.pages) and node.pages[index] == page


class PageTrie:
    """Trie over page hashes: each node has a run of pages. The caller holds the tree's lock.

    A page hash covers all earlier pages of the prompt. So a page has one right place, and an index
    finds that place without a walk. A wrong advert may put the page into a second place, under
    other keys. Methods with `has` find the place with the wanted key, which is unique.
    """

    def __init__(self, eviction: Eviction) -> None:
        self.root: Final = Node(None, ())
        self._eviction = eviction
        self._index = PageIndex()

    def find(self, page: PageHash, has: Has) -> Place | None:
        """Return the place of `page` in the node for which `has` is true."""
        node = self._index.find(page, has)
        if node is None:
            return None
        # Usually `page` is the node's last page, because new pages follow it.
        index = node.num_pages - 1 if node.pages[-1] == page else node.pages.index(page)
        return Place(node, index, index + 1)

    def longest_prefix(
        self,
        pages: Sequence[PageHash],
        has: Has | None = None,
        parent: Place | None = None,
    ) -> Place | None:
        """Return the last place of the longest prefix of `pages` that the tree has directly after
        `parent`. Return `parent` if the tree lacks even the first page.

        `has` limits the search to nodes for which it is true. It must then also be true for all
        nodes above them. A search with a `parent` needs a `has` that is true only for nodes with
        local entries.

        The hashes in `pages` are trusted: each covers the pages before it. So one page in its right
        place proves all earlier ones, and a binary search finds the last such page. Adverts are not
        trusted: a page that follows other pages than in `pages` does not count.
        """
        node: Node | None = None
        first, num_found, stop = depth_of(parent), 0, len(pages)
        probe = stop - 1
        while num_found < stop:
            at = self._index.find_at(pages[probe], first + probe, has)
            if at is None:
                stop = probe
            else:
                node, num_found = at, probe + 1
            probe = (num_found + stop) // 2
        if node is None:
            return parent
        if not self._is_after(node, pages):
            return self.compared_prefix(pages, has, parent)
        stop = first + num_found - node.start
        return Place(node, max(0, stop - num_found), stop)

    def _is_after(self, node: Node, pages: Sequence[PageHash]) -> bool:
        """Return whether the nodes from the root to `node` have the right pages. `node` has one of
        `pages`.

        Only the first and last pages of nodes are compared. Entries that were computed or stored
        here are trusted. So in a node with a local entry, one right page proves all earlier ones.
        Other nodes were only advertised, and there both ends must be right. This is enough, because
        a location has no two nodes with the same first page.
        """
        while not node.local and (above := node.parent) is not None:
            at = node.start
            if node.pages[0] != pages[at] or (at and above.pages[-1] != pages[at - 1]):
                return False
            node = above
        return True

    def compared_prefix(
        self,
        pages: Sequence[PageHash],
        has: Has | None = None,
        parent: Place | None = None,
    ) -> Place | None:
        """Search as `longest_prefix` does, but trust no hash in `pages`: compare every page."""
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
        return Place(node, max(0, index - num), index) if num else parent

    def path_anywhere(self, pages: Sequence[PageHash], has: Has) -> list[Place]:
        """Return the places of the longest run of leading `pages` in the tree, in order. The first
        page may be anywhere in the tree. Only nodes for which `has` is true count."""
        first = self.find(pages[0], has) if pages else None
        if first is None:
            return []
        before = first._replace(stop=first.start)
        return list(upwards(self.compared_prefix(pages, has, before), depth_of(before)))[::-1]

    def find_local(self, key: LocalKey, page: PageHash) -> Place | None:
        return self.find(page, lambda node: key in node.local)

    def bottom_up(self, pages: Sequence[PageHash]) -> Iterator[Node]:
        """Yield all nodes below the prefix `pages`, children before parents. Then yield the
        prefix's last node and its ancestors, the nearest first.

        Yield nothing if the tree lacks one of `pages`. The caller may remove or split nodes
        meanwhile.
        """
        last = self.compared_prefix(pages)
        if depth_of(last) < len(pages):
            return
        top = last.node if last else self.root
        yield from top.bottom_up()
        while top.parent is not None:
            top = top.parent
            yield top

    def cover(self, parent: Place | None, pages: Sequence[PageHash], is_own: Has) -> list[Node]:
        """Return the chain of nodes directly after `parent` that holds `pages` and no other page.
        Split or make nodes as needed.

        The chain ends early before a page that is in `pages` twice. It also ends before a page that
        another node has, if `is_own` is true for that node.
        """
        if not pages:
            return []
        node, pages = self.root, _without_repeats(pages)
        if parent is not None:
            node = parent.node
            self.split(node, parent.stop)
        nodes: list[Node] = []
        offset = 0
        while offset < len(pages):
            child = node.children.get(pages[offset])
            if child is None:
                new = Node(node, pages[offset:])
                new.cut(self._index.num_free(new.pages, None, is_own))
                if new.pages:
                    self._index.put_new(new)
                    node.children[new.pages[0]] = new
                    nodes.append(new)
                break
            num_common = child.num_common(0, pages, offset)
            num = self._index.num_free(child.pages[:num_common], child, is_own)
            if num:
                self.split(child, num)
                nodes.append(child)
            if num < num_common:
                break
            node = child
            offset += num
        return nodes

    def split(self, node: Node, index: int) -> Node:
        """Cut `node` before page `index`. Return the second part, or `node` if nothing was cut."""
        if index in (0, node.num_pages):
            return node
        tail = node.split(index)
        self._index.split(node, tail)
        for key, entry in tail.local.items():
            self._eviction.split(node.local[key], entry)
            if entry.is_evictable:
                self._eviction.free(entry)
        return tail

    def prune(self, node: Node) -> None:
        """Remove `node` if it has no entry left."""
        if not (node.local or node.remote):
            assert node.parent is not None
            del node.parent.children[node.pages[0]]
            self._index.remove(node)


def _without_repeats(pages: Sequence[PageHash]) -> tuple[PageHash, ...]:
    """Return the pages before the first one that repeats an earlier page."""
    return tuple(
        page for page, new in zip(pages, dict.fromkeys(pages), strict=False) if page == new
    )


def depth_of(place: Place | None) -> int:
    """Return how many pages there are from the root to the end of `place`."""
    return 0 if place is None else place.node.start + place.stop


def nodes_to(place: Place | None) -> list[Node]:
    """Return the nodes from the first below the root to the node of `place`, in order."""
    nodes: list[Node] = []
    node = place.node if place else None
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def upwards(place: Place | None, depth: int) -> Iterator[Place]:
    """Yield the pages up to the end of `place`, except the first `depth` pages of the prompt. Each
    yielded place is in one node, the last node first."""
    while place is not None and place.node.start > depth:
        yield place
        above = place.node.parent
        place = Place(above, 0, above.num_pages) if above is not None else None
    if place is not None and depth_of(place) > depth:
        yield place._replace(start=depth - place.node.start)


def find_matches(
    trie: PageTrie, pages: Sequence[PageHash]
) -> tuple[list[Match], Collection[LocalEntry], Collection[RemoteEntry]]:
    """Return the longest prefix of `pages` for each model and location. Also return the local and
    the remote entries at which these prefixes end."""
    used: dict[LocalKey, LocalEntry] = {}
    known: dict[RemoteKey, RemoteEntry] = {}
    place = trie.longest_prefix(pages)
    if place is None:
        return [], (), ()
    num_kv: dict[ModelId, int] = {}
    num_e: dict[ModelId, dict[int, int]] = {}
    num_known: dict[RemoteKey, int] = {}
    top = trie.root.children[pages[0]]
    node, num_pages = place.node, depth_of(place)
    # Walk upwards, because a key in a node is in every node above it, too.
    while node.parent is not None:
        if len(node.local) > len(used):
            for key, entry in node.local.items():
                if used.setdefault(key, entry) is entry:
                    model, part = key
                    if part == KV:
                        num_kv[model] = num_pages
                    else:
                        num_e.setdefault(model, {})[part] = num_pages
        if len(node.remote) > len(known):
            for at, remote in node.remote.items():
                if known.setdefault(at, remote) is remote:
                    num_known[at] = num_pages
        if len(used) == len(top.local) and len(known) == len(top.remote):
            break
        node, num_pages = node.parent, node.start
    matches = [
        Match(model=model, location=LOCAL, num_pages=num, e_pages=num_e.get(model, {}))
        for model, num in num_kv.items()
    ]
    if num_known:
        matches += _remote_matches(num_known)
    return matches, used.values(), known.values()


def _remote_matches(num_known: Mapping[RemoteKey, int]) -> Iterator[Match]:
    """Yield the matches of remote locations. E counts only as far as KV reaches."""
    e_pages: defaultdict[tuple[Location, ModelId], dict[int, int]] = defaultdict(dict)
    for (location, model, part), num_pages in num_known.items():
        if part != KV:
            num_kv = num_known.get((location, model, KV), 0)
            e_pages[location, model][part] = min(num_pages, num_kv)
    for (location, model, part), num_pages in num_known.items():
        if part == KV:
            yield Match(
                model=model,
                location=location,
                num_pages=num_pages,
                e_pages=e_pages.get((location, model), {}),
            )
