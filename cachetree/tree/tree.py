"""The prefix tree of one family: its lookups, reservations, leases, pins and evictions."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from cachetree.checkpoint import Family
from cachetree.clock import Clock, Deadline
from cachetree.ids import EMPTY_SPAN, KV, ModelId, PageHash, Part, Span
from cachetree.memory import Arena, Layout, NoRoom, Pool, Slab, Torn
from cachetree.names import ModelNames
from cachetree.planning import Match
from cachetree.tree.entries import Change, LocalEntry, Node
from cachetree.tree.eviction import Eviction, Retention
from cachetree.tree.holds import Holds, Lease, Reservation
from cachetree.tree.listeners import ChangeListeners, Listener
from cachetree.tree.remote_entries import RemoteEntries
from cachetree.tree.slices import SLICE, in_slices, run_in_slices
from cachetree.tree.trie import PageTrie, depth_of, find_matches, nodes_to

_RETENTION: Final = Retention()
_EVICTIONS: Final = SLICE // 2
"""Number of evictions in one slice: an eviction takes twice as long as a look at a node."""
_MOST_SWEPT: Final = 512
"""Largest number of entries past their time to live that one sweep evicts. They take some 30 ms."""


class CacheTree:
    """The prefix tree of one family, with the entries of all models in its nodes.

    Thread-safe. The package's docstring has the rules. Eviction takes whole nodes of one key, the
    least recently used first, and E before its KV.
    """

    def __init__(
        self,
        family: Family,
        *,
        host_bytes: int,
        memory: Pool | None = None,
        clock: Clock = time.monotonic,
        retention: Retention = _RETENTION,
    ) -> None:
        """Without `memory`, make an arena of `host_bytes`. Raises ConfigError if that fails."""
        Layout.of(family, 1, KV)  # Raises ConfigError if the codec does not fit the model.
        self.family: Final = family
        self.host_bytes: Final = host_bytes
        self.memory: Final[Pool] = Arena(host_bytes) if memory is None else memory
        self._clock = clock
        self._lock = threading.Lock()
        self._eviction = Eviction(retention.ttl_s, clock)
        self._trie = PageTrie(self._eviction)
        self._first: Final = self._trie.root.children
        """Nodes directly below the root. Keys are their first pages. The dict stays the same
        object: the root is never split."""
        max_pinned_bytes = int(retention.max_pinned_share * host_bytes)
        self._holds = Holds(self._trie, self._eviction, max_pinned_bytes)
        self._listeners = ChangeListeners()
        self.remote: Final = RemoteEntries(self._trie, self._listeners, self._lock)
        """Entries that workers and tiers claim to have."""
        self.names: Final = ModelNames()
        self.num_bytes = 0
        """Bytes of local entries and open reservations. They never exceed the budget."""
        self.num_evictions = 0
        """Number of evicted entries, whatever the reason."""
        self._num_pages: Counter[ModelId] = Counter()
        """Number of local pages with KV of each model."""

    @property
    def num_pages(self) -> int:
        """Number of local pages with KV. A page counts once for each model."""
        return self._num_pages.total()

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes among `num_bytes` that are pinned."""
        return self._holds.num_pinned_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes among `num_bytes` that cannot be evicted now: leased, pinned or being written."""
        self.sweep()
        with self._lock:
            return self._holds.num_bytes

    def pages_by_model(self) -> dict[str, int]:
        """Return the number of local pages with KV of each model."""
        with self._lock:
            return {str(model): num for model, num in self._num_pages.items() if num}

    # Local entries are always the exact KV of their model.

    def reserve(
        self,
        model: ModelId,
        parent: PageHash | None,
        pages: Sequence[PageHash],
        part: Part = KV,
    ) -> Reservation | None:
        """Reserve room for KV of all layers, or E of one, for consecutive pages after `parent`.

        Leading pages that are already stored are skipped. Returns None if the budget cannot take
        the rest even after eviction. Also returns None if the model lacks this part at `parent`
        (None is the root): such pages could never match. E is reserved only as far as KV is stored.
        """
        if not KV <= part < self.family.num_layers:
            raise ValueError(f"E at layer {part} of a model of {self.family.num_layers}")
        key = (model, part)
        self.sweep()
        with self._lock:
            place = None if parent is None else self._trie.find_local(key, parent)
            if parent is not None and place is None:
                return None
            last = ground = self._trie.longest_prefix(pages, lambda node: key in node.local, place)
            if part != KV:
                with_kv = (model, KV)
                ground = self._trie.compared_prefix(
                    pages, lambda node: with_kv in node.local, place
                )
                pages = pages[: depth_of(ground) - depth_of(place)]
            skipped = depth_of(last) - depth_of(place)
            whole = Change(added=True, model=model, part=part, parent=parent, pages=tuple(pages))
            new = whole.slice(Span(skipped, len(pages)))
            slab = Slab(Layout.of(self.family, len(new.pages), part), self.memory)
            reservation = Reservation(new, skipped, slab, depth_of(ground), self._end)
            if not new.pages:
                return reservation
            if last is not None:
                reservation.add(last.node.local[key])
            if part != KV and ground is not None:
                reservation.add(ground.node.local[model, KV])
            if not self._begin(reservation):
                return None
        try:
            self._fill(slab)
        except NoRoom:
            reservation.release()
            return None
        except BaseException:
            reservation.release()
            raise
        return reservation

    def _fill(self, slab: Slab) -> None:
        """Take a slab's memory. If free memory is too fragmented, evict more entries. Raises
        NoRoom."""
        while True:
            try:
                return slab.fill()
            except Torn as torn:
                with self._lock:
                    if not self._evict_bytes(torn.num_bytes):
                        raise

    def lease(
        self,
        model: ModelId,
        pages: Sequence[PageHash],
        owner: str,
        deadline: Deadline,
        parts: Collection[Part] = (KV,),
        *,
        is_use: bool = True,
    ) -> Lease | None:
        """Lease parts of consecutive local pages of `model`. Return None if a page is gone.

        `pages` may start anywhere in the tree. The lease ends at `deadline` at the latest. Set
        `is_use` to False if `match` has noted the use, or if no request needs the pages now.
        """
        keys = [(model, part) for part in parts]
        with self._lock:
            places = self._trie.path_anywhere(
                pages, lambda node: all(key in node.local for key in keys)
            )
            if sum(it.stop - it.start for it in places) < len(pages):
                return None
            lease = Lease(
                {part: [place.in_slab((model, part)) for place in places] for part in parts},
                len(pages),
                depth_of(places[-1]) if places else 0,
                owner,
                deadline,
                self._end_lease,
            )
            for key in keys:
                for place in places:
                    lease.add(place.node.local[key])
            if is_use and places:
                self._eviction.use(places[-1].node.local[key] for key in keys)
            self._holds.leases.add(lease)
            return lease

    def has(self, model: ModelId, page: PageHash, part: Part = KV) -> bool:
        """Return whether the model has this page in memory."""
        with self._lock:
            return self._trie.find_local((model, part), page) is not None

    def line(self, model: ModelId, page: PageHash, part: Part = KV) -> list[Change]:
        """Return the local entries from the root to the entry with `page`, the root's first. Each
        is the `Change` that would add it."""
        key = (model, part)
        with self._lock:
            nodes = nodes_to(self._trie.find_local(key, page))
            return [node.local[key].change(added=True) for node in nodes]

    def pin(
        self, model: ModelId | None, pages: Sequence[PageHash], deadline: Deadline | None = None
    ) -> dict[ModelId, int]:
        """Keep the local pages of the prefix `pages` in memory, for `model` or for all models.

        The pin lasts until `unpin` or `deadline`; a second pin of the same prefix replaces the
        first. Returns how many pages of each model are pinned; pages added later are not. Raises
        PinRefused if pins would keep more than their share of the budget.
        """
        self.sweep()
        with self._lock:
            return self._holds.pin(model, pages, deadline)

    def unpin(self, model: ModelId | None, pages: Sequence[PageHash]) -> bool:
        """End the pin with the same model and pages. Return False if there is none."""
        with self._lock:
            return self._holds.unpin(model, pages)

    def sweep(self) -> None:
        """End leases and pins past their deadline. Evict entries past their time to live, but only
        a few at once, so that no caller waits for long."""
        with self._lock:
            self._holds.end_late(self._clock())
        if self._eviction.ttl_s is not None:
            gone = map(self._take_out, self._eviction.expired())
            run_in_slices(self._lock, islice(gone, _MOST_SWEPT), _EVICTIONS)

    def evict(self, model: ModelId | None = None, pages: Sequence[PageHash] = ()) -> int:
        """Drop all prompts that begin with `pages`, of `model` or all models. Return freed bytes.

        Pages that another prompt shares stay. Leased and pinned entries stay, too, and entries that
        an open reservation continues. Empty `pages`: drop everything. Works in slices, so entries
        added meanwhile may stay.
        """
        return sum(self.evicting(model, pages))

    def evicting(
        self, model: ModelId | None = None, pages: Sequence[PageHash] = ()
    ) -> Iterator[int]:
        """Evict like `evict`, node by node as the caller asks. Yield each node's freed bytes."""
        self.sweep()
        steps = (
            sum(
                self._take_out(entry)
                for entry in reversed(tuple(node.local.values()))  # E before its KV.
                if model in (None, entry.key[0]) and entry.is_evictable
            )
            for node in self._trie.bottom_up(pages)
        )
        return in_slices(self._lock, steps, _EVICTIONS)

    # Local and remote entries.

    def match(self, pages: Sequence[PageHash], is_use: bool = True) -> list[Match]:
        """Return the longest prefix of `pages` per (model, location), found in one walk.

        A page hash covers all pages before it, so a page that matches proves all earlier pages. A
        match counts as a use of the entries, unless `is_use` is False.
        """
        if not pages or pages[0] not in self._first:
            return []  # A miss needs no lock; one look into a dict is atomic.
        with self._lock:
            matches, used, noted = find_matches(self._trie, pages)
            if is_use:
                self._eviction.use(used)
                for entry in noted:
                    entry.use()
        return matches

    def num_there(self, pages: Sequence[PageHash]) -> int:
        """Return how many leading `pages` any model has at any location. Every page is compared,
        because these hashes may not be of one prompt."""
        with self._lock:
            return depth_of(self._trie.compared_prefix(pages))

    # Changes of local entries, for the advertiser.

    def subscribe(self, listener: Listener) -> tuple[Iterator[Change], Callable[[], None]]:
        """Call `listener` with every change from now on. Return the present entries, as additions,
        and a function that ends the subscription.

        A caller that applies the additions first, then the changes in their order, has the tree's
        content. Present entries are looked up in slices, as the caller asks, so that no thread
        waits for long. So an entry that is added meanwhile may appear in both, and an entry that is
        removed meanwhile may appear only as a removal. `listener` is called with the tree's lock
        held, in the thread that made the change: it must not block, raise or call the tree.
        """
        return self._subscribed(listener, self._listeners.of_memory, self._listeners.in_memory)

    def subscribe_kept(self, listener: Listener) -> tuple[Iterator[Change], Callable[[], None]]:
        """Subscribe like `subscribe`, but to pages that are in memory or on disk."""
        return self._subscribed(listener, self._listeners.of_kept, self._listeners.kept)

    def _subscribed(
        self,
        listener: Listener,
        listeners: list[Listener],
        of_node: Callable[[Node], Iterator[Change]],
    ) -> tuple[Iterator[Change], Callable[[], None]]:
        def unsubscribe() -> None:
            with self._lock:
                if listener in listeners:
                    listeners.remove(listener)

        with self._lock:
            listeners.append(listener)
        seen = (list(of_node(node)) for node in self._trie.root.walk())
        return chain.from_iterable(in_slices(self._lock, seen)), unsubscribe

    # Called when a reservation or a lease ends.

    def _end(self, reservation: Reservation, is_commit: bool) -> None:
        """Publish the reservation's pages if `is_commit`. Give back the memory of other pages."""
        if not reservation.pages:
            return
        with self._lock:
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

    def _end_lease(self, lease: Lease) -> None:
        with self._lock:
            self._holds.end(lease)

    # Called with the lock held: how local entries are added within the budget, and removed.

    def _begin(self, reservation: Reservation) -> bool:
        """Evict until the slab fits the budget. If it cannot, end the reservation; return False."""
        self._holds.open.add(reservation)
        too_many = self.num_bytes + reservation.slab.num_bytes - self.host_bytes
        if too_many > 0:
            if not self._holds.leave(self.host_bytes):
                self._holds.open.discard(reservation)
                self._holds.let_go(reservation)
                return False
            self._evict_bytes(too_many)
        self.num_bytes += reservation.slab.num_bytes
        return True

    def _evict_bytes(self, num_bytes: int) -> int:
        """Evict at least `num_bytes`, or everything that can be evicted. Return the freed bytes."""
        num_freed = 0
        for entry in self._eviction.victims():
            num_freed += self._take_out(entry)
            if num_freed >= num_bytes:
                break
        return num_freed

    def _take_out(self, entry: LocalEntry) -> int:
        """Evict an entry. Return the freed bytes."""
        self._listeners.evicted(entry)
        node, parents = entry.node, entry.parents
        for parent in parents:
            parent.num_children -= 1
        self._eviction.remove(entry, parents)
        self.num_evictions += 1
        del node.local[entry.key]
        self._num_pages[entry.key[0]] -= node.num_pages * (entry.key[1] == KV)
        num_freed = entry.slab.drop_pages(entry.pages)
        self.num_bytes -= num_freed
        self._trie.prune(node)
        return num_freed

    def _publish(self, reservation: Reservation) -> Span:
        """Put the reserved pages that are still new into nodes. Return the span of these pages."""
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
            self._num_pages[key[0]] += node.num_pages * (key[1] == KV)
            added.append(entry)
            stop += node.num_pages
        if added:
            self._eviction.add(added[-1])
        return Span(start, stop)
