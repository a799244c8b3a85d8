"""Entries that are here: how they come in, within what budget, and how they go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cachetree.ids import ModelId, Span
from cachetree.memory import Slab
from cachetree.tree.entries import LocalEntry, Node
from cachetree.tree.eviction import Eviction
from cachetree.tree.holds import Holds
from cachetree.tree.lease import Reservation
from cachetree.tree.listeners import ChangeListeners
from cachetree.tree.trie import PageTrie, depth_of


@dataclass(eq=False)
class LocalEntries:
    """Puts them into the nodes of a tree and takes them out. Takes no lock."""

    _trie: PageTrie
    _eviction: Eviction
    _holds: Holds
    _listeners: ChangeListeners
    _host_bytes: int
    num_bytes: int = field(default=0, init=False)
    """Open reservations included; never above the budget."""
    num_pages: Counter[ModelId] = field(default_factory=Counter, init=False)
    num_evictions: int = field(default=0, init=False)

    def begin(self, reservation: Reservation) -> bool:
        """Evict until what it will hold fits; where it cannot, nothing goes, and it has ended. Its
        `end` follows."""
        self._holds.open.add(reservation)
        too_many = self.num_bytes + reservation.slab.num_bytes - self._host_bytes
        if too_many > 0:
            if not self._holds.leave(self._host_bytes):
                self._holds.open.discard(reservation)
                self._holds.let_go(reservation)
                return False
            self.evict_bytes(too_many)
        self.num_bytes += reservation.slab.num_bytes
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
            self._holds.let_go(reservation)
            for span in (*kept, Span(num_pages, num_pages)):
                if at < span.start:
                    self.num_bytes -= reservation.slab.drop_pages(Span(at, span.start))
                at = span.stop
        return gained

    def evict_bytes(self, num_bytes: int) -> int:
        """So many at least, those to go first first; less only where no more can go. Returns how
        many were freed."""
        num_freed = 0
        for entry in self._eviction.victims():
            num_freed += self.take_out(entry)
            if num_freed >= num_bytes:
                break
        return num_freed

    def take_out(self, entry: LocalEntry) -> int:
        """Evict it; returns the bytes freed."""
        self._listeners.evicted(entry)
        node, parent = entry.node, entry.parent
        if parent is not None:
            parent.num_children -= 1
        self._eviction.remove(entry, parent)
        self.num_evictions += 1
        del node.local[entry.model]
        self.num_pages[entry.model] -= node.num_pages
        num_freed = entry.slab.drop_pages(entry.pages)
        self.num_bytes -= num_freed
        self._trie.prune(node)
        return num_freed

    def _publish(self, reservation: Reservation, kept: list[Span]) -> Sequence[LocalEntry]:
        """As `_put`, of the reserved pages."""
        change = reservation.change
        model, trie = change.model, self._trie
        place = None if change.parent is None else trie.find_local(model, change.parent)
        last = trie.last_with(model, place, change.pages, change.e_layers)
        first = depth_of(last) - depth_of(place)
        new = change.part(Span(first, len(change.pages)))
        nodes = trie.cover(last, new.pages, lambda node: bool(node.local))
        gained = self._put(nodes, model, reservation.slab, first, kept)
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
                for lease in self._holds.leases & entry.holds:
                    lease.keep(entry.slab)
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
