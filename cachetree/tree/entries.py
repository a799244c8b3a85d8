"""What the tree consists of: nodes, and the entries that models have in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf
from typing import Final, TypeVar

import msgspec

from cachetree.ids import Location, ModelId, PageHash, Span
from cachetree.memory import Slab

RemoteKey = tuple[Location, ModelId]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Local pages that came or went; what a worker advertises.

    Additions name the parent before its children do, removals children before their parent, so
    a reader that applies them in order always sees whole prefixes.
    """

    added: bool
    model: ModelId
    parent: PageHash | None
    """The page before the first of `pages`; None at the root."""
    pages: tuple[PageHash, ...]
    e_layers: tuple[int, ...]

    def part(self, pages: Span) -> Change:
        """Of some of the pages, counted from the first."""
        if len(pages) == len(self.pages):
            return self
        return Change(  # In a fifth of the time that `replace` takes.
            added=self.added,
            model=self.model,
            parent=self.pages[pages.start - 1] if pages.start else self.parent,
            pages=self.pages[pages.start : pages.stop],
            e_layers=self.e_layers,
        )

    def parts(self, num_pages: int) -> Iterator[Change]:
        """One after the other, each of so many of the pages, the last one of those that remain."""
        for start in range(0, len(self.pages), num_pages):
            yield self.part(Span(start, min(start + num_pages, len(self.pages))))


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


class EReach(msgspec.Struct, frozen=True):
    """How far E reaches from the root along a path, whose last node it belongs to."""

    whole: tuple[int, ...]
    """Layers with E of every page."""
    ended: Mapping[int, int]
    """Layers that have it for the first pages only, and for how many."""

    @classmethod
    def of(cls, e_layers: tuple[int, ...], above: EReach | None, start: int) -> EReach:
        """The reach of a node that has E of `e_layers`, stands after `start` pages and `above`."""
        if above is None:
            return cls(e_layers, {})
        if set(e_layers).issuperset(above.whole):
            return above
        whole = tuple([layer for layer in above.whole if layer in e_layers])
        ended = {layer: start for layer in above.whole if layer not in whole}
        return cls(whole, {**above.ended, **ended})

    def pages(self, num_pages: int) -> dict[int, int]:
        """For each layer, how many of the first `num_pages` have E; they end in this node."""
        return {**self.ended, **dict.fromkeys(self.whole, num_pages)}


_Entry = TypeVar("_Entry", bound="Entry")


class Entry(ABC):
    """What one model has at one place of all pages of one node."""

    __slots__ = ("e_layers", "e_reach", "model", "node", "num_children")

    def __init__(self, node: Node, model: ModelId, e_layers: tuple[int, ...]) -> None:
        self.node: Final = node
        self.model: Final = model
        self.num_children = 0
        """Child nodes in which the same model has one at the same place."""
        self.set_e(e_layers)

    @abstractmethod
    def at(self: _Entry, node: Node) -> _Entry | None:
        """That of the same model at the same place in another node."""

    def change(self, *, added: bool) -> Change:
        """Its pages come, or go."""
        return Change(
            added=added,
            model=self.model,
            parent=self.node.parent_page,
            pages=self.node.pages,
            e_layers=self.e_layers,
        )

    def line(self) -> list[Change]:
        """Entries of its model from the root to its node, as additions in order."""
        line, entry = [self.change(added=True)], self.parent
        while entry is not None:
            line.append(entry.change(added=True))
            entry = entry.parent
        return line[::-1]

    @property
    def parent(self: _Entry) -> _Entry | None:
        above = self.node.parent
        return self.at(above) if above else None

    def set_e(self, e_layers: tuple[int, ...]) -> None:
        """After that of the node above has its own."""
        above = self.parent
        self.e_layers = e_layers
        self.e_reach: EReach = EReach.of(
            e_layers, above.e_reach if above else None, self.node.start
        )


class RemoteEntry(Entry):
    """What is said to be elsewhere."""

    __slots__ = ("key", "order")

    def __init__(
        self,
        node: Node,
        key: RemoteKey,
        e_layers: tuple[int, ...],
        order: OrderedDict[RemoteEntry, None],
    ) -> None:
        self.key: Final = key
        self.order: Final = order
        """Of one location, the coldest first; those with children need not be in it."""
        super().__init__(node, key[1], e_layers)

    def at(self, node: Node) -> RemoteEntry | None:
        return node.remote.get(self.key)

    def use(self) -> None:
        self.order[self] = None
        self.order.move_to_end(self)

    def split(self, tail: Node) -> RemoteEntry:
        """That of the node which is cut off this one's."""
        entry = RemoteEntry(tail, self.key, self.e_layers, self.order)
        entry.num_children, self.num_children = self.num_children, 1
        if self in self.order:
            entry.use()
        return entry


class LocalEntry(Entry):
    """KV and E in this process's memory: pages `[first, first + node.num_pages)` of the slab."""

    __slots__ = ("first", "holds", "last_use", "slab", "used_at_s")

    def __init__(self, node: Node, model: ModelId, slab: Slab, first: int) -> None:
        self.slab = slab
        self.first = first
        super().__init__(node, model, slab.layout.e_layers)
        self.holds: frozenset[Hold] = _NOBODY
        # The eviction's: the number of the last walk that ended here, or below in what has since
        # been evicted; and when, where there is a time to live.
        self.last_use = 0
        self.used_at_s = 0.0

    def at(self, node: Node) -> LocalEntry | None:
        return node.local.get(self.model)

    def replace(self, slab: Slab, first: int) -> None:
        """Take the same pages from another slab; the caller then sees to `set_e` below."""
        self.slab = slab
        self.first = first
        self.set_e(slab.layout.e_layers)

    def gains(self, e_layers: Collection[int]) -> bool:
        """Whether storing its pages again with E at these layers adds some and loses none."""
        return set(self.e_layers) < set(e_layers)

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


class Node:
    """Consecutive pages, and who has them.

    Every entry covers all of them. The entries of a child are a subset of its parent's: a match is
    prefix-closed for each (model, location), so a node without entries has no children.
    """

    __slots__ = ("children", "local", "num_pages", "pages", "parent", "remote", "start")

    def __init__(self, parent: Node | None, pages: tuple[PageHash, ...]) -> None:
        self.parent = parent
        self.pages = pages
        self.num_pages = len(pages)
        self.start: int = parent.stop if parent else 0
        """How many pages stand before this node."""
        self.children: dict[PageHash, Node] = {}
        self.local: dict[ModelId, LocalEntry] = {}
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
        for head in self.local.values():
            entry = LocalEntry(tail, head.model, head.slab, head.first + index)
            tail.local[head.model] = entry
            entry.num_children, head.num_children = head.num_children, 1
            for hold in head.holds:
                if hold.stop > tail.start:
                    hold.add(entry)
        return tail
