"""Entries that are here: how they come in, within what budget, and how they go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cachetree.ids import EMPTY_SPAN, KV, ModelId, Span
from cachetree.tree.entries import LocalEntry, LocalKey
from cachetree.tree.eviction import Eviction
from cachetree.tree.holds import Holds, Reservation
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
    """Of KV."""
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

    def end(self, reservation: Reservation, is_commit: bool) -> None:
        """Publish what it holds, or nothing of it, and give back the rest."""
        if not reservation.pages:
            return
        self._holds.open.discard(reservation)
        taken = EMPTY_SPAN
        try:
            if is_commit:
                taken = self._publish(reservation)
            if len(taken):
                self._listeners.published(reservation.change.slice(taken))
        finally:
            self._holds.let_go(reservation)
            for rest in (Span(0, taken.start), Span(taken.stop, len(reservation.pages))):
                self.num_bytes -= reservation.slab.drop_pages(rest)

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
        node, parents = entry.node, entry.parents
        for parent in parents:
            parent.num_children -= 1
        self._eviction.remove(entry, parents)
        self.num_evictions += 1
        del node.local[entry.key]
        self._count(entry.key, -node.num_pages)
        num_freed = entry.slab.drop_pages(entry.pages)
        self.num_bytes -= num_freed
        self._trie.prune(node)
        return num_freed

    def _publish(self, reservation: Reservation) -> Span:
        """Give nodes the reserved pages, but for those that are here by now; returns which of them
        they took."""
        change, trie = reservation.change, self._trie
        key, pages = (change.model, change.part), change.pages
        place = None if change.parent is None else trie.find_local(key, change.parent)
        last = trie.longest_prefix(pages, lambda node: key in node.local, place)
        start = stop = depth_of(last) - depth_of(place)
        added: list[LocalEntry] = []
        for node in trie.cover(last, pages[start:], lambda node: bool(node.local)):
            entry = node.local[key] = LocalEntry(node, key, reservation.slab, stop)
            for parent in entry.parents:
                parent.num_children += 1
            self._count(key, node.num_pages)
            added.append(entry)
            stop += node.num_pages
        if added:
            self._eviction.add(added[-1])
        return Span(start, stop)

    def _count(self, key: LocalKey, num_pages: int) -> None:
        model, part = key
        if part == KV:
            self.num_pages[model] += num_pages
