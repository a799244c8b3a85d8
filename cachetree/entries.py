"""What the tree consists of: nodes, the entries that models have in them, and their recency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cachetree.ids import Location, ModelId, PageHash, Span
from cachetree.slab import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest prefix that one model has at one location."""

    model: ModelId
    location: Location
    num_pages: int
    e_pages: Mapping[int, int]
    """For each layer with E: how many pages from the start have it without a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
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


class Hold:
    """Keeps the local entries of a run of pages; a lease or a reservation owns each one.

    Page `stop`, counted from the root, is the first one after the run: where a held node is split
    there, the tail goes free. What stands before the run stays anyway, as eviction is leaf first.
    """

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.entries: set[LocalEntry] = set()

    def add(self, entry: LocalEntry) -> None:
        self.entries.add(entry)
        entry.holds.add(self)

    def clear(self) -> None:
        for entry in self.entries:
            entry.holds.discard(self)
        self.entries.clear()


class LocalEntry:
    """One model's KV and E for all pages of one node, in this process's memory."""

    def __init__(self, node: Node, model: ModelId, segment: Segment) -> None:
        self.node = node
        self.model = model
        self.segment = segment
        self.num_children = 0
        """Child nodes in which the same model has a local entry."""
        self.holds: set[Hold] = set()
        self.older: LocalEntry | None = None
        self.newer: LocalEntry | None = None

    @property
    def e_layers(self) -> tuple[int, ...]:
        return self.segment.slab.layout.e_layers

    @property
    def is_evictable(self) -> bool:
        """Leaf first: nothing of the same model hangs below, and nobody reads it."""
        return not self.num_children and not self.holds

    def change(self, *, added: bool) -> Change:
        return Change(
            added=added,
            model=self.model,
            parent=self.node.parent_page,
            pages=tuple(self.node.pages),
            e_layers=self.e_layers,
        )


class Node:
    """A run of consecutive pages, `[start, stop)` counted from the root.

    Every entry covers all of the run. The entries of a child are a subset of its parent's: a
    match is prefix-closed for each (model, location), so a node without entries has no children.
    """

    def __init__(self, parent: Node | None, pages: Sequence[PageHash]) -> None:
        self.parent = parent
        self.start: int = parent.stop if parent else 0
        self.pages = list(pages)
        self.children: dict[PageHash, Node] = {}
        self.local: dict[ModelId, LocalEntry] = {}
        self.remote: dict[tuple[Location, ModelId], tuple[int, ...]] = {}
        """E layers of each remote entry."""

    @property
    def stop(self) -> int:
        return self.start + len(self.pages)

    @property
    def parent_page(self) -> PageHash | None:
        return self.parent.pages[-1] if self.parent and self.parent.pages else None

    @property
    def is_empty(self) -> bool:
        return not self.local and not self.remote

    def num_common(self, index: int, pages: Sequence[PageHash], offset: int) -> int:
        """How many leading pages `self.pages[index:]` and `pages[offset:]` share."""
        most = min(len(self.pages) - index, len(pages) - offset)
        ours, theirs = self.pages[index : index + most], list(pages[offset : offset + most])
        if ours == theirs:  # as a rule, and much faster than page by page
            return most
        return next(i for i in range(most) if ours[i] != theirs[i])

    def walk(self) -> Iterator[Node]:
        """The nodes below this one, parents before children; any of them may be taken out."""
        pending = list(self.children.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node

    def split(self, index: int, recency: Recency) -> Node:
        """Cut before page `index`; this node keeps the head, the tail is returned.

        Storage is divided by arithmetic, nothing is copied. The caller indexes the tail's pages.
        """
        tail = Node(None, self.pages[index:])
        tail.parent, tail.start = self, self.start + index
        tail.children, self.children = self.children, {tail.pages[0]: tail}
        for child in tail.children.values():
            child.parent = tail
        del self.pages[index:]
        tail.remote = dict(self.remote)
        for entry in self.local.values():
            self._split_entry(entry, index, tail, recency)
        return tail

    def _split_entry(self, head: LocalEntry, index: int, node: Node, recency: Recency) -> None:
        tail = LocalEntry(node, head.model, head.segment.part(Span(index, index + len(node.pages))))
        head.segment = head.segment.part(Span(0, index))
        tail.num_children, head.num_children = head.num_children, 1
        node.local[head.model] = tail
        recency.insert_before(tail, head)
        for hold in head.holds:
            if hold.stop > node.start:
                hold.add(tail)


class Recency:
    """Local entries from the least to the most recently used, as a linked list.

    A use touches the path from the deepest entry up to the root, so that of one model an entry
    always stands before its ancestors and leaf-first eviction takes from the front.
    """

    def __init__(self) -> None:
        self._oldest: LocalEntry | None = None
        self._newest: LocalEntry | None = None

    def __iter__(self) -> Iterator[LocalEntry]:
        entry = self._oldest
        while entry is not None:
            following = entry.newer
            yield entry
            entry = following

    def touch_path(self, entry: LocalEntry) -> None:
        """Mark `entry` and its ancestors as used now."""
        node: Node | None = entry.node
        while node is not None and node.pages:
            used = node.local[entry.model]
            self.remove(used)
            self.append(used)
            node = node.parent

    def append(self, entry: LocalEntry) -> None:
        entry.older, entry.newer = self._newest, None
        if self._newest is None:
            self._oldest = entry
        else:
            self._newest.newer = entry
        self._newest = entry

    def insert_before(self, entry: LocalEntry, other: LocalEntry) -> None:
        entry.older, entry.newer = other.older, other
        if other.older is None:
            self._oldest = entry
        else:
            other.older.newer = entry
        other.older = entry

    def remove(self, entry: LocalEntry) -> None:
        """Take `entry` out; an entry that is not in the list stays out."""
        if entry.older is not None:
            entry.older.newer = entry.newer
        elif self._oldest is entry:
            self._oldest = entry.newer
        if entry.newer is not None:
            entry.newer.older = entry.older
        elif self._newest is entry:
            self._newest = entry.older
        entry.older = entry.newer = None
