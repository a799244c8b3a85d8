"""What the tree consists of: nodes, and the entries in them: the KV of a model, or E of one layer.

E is an entry like KV, under a key of its own, and as KV it is in a node only with all that is above
it. So the last node with an entry says how far that part of the model reaches.
"""

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


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Local pages that came or went; what a worker advertises.

    Additions name the parent before its children do, removals children before their parent, so
    a reader that applies them in order always sees whole prefixes.
    """

    added: bool
    model: ModelId
    part: Part = KV
    parent: PageHash | None
    """The page before the first of `pages`; None at the root."""
    pages: tuple[PageHash, ...]

    def slice(self, pages: Span) -> Change:
        """Of some of the pages, counted from the first."""
        if len(pages) == len(self.pages):
            return self
        return Change(  # In a fifth of the time that `replace` takes.
            added=self.added,
            model=self.model,
            part=self.part,
            parent=self.pages[pages.start - 1] if pages.start else self.parent,
            pages=self.pages[pages.start : pages.stop],
        )

    def slices(self, num_pages: int) -> Iterator[Change]:
        """One after the other, each of so many of the pages, the last one of those that remain."""
        for start in range(0, len(self.pages), num_pages):
            yield self.slice(Span(start, min(start + num_pages, len(self.pages))))


class Hold:
    """Keeps the local entries of a run of pages; a lease, a reservation or a pin owns each one.

    Page `stop`, counted from the root, is the first one after the run: where a held node is split
    there, the tail goes free. What stands before the run stays anyway, as eviction is leaf first.
    """

    __slots__ = ("entries", "stop", "until_s")

    def __init__(self, stop: int, until_s: float = inf) -> None:
        self.stop: Final = stop
        self.until_s: Final = until_s
        """When it ends by itself."""
        self.entries: set[LocalEntry] = set()

    def add(self, entry: LocalEntry) -> None:
        self.entries.add(entry)
        entry.holds |= {self}


_NOBODY: Final[frozenset[Hold]] = frozenset()


class RemoteEntry:
    """What is said to be elsewhere of all pages of one node."""

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
        """What has the pages there; only the location knows it."""
        self.order: Final = order
        """Of one location, the coldest first; those with children need not be in it."""
        self.num_children = 0
        """Child nodes that have an entry of the same key."""

    @property
    def parent(self) -> RemoteEntry | None:
        above = self.node.parent
        return above.remote.get(self.key) if above else None

    def change(self, *, added: bool) -> Change:
        """Its pages come, or go."""
        return _change(self.node, *self.key[1:], added=added)

    def use(self) -> None:
        self.order[self] = None
        self.order.move_to_end(self)

    def split(self, tail: Node) -> RemoteEntry:
        """That of the node which is cut off this one's."""
        entry = RemoteEntry(tail, self.key, self.order, self.source)
        entry.num_children, self.num_children = self.num_children, 1
        if self in self.order:
            entry.use()
        return entry


class LocalEntry:
    """KV or E of one node in this process's memory: pages `[first, first + node.num_pages)` of the
    slab.

    E hangs on two: on E of the node above, and on the KV beside it, which leaves after it.
    """

    __slots__ = ("first", "holds", "key", "last_use", "node", "num_children", "slab", "used_at_s")

    def __init__(self, node: Node, key: LocalKey, slab: Slab, first: int) -> None:
        self.node: Final = node
        self.key: Final = key
        self.slab: Final = slab
        self.first: Final = first
        self.num_children = 0
        """Entries that hang on it."""
        self.holds: frozenset[Hold] = _NOBODY
        # The eviction's: the number of the last walk that ended here, or below in what has since
        # been evicted; and when, where there is a time to live.
        self.last_use = 0
        self.used_at_s = 0.0

    @property
    def parents(self) -> list[LocalEntry]:
        """What it hangs on, the KV beside it first."""
        model, part = self.key
        above = self.node.parent
        found = [] if part == KV else [self.node.local[model, KV]]
        if above is not None and self.key in above.local:
            found.append(above.local[self.key])
        return found

    def change(self, *, added: bool) -> Change:
        """Its pages come, or go."""
        return _change(self.node, *self.key, added=added)

    @property
    def pages(self) -> Span:
        """Which pages of the slab they are."""
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
    """Consecutive pages, and who has them.

    Every entry covers all of them. The keys in a child are a subset of its parent's: a match is
    prefix-closed for each key, so a node without entries has no children.
    """

    __slots__ = ("children", "local", "num_pages", "pages", "parent", "remote", "start")

    def __init__(self, parent: Node | None, pages: tuple[PageHash, ...]) -> None:
        self.parent = parent
        self.pages = pages
        self.num_pages = len(pages)
        self.start: int = parent.stop if parent else 0
        """How many pages stand before this node."""
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
        """How many leading pages this node from page `index` on and `pages[offset:]` share."""
        theirs = pages[offset : offset + self.num_pages - index]
        ours = self.pages[index : index + len(theirs)]
        if ours == theirs:
            return len(ours)
        return next(at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)

    def walk(self) -> Iterator[Node]:
        """The nodes below this one, parents before children; any of them may be taken out."""
        pending = list(self.children.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node

    def bottom_up(self, goes_below: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
        """This node and those below it, children before parents.

        As it goes on, any of them may be taken out or split.
        """
        pending = [(self, -1)]
        while pending:
            node, num_pages = pending.pop()
            # Its children came before it, and none was cut off; or they are not asked for.
            if num_pages == node.num_pages or not goes_below(node):
                yield node
            else:
                pending.append((node, node.num_pages))
                pending += [(it, -1) for it in node.children.values()]

    def cut(self, num_pages: int) -> None:
        """Keep the first pages only."""
        self.pages, self.num_pages = self.pages[:num_pages], num_pages

    def split(self, index: int) -> Node:
        """Cut before page `index`; this node keeps the head, the tail is returned.

        Storage is divided by arithmetic, nothing is copied. The caller tells the index and the
        eviction policy.
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
