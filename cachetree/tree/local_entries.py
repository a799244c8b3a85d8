"""Entries that are here: how they come in, within what budget, and how they go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cachetree.ids import ModelId, Span
from cachetree.memory import Slab
from cachetree.tree.entries import Hold, LocalEntry, Node
from cachetree.tree.eviction import Eviction
from cachetree.tree.holds import Holds
from cachetree.tree.lease import Reservation
from cachetree.tree.listeners import ChangeListeners
from cachetree.tree.remote_entries import RemoteEntries
from cachetree.tree.trie import PageTrie, depth_of


@dataclass(eq=False)
class LocalEntries:
    """Puts them into the nodes of a tree and takes them out. Takes no lock."""

    _trie: PageTrie
    _eviction: Eviction
    _holds: Holds
    _listeners: ChangeListeners
    _remote: RemoteEntries
    _host_bytes: int
    num_bytes: int = field(default=0, init=False)
    """Open reservations included; never above the budget."""
    num_pages: Counter[ModelId] = field(default_factory=Counter, init=False)
    num_evictions: int = field(default=0, init=False)

    def begin(self, reservation: Reservation) -> bool:
        """Make room for what it will hold; where there is none, it has ended. Its `end` follows."""
        self._holds.open.add(reservation)
        num_bytes = reservation.slab.num_bytes
        if not self._make_room(num_bytes):
            self._holds.open.discard(reservation)
            self.let_go(reservation)
            return False
        self.num_bytes += num_bytes
        return True

    def end(self, reservation: Reservation, is_commit: bool) -> Sequence[LocalEntry]:
        """Publish what it holds, or nothing of it, and give back the rest. Returns what gained E,
        below which the caller spreads it."""
        gained: Sequence[LocalEntry] = ()
        if not reservation.pages:
            return gained
        self._holds.open.discard(reservation)
        num_pages, at = len(reservation.pages), 0
        kept: list[Span] = []
        try:
            if is_commit:
                gained = self._publish(reservation, kept)
        finally:
            self.let_go(reservation)
            for span in (*kept, Span(num_pages, num_pages)):
                if at < span.start:
                    self.num_bytes -= reservation.slab.drop_pages(Span(at, span.start))
                at = span.stop
        return gained

    def let_go(self, hold: Hold) -> None:
        for entry in hold.clear():
            if entry.is_evictable:
                self._eviction.free(entry)

    def evict(
        self, victims: Iterator[LocalEntry], is_enough: Callable[[], bool] = lambda: False
    ) -> int:
        """One after the other until it is enough; returns the bytes freed."""
        before = self.num_bytes
        evicted: list[Node] = []
        while not is_enough() and (entry := next(victims, None)) is not None:
            evicted.append(entry.node)
            self._take_out(entry)
        self._trie.prune(evicted)
        return before - self.num_bytes

    def evict_bytes(self, num_bytes: int) -> int:
        """So many at least, those to go first first; less only where no more can go."""
        enough = self.num_bytes - num_bytes
        return self.evict(self._eviction.victims(), lambda: self.num_bytes <= enough)

    def _publish(self, reservation: Reservation, kept: list[Span]) -> Sequence[LocalEntry]:
        """As `_put`, of the reserved pages."""
        change = reservation.change
        place = None if change.parent is None else self._trie.find(change.parent)
        last = self._trie.last_with(change.model, place, change.pages, change.e_layers)
        first = depth_of(last) - depth_of(place)
        new = change.part(Span(first, len(change.pages)))
        nodes = self._trie.cover(new.parent, new.pages)
        while self._remote.give_way(new.pages[sum(node.num_pages for node in nodes) :]):
            nodes = self._trie.cover(new.parent, new.pages)
        gained = self._put(nodes, change.model, reservation.slab, first, kept)
        for span in kept:
            self._listeners.published(change.part(span))
        return gained

    def _put(
        self, nodes: Sequence[Node], model: ModelId, slab: Slab, offset: int, kept: list[Span]
    ) -> Sequence[LocalEntry]:
        """Give consecutive nodes the pages of a slab from `offset` on, where they have no better.

        `kept` is told which of its pages they took, in order; no two of the spans touch. Returns
        those that have more E than before.
        """
        gained: list[LocalEntry] = []
        added: list[LocalEntry] = []
        for node in nodes:
            entry = node.local.get(model)
            span = Span(offset, offset + node.num_pages)
            offset = span.stop
            if entry is None:
                entry = node.local[model] = LocalEntry(node, model, slab, span.start)
                if entry.parent is not None:
                    entry.parent.num_children += 1
                self.num_pages[model] += node.num_pages
                added.append(entry)
            elif entry.gains(slab.layout.e_layers):
                self._holds.keep_for_readers(entry)
                self.num_bytes -= entry.slab.drop_pages(entry.pages)
                entry.replace(slab, span.start)
                gained.append(entry)
            else:
                continue
            if kept and kept[-1].stop == span.start:
                span = Span(kept.pop().start, span.stop)
            kept.append(span)
        for entry in gained:
            if entry.is_evictable:
                self._eviction.free(entry)
        if gained:
            self._holds.count_pinned()
        if added:
            self._eviction.add(added)
        elif gained:
            self._eviction.use(gained[-1:])
        return gained

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until the `num_bytes` of a new, open reservation fit; nothing where they cannot."""
        if self.num_bytes + num_bytes <= self._host_bytes:
            return True
        if not self._holds.leave(self._host_bytes):
            return False
        self.evict_bytes(self.num_bytes + num_bytes - self._host_bytes)
        return True

    def _take_out(self, entry: LocalEntry) -> None:
        """The caller prunes the node."""
        self._listeners.evicted(entry)
        parent = entry.parent
        if parent is not None:
            parent.num_children -= 1
        self._eviction.remove(entry, parent)
        self.num_evictions += 1
        del entry.node.local[entry.model]
        self.num_pages[entry.model] -= entry.node.num_pages
        self.num_bytes -= entry.slab.drop_pages(entry.pages)
