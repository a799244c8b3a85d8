"""The prefix tree of one family: which model has the KV and E of which pages, and where."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile
from typing import Final

from cachetree.clock import Clock, Deadline
from cachetree.entries import Change, Hold, LocalEntry, Match, Node
from cachetree.family import Family
from cachetree.ids import LOCAL, Location, ModelId, PageHash, Span
from cachetree.lease import Lease, Reservation
from cachetree.slab import Layout, Segment, Slab
from cachetree.staging import Allocate, pageable
from cachetree.trie import PageTrie, Piece

Listener = Callable[[Change], None]


class CacheTree:
    """Radix tree over page hashes, with the entries of all models of one family in its nodes.

    Thread-safe: one lock, held for walks and bookkeeping, never while memory is allocated or
    copied. Local bytes, reservations in flight included, never exceed `host_bytes`. Eviction is
    leaf first, least recently used first, and takes whole nodes of one model; leased pages and
    those under an open reservation stay. Remote entries hold no bytes and are never evicted.
    """

    def __init__(
        self,
        family: Family,
        *,
        host_bytes: int,
        allocate: Allocate = pageable,
        clock: Clock = time.monotonic,
    ) -> None:
        self.family: Final = family
        self.host_bytes: Final = host_bytes
        self._allocate = allocate
        self._clock = clock
        self._lock = threading.Lock()
        self._trie = PageTrie()
        self._recency = self._trie.recency
        self._leases: set[Lease] = set()
        self._open: set[Reservation] = set()
        self._listeners: list[Listener] = []
        self._num_bytes = 0
        self._num_pages = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held now, reservations in flight included."""
        return self._num_bytes

    @property
    def num_pages(self) -> int:
        """Local pages, counted once per model."""
        return self._num_pages

    # Local entries: always the exact KV of their model.

    def reserve(
        self,
        model: ModelId,
        parent: PageHash | None,
        pages: Sequence[PageHash],
        e_layers: Collection[int],
    ) -> Reservation | None:
        """Room for KV of all layers and E at `e_layers` of consecutive pages after `parent`.

        Pages that the model already has are skipped. None where the budget cannot take the rest
        even after eviction, or where the model has no entry at `parent` (None is the root): such
        pages could never match.
        """
        for layer in e_layers:
            if not 0 <= layer < self.family.num_layers:
                raise ValueError(f"E at layer {layer} of a model of {self.family.num_layers}")
        with self._lock:
            self._sweep()
            if parent is not None and not self._has_local(model, parent):
                return None
            skipped = self._num_present(model, parent, pages)
            before = pages[skipped - 1] if skipped else parent
            new = tuple(pages[skipped:])
            slab = Slab(Layout.of(self.family, len(new), sorted(set(e_layers))))
            hold = Hold(0 if before is None else self._trie.depth(before) + 1)
            reservation = Reservation(model, before, new, skipped, slab, hold, self._end)
            if not new:
                return reservation
            if before is not None:
                for piece in self._trie.anywhere([before]):
                    hold.add(piece.node.local[model])
            self._open.add(reservation)
            if not self._make_room(slab.num_bytes):
                self._open.discard(reservation)
                hold.clear()
                return None
            self._num_bytes += slab.num_bytes
        try:
            slab.fill(self._allocate)
        except BaseException:
            reservation.release()
            raise
        return reservation

    def lease(
        self, model: ModelId, pages: Sequence[PageHash], owner: str, deadline: Deadline
    ) -> Lease | None:
        """Keep consecutive local pages of `model` for a reader; None when any of them is gone.

        `pages` may start anywhere in the tree. The lease ends at `deadline` at the latest.
        """
        with self._lock:
            pieces = self._pieces_of(model, self._trie.anywhere(pages))
            if sum(len(piece.pages) for piece in pieces) < len(pages):
                return None
            hold = Hold(self._trie.depth(pages[-1]) + 1 if pages else 0)
            for piece in pieces:
                hold.add(piece.node.local[model])
            if pieces:
                self._recency.touch_path(pieces[-1].node.local[model])
            segments = [piece.node.local[model].segment.part(piece.pages) for piece in pieces]
            lease = Lease(segments, hold, owner, deadline, self._end_lease)
            self._leases.add(lease)
            return lease

    def sweep(self) -> None:
        """Drop leases past their deadline."""
        with self._lock:
            self._sweep()

    def clear(self) -> None:
        """Drop all local entries but those that a lease or an open reservation keeps."""
        with self._lock:
            self._evict_until(lambda: False)

    # All entries.

    def match(self, pages: Sequence[PageHash]) -> list[Match]:
        """The longest prefix of `pages` per (model, location), found in one walk."""
        with self._lock:
            found: dict[tuple[Location, ModelId], _Progress] = {}
            used: dict[ModelId, LocalEntry] = {}
            for piece in self._trie.after(None, pages):
                num_pages = len(piece.pages)
                for model, entry in piece.node.local.items():
                    used[model] = entry
                    found.setdefault((LOCAL, model), _Progress()).add(num_pages, entry.e_layers)
                for key, e_layers in piece.node.remote.items():
                    found.setdefault(key, _Progress()).add(num_pages, e_layers)
            for entry in used.values():
                self._recency.touch_path(entry)
        return [progress.match(*key) for key, progress in found.items()]

    # Remote entries: what workers have advertised.

    def add_remote(
        self,
        location: Location,
        model: ModelId,
        parent: PageHash | None,
        pages: Sequence[PageHash],
        e_layers: Collection[int],
    ) -> None:
        """Note that `location` has these consecutive pages after `parent`.

        Pages whose parent it has not advertised, or that contradict the tree, could never match
        and are left out.
        """
        if location == LOCAL:
            raise ValueError("local pages are reserved and committed, not advertised")
        key = (location, model)
        with self._lock:
            if parent is not None:
                node = self._trie.find(parent)
                if node is None or key not in node.remote:
                    return
            for node in self._trie.cover(parent, pages):
                node.remote[key] = tuple(sorted(set(e_layers)))

    def drop_remote(self, location: Location, model: ModelId, pages: Sequence[PageHash]) -> None:
        """Forget these pages at `location` and, so that matches stay prefixes, all after them."""
        key = (location, model)
        with self._lock:
            for page in pages:
                node = self._trie.find(page)
                if node is not None and key in node.remote:
                    index = node.pages.index(page)
                    self._drop_remote(self._trie.split(node, index), key)
                    return

    def forget(self, location: Location) -> None:
        """Forget everything at `location`."""
        with self._lock:
            for node in reversed(list(self._trie.root.walk())):
                for key in [key for key in node.remote if key[0] == location]:
                    del node.remote[key]
                self._trie.prune(node)

    # Changes of local entries, for the advertiser.

    def subscribe(self, listener: Listener) -> tuple[list[Change], Callable[[], None]]:
        """What is there now, as additions, and a function that ends the subscription.

        `listener` gets every later change, none twice and none missed. It is called under the
        tree's lock by whichever thread made the change: it must not block, raise or call the tree.
        """
        with self._lock:
            self._listeners.append(listener)
            now = [
                entry.change(added=True)
                for node in self._trie.root.walk()
                for entry in node.local.values()
            ]

        def unsubscribe() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return now, unsubscribe

    # Everything below is called with the lock held, but for the two `_end` functions.

    def _end(self, reservation: Reservation, is_commit: bool) -> None:
        with self._lock:
            if not reservation.pages:
                return
            self._open.discard(reservation)
            num_kept = self._publish(reservation) if is_commit else 0
            reservation.hold.clear()
            self._drop_pages(reservation.slab, len(reservation.pages) - num_kept)

    def _end_lease(self, lease: Lease) -> None:
        with self._lock:
            self._leases.discard(lease)
            lease.is_over = True
            lease.hold.clear()

    def _sweep(self) -> None:
        for lease in [lease for lease in self._leases if lease.deadline.at_s <= self._clock()]:
            self._leases.discard(lease)
            lease.is_over = True
            lease.hold.clear()

    def _publish(self, reservation: Reservation) -> int:
        """Make entries of the reserved pages; returns how many pages they keep."""
        model = reservation.model
        first = self._num_present(model, reservation.parent, reservation.pages)
        pages = reservation.pages[first:]
        parent = reservation.pages[first - 1] if first else reservation.parent
        nodes = self._trie.cover(parent, pages)
        offset = first
        for node in nodes:
            stop = offset + len(node.pages)
            entry = LocalEntry(node, model, Segment(reservation.slab, Span(offset, stop)))
            node.local[model] = entry
            if node.parent is not None and node.parent.pages:
                node.parent.local[model].num_children += 1
            offset = stop
        num_kept = offset - first
        self._num_pages += num_kept
        if nodes:
            self._recency.touch_path(nodes[-1].local[model])
            change = Change(
                added=True,
                model=model,
                parent=parent,
                pages=pages[:num_kept],
                e_layers=reservation.slab.layout.e_layers,
            )
            self._notify(change)
        return num_kept

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until the `num_bytes` of a new, open reservation fit; nothing where they cannot."""
        if self._num_bytes + num_bytes <= self.host_bytes:
            return True
        if self._unfreeable_bytes() > self.host_bytes:
            return False
        self._evict_until(lambda: self._num_bytes + num_bytes <= self.host_bytes)
        return True

    def _unfreeable_bytes(self) -> int:
        """Bytes of open reservations and of slabs with a page that is held or above a held one."""
        slabs = {reservation.slab for reservation in self._open}
        holds = [lease.hold for lease in self._leases]
        holds += [reservation.hold for reservation in self._open]
        for hold in holds:
            for entry in hold.entries:
                node: Node | None = entry.node
                while node is not None and node.pages:
                    slabs.add(node.local[entry.model].segment.slab)
                    node = node.parent
        return sum(slab.num_bytes for slab in slabs)

    def _evict_until(self, is_enough: Callable[[], bool]) -> None:
        # One pass is enough: an entry stands before its ancestors in the list.
        for entry in self._recency:
            if is_enough():
                return
            if entry.is_evictable:
                self._evict(entry)

    def _evict(self, entry: LocalEntry) -> None:
        node = entry.node
        change = entry.change(added=False)
        self._recency.remove(entry)
        del node.local[entry.model]
        if node.parent is not None and node.parent.pages:
            node.parent.local[entry.model].num_children -= 1
        self._num_pages -= len(node.pages)
        self._drop_pages(entry.segment.slab, len(node.pages))
        self._trie.prune(node)
        self._notify(change)

    def _drop_pages(self, slab: Slab, num_pages: int) -> None:
        if num_pages:
            self._num_bytes -= slab.drop_pages(num_pages)

    def _notify(self, change: Change) -> None:
        for listener in self._listeners:
            listener(change)

    def _drop_remote(self, node: Node, key: tuple[Location, ModelId]) -> None:
        below = [node, *node.walk()]
        for each in reversed(below):
            each.remote.pop(key, None)
            self._trie.prune(each)

    def _has_local(self, model: ModelId, page: PageHash) -> bool:
        node = self._trie.find(page)
        return node is not None and model in node.local

    def _pieces_of(self, model: ModelId, pieces: Iterable[Piece]) -> list[Piece]:
        return list(takewhile(lambda piece: model in piece.node.local, pieces))

    def _num_present(
        self, model: ModelId, parent: PageHash | None, pages: Sequence[PageHash]
    ) -> int:
        """How many leading pages after `parent` the model has."""
        pieces = self._pieces_of(model, self._trie.after(parent, pages))
        return sum(len(piece.pages) for piece in pieces)


class _Progress:
    """What one (location, model) has so far along a walk."""

    def __init__(self) -> None:
        self.num_pages = 0
        self.e_pages: dict[int, int] = {}

    def add(self, num_pages: int, e_layers: Iterable[int]) -> None:
        for layer in e_layers:
            if self.e_pages.get(layer, 0) == self.num_pages:
                self.e_pages[layer] = self.num_pages + num_pages
        self.num_pages += num_pages

    def match(self, location: Location, model: ModelId) -> Match:
        return Match(model=model, location=location, num_pages=self.num_pages, e_pages=self.e_pages)
