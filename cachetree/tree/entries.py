"""Nodes of the tree, and their entries. An entry is a model's KV, or E of one layer, in a node."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import inf
from typing import Final

import msgspec

from cachetree.ids import KV, Location, ModelId, PageHash, Part, Span
from cachetree.memory import Slab

LocalKey = tuple[ModelId, Part]
RemoteKey = tuple[Location, ModelId, Part]
EntryKey = tuple[ModelId, PageHash, Part]
"""Model, last page and part of an entry."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Addition or removal of pages of one model. A worker advertises its tree's changes to peers.

    Additions come parents first, and removals children first. So a reader that applies changes in
    order always sees whole prefixes.
    """

    added: bool
    model: ModelId
    part: Part = KV
    parent: PageHash | None
    """Page before the first of `pages`. None: they begin a prompt."""
    pages: tuple[PageHash, ...]

    @property
    def key(self) -> EntryKey:
        """Key of the entry that has these pages."""
        return self.model, self.pages[-1], self.part

    def slice(self, pages: Span) -> Change:
        """Return the same change for only some of its pages. Page 0 is the change's first page."""
        if len(pages) == len(self.pages):
            return self
        return Change(  # five times as fast as `replace`
            added=self.added,
            model=self.model,
            part=self.part,
            parent=self.pages[pages.start - 1] if pages.start else self.parent,
            pages=self.pages[pages.start : pages.stop],
        )

    def slices(self, num_pages: int) -> Iterator[Change]:
        """Cut the change into parts of `num_pages` pages, and yield them in order. The last part
        may have fewer pages."""
        for start in range(0, len(self.pages), num_pages):
            yield self.slice(Span(start, min(start + num_pages, len(self.pages))))


class Hold:
    """Protection of local entries from eviction. Each lease, reservation and pin is a hold.

    `stop` is the number of pages from the root to the end of the held pages. If a held node is
    split at `stop`, its second part is no longer held. Pages above the held pages stay as well,
    because eviction begins with the leaves.
    """

    __slots__ = ("entries", "stop", "until_s")

    def __init__(self, stop: int, until_s: float = inf) -> None:
        self.stop: Final = stop
        self.until_s: Final = until_s
        """Time at which the hold ends by itself."""
        self.entries: set[LocalEntry] = set()

    def add(self, entry: LocalEntry) -> None:
        self.entries.add(entry)
        entry.holds |= {self}


_NOBODY: Final[frozenset[Hold]] = frozenset()


class RemoteEntry:
    """Claim that a location has all pages of one node, for one model and part."""

    __slots__ = ("key", "node", "num_children", "order", "source")

    def __init__(
        self,
        node: Node,
        key: RemoteKey,
        order: OrderedDict[RemoteEntry, None],
        source: object = None,
    ) -> None:
        self.node: Final = node
        self.key: Final = key
        self.source: Final = source
        """Object with which the location finds these pages, such as a file. The tree does not read
        it."""
        self.order: Final = order
        """Entries of this location, least recently used first; some with children are missing."""
        self.num_children = 0
        """Number of child nodes that have an entry of the same key."""

    @property
    def parent(self) -> RemoteEntry | None:
        above = self.node.parent
        return above.remote.get(self.key) if above else None

    def change(self, *, added: bool) -> Change:
        """Return the change that adds or removes the entry's pages."""
        return _change(self.node, *self.key[1:], added=added)

    def use(self) -> None:
        self.order[self] = None
        self.order.move_to_end(self)

    def split(self, tail: Node) -> RemoteEntry:
        """Return a new entry for `tail`, the second part of a divided node."""
        entry = RemoteEntry(tail, self.key, self.order, self.source)
        entry.num_children, self.num_children = self.num_children, 1
        if self in self.order:
            entry.use()
        return entry


class LocalEntry:
    """KV or E of one node's pages, in this process's memory. The pages are `[first, first +
    node.num_pages)` of a slab.

    An entry of KV has one parent: KV of the node above, if present. An entry of E has two parents:
    E of the node above, if present, and KV of its own node. A parent is evicted after its children.
    """

    __slots__ = ("first", "holds", "key", "last_use", "node", "num_children", "slab", "used_at_s")

    def __init__(self, node: Node, key: LocalKey, slab: Slab, first: int) -> None:
        self.node: Final = node
        self.key: Final = key
        self.slab: Final = slab
        self.first: Final = first
        self.num_children = 0
        """Number of entries with this entry as a parent."""
        self.holds: frozenset[Hold] = _NOBODY
        # `Eviction` sets the number of the entry's last use, and its time if there is a time to
        # live. Uses of children that were evicted since count, too.
        self.last_use = 0
        self.used_at_s = 0.0

    @property
    def parents(self) -> list[LocalEntry]:
        """Entries that must not be evicted before this one. KV of the same node is first."""
        model, part = self.key
        above = self.node.parent
        parents = [] if part == KV else [self.node.local[model, KV]]
        if above is not None and self.key in above.local:
            parents.append(above.local[self.key])
        return parents

    def change(self, *, added: bool) -> Change:
        """Return the change that adds or removes the entry's pages."""
        return _change(self.node, *self.key, added=added)

    @property
    def pages(self) -> Span:
        """Numbers of the entry's pages in its slab. The slab's first page is 0."""
        return Span(self.first, self.first + self.node.num_pages)

    @property
    def is_evictable(self) -> bool:
        return not (self.num_children or self.holds)

    @property
    def num_bytes(self) -> int:
        return self.node.num_pages * self.slab.layout.page_bytes


def _change(node: Node, model: ModelId, part: Part, *, added: bool) -> Change:
    return Change(added=added, model=model, part=part, parent=node.parent_page, pages=node.pages)


class Node:
    """Consecutive pages of prompts, and the entries that cover all of these pages."""

    __slots__ = ("children", "local", "num_pages", "pages", "parent", "remote", "start")

    def __init__(self, parent: Node | None, pages: tuple[PageHash, ...]) -> None:
        self.parent = parent
        self.pages = pages
        self.num_pages = len(pages)
        self.start: int = parent.stop if parent else 0
        """Number of pages before this node."""
        self.children: dict[PageHash, Node] = {}
        self.local: dict[LocalKey, LocalEntry] = {}
        self.remote: dict[RemoteKey, RemoteEntry] = {}

    @property
    def stop(self) -> int:
        return self.start + self.num_pages

    @property
    def parent_page(self) -> PageHash | None:
        return self.parent.pages[-1] if self.parent and self.parent.pages else None

    def num_common(self, index: int, pages: tuple[PageHash, ...], offset: int) -> int:
        """Compare this node's pages from `index` on with `pages[offset:]`. Return how many are
        equal before the first difference."""
        theirs = pages[offset : offset + self.num_pages - index]
        ours = self.pages[index : index + len(theirs)]
        if ours == theirs:
            return len(ours)
        return next(at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)

    def walk(self) -> Iterator[Node]:
        """Yield the nodes below this one, parents before children. The caller may remove nodes
        meanwhile."""
        pending = list(self.children.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node

    def bottom_up(self, goes_below: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
        """Yield this node and those below it, children before parents. If `goes_below` is false for
        a node, skip all nodes below it. The caller may remove or split nodes meanwhile."""
        pending = [(self, -1)]
        while pending:
            node, num_pages = pending.pop()
            # Yield a node if the caller does not want its children. Otherwise yield them first,
            # and again if the caller has split the node meanwhile.
            if num_pages == node.num_pages or not goes_below(node):
                yield node
            else:
                pending.append((node, node.num_pages))
                pending += [(it, -1) for it in node.children.values()]

    def cut(self, num_pages: int) -> None:
        """Keep only the first `num_pages` pages."""
        self.pages, self.num_pages = self.pages[:num_pages], num_pages

    def split(self, index: int) -> Node:
        """Cut the node before page `index`. Keep the first part; return the second as a new node.

        Both parts' entries share the slabs; nothing is copied. The caller updates the index of
        pages and the eviction's queue.
        """
        children = self.children
        tail_pages = self.pages[index:]
        self.cut(index)
        tail = Node(self, tail_pages)
        tail.children, self.children = children, {tail_pages[0]: tail}
        for child in children.values():
            child.parent = tail
        tail.remote = {key: entry.split(tail) for key, entry in self.remote.items()}
        for key, head in self.local.items():
            entry = tail.local[key] = LocalEntry(tail, key, head.slab, head.first + index)
            entry.num_children, head.num_children = head.num_children, 1
            for hold in head.holds:
                if hold.stop > tail.start:
                    hold.add(entry)
        for model, part in self.local:
            if part != KV:
                self.local[model, KV].num_children += 1
        return tail
