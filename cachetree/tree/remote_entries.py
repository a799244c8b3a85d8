"""Remote entries: pages that workers and tiers claim to have."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import inf
from typing import Final

from cachetree.ids import KV, LOCAL, Location, ModelId, PageHash, Part, Span
from cachetree.tree.entries import Change, Node, RemoteEntry, RemoteKey
from cachetree.tree.listeners import ChangeListeners
from cachetree.tree.slices import run_in_slices
from cachetree.tree.trie import PageTrie, Place, depth_of, nodes_to


class RemoteEntries:
    """The remote entries of a tree, with methods to add, find and remove them. Thread-safe, by the
    tree's lock."""

    def __init__(self, trie: PageTrie, listeners: ChangeListeners, lock: threading.Lock) -> None:
        self._trie: Final = trie
        self._listeners: Final = listeners
        self._lock: Final = lock
        self._orders: dict[Location, OrderedDict[RemoteEntry, None]] = {}
        self._max_pages: dict[Location, float] = {}
        self._max_models: dict[Location, float] = {}
        self._models: defaultdict[Location, Counter[ModelId]] = defaultdict(Counter)
        """Number of entries directly below the root, for each model at each location."""
        self.num_pages: Counter[Location] = Counter()
        """Number of known pages at each location. A page counts once for each model and part."""
        self.num_dropped: Counter[Location] = Counter()
        """Number of pages at each location that were dropped or left out because of `limit`."""

    def limit(self, location: Location, max_pages: int, max_models: float = inf) -> None:
        """Limit how many pages and models are noted at `location`. A page counts once for each
        model and part."""
        self._max_pages[location], self._max_models[location] = max_pages, max_models

    def leave(self, location: Location) -> None:
        """Delete the limit and counts of `location`. Call it after `forget`; it does nothing while
        the location has entries."""
        with self._lock:
            if not self.num_pages[location]:
                for known in (self._orders, self._max_pages, self._max_models, self._models):
                    known.pop(location, None)
                for counted in (self.num_pages, self.num_dropped):
                    counted.pop(location, None)

    def add(
        self,
        location: Location,
        model: ModelId,
        parent: PageHash | None,
        pages: Sequence[PageHash],
        part: Part = KV,
        source: object = None,
    ) -> int:
        """Note that `location` has these consecutive pages after `parent`. Return how many are new.

        Pages are left out if `location` has not advertised their parent, or has advertised them at
        another place: they could never match. Pages of models beyond the limit are left out, too.
        Beyond the limit of pages, the least recently used ones are dropped, in slices. `sources`
        later returns the `source` of these pages.
        """
        if location == LOCAL:
            raise ValueError("local pages are reserved and committed, not advertised")
        key = (location, model, part)
        with self._lock:
            place = None if parent is None else self._find(key, parent)
            if parent is not None and place is None:
                return 0
            models = self._models[location]
            if model not in models and len(models) >= self._max_models.get(location, inf):
                self.num_dropped[location] += len(pages)
                return 0
            nodes = self._trie.cover(place, pages, lambda node: key in node.remote)
            num_new = sum([node.num_pages for node in nodes if self._put(node, key, source)])
        run_in_slices(self._lock, self._trimming(location))
        return num_new

    def has(self, location: Location, model: ModelId, page: PageHash, part: Part = KV) -> bool:
        """Return whether this page is noted at `location`."""
        with self._lock:
            return self._find((location, model, part), page) is not None

    def missing(
        self, location: Location, model: ModelId, page: PageHash, part: Part = KV
    ) -> list[Change]:
        """Return the noted entries from the root to the one with `page`, except entries that are in
        memory. Each is an addition, in order."""
        key = (location, model, part)
        with self._lock:
            nodes = reversed(nodes_to(self._find(key, page)))
            new = list(takewhile(lambda node: key[1:] not in node.local, nodes))
            return [node.remote[key].change(added=True) for node in reversed(new)]

    def reach(
        self,
        location: Location,
        model: ModelId,
        pages: Sequence[PageHash],
        part: Part = KV,
        *,
        is_use: bool = False,
    ) -> int:
        """Return how many leading `pages` are noted at `location`."""
        key = (location, model, part)
        with self._lock:
            place = self._trie.longest_prefix(pages, lambda node: key in node.remote)
            if is_use and place is not None:
                place.node.remote[key].use()
            return depth_of(place)

    def sources(
        self, location: Location, model: ModelId, pages: Sequence[PageHash], part: Part = KV
    ) -> list[tuple[object, Span]]:
        """Return the `source` of each noted entry with some of the leading `pages`, and the span of
        these pages, counted from the root. `pages` may start in the middle of a prompt."""
        key = (location, model, part)
        sources: list[tuple[object, Span]] = []
        with self._lock:
            for node, start, stop in self._trie.path_anywhere(pages, lambda it: key in it.remote):
                source, begin = node.remote[key].source, node.start + start
                if sources and sources[-1][0] is source:
                    begin = sources.pop()[1].start
                sources.append((source, Span(begin, node.start + stop)))
        return sources

    def drop(
        self, location: Location, model: ModelId, pages: Sequence[PageHash], part: Part = KV
    ) -> None:
        """Forget these pages at `location`, and all pages after them, so that matches stay
        prefixes."""
        with self._lock:
            deque(self._dropping((location, model, part), pages), maxlen=0)

    def drop_in_slices(
        self, location: Location, model: ModelId, pages: Sequence[PageHash], part: Part = KV
    ) -> None:
        """Drop as `drop` does, but let other threads have the lock in between. This is slower; use
        it if many pages follow `pages`."""
        run_in_slices(self._lock, self._dropping((location, model, part), pages))
        # Then drop these pages, and pages after them that were added meanwhile.
        self.drop(location, model, pages, part)

    def forget(self, location: Location) -> None:
        """Forget everything at `location`, in slices. Pages that are added meanwhile may stay."""
        run_in_slices(self._lock, self._shrinking(location, 0))

    # Called with the lock held.

    def _find(self, key: RemoteKey, page: PageHash) -> Place | None:
        return self._trie.find(page, lambda node: key in node.remote)

    def _dropping(self, key: RemoteKey, pages: Sequence[PageHash]) -> Iterator[None]:
        """Remove the noted pages from the first of `pages` on, node by node, children before
        parents. A node stays if pages below it were added meanwhile."""

        def has_below(node: Node) -> bool:
            entry = node.remote.get(key)
            return entry is not None and entry.num_children > 0

        place = next(filter(None, (self._find(key, page) for page in pages)), None)
        if place is None:
            return
        for node in self._trie.split(place.node, place.start).bottom_up(has_below):
            entry = node.remote.get(key)
            if entry is not None and not entry.num_children:
                self._remove(entry)
            yield

    def _trimming(self, location: Location) -> Iterator[None]:
        for num_pages in self._shrinking(location, self._max_pages.get(location, inf)):
            self.num_dropped[location] += num_pages
            yield

    def _shrinking(self, location: Location, max_pages: float) -> Iterator[int]:
        """Drop the least recently used leaves until at most `max_pages` are noted. Yield how many
        pages each step dropped."""
        while self.num_pages[location] > max_pages:
            entry, _ = self._orders[location].popitem(last=False)
            # An entry with children is queued again when its last child is removed.
            is_leaf = not entry.num_children
            if is_leaf:
                self._remove(entry)
            yield entry.node.num_pages * is_leaf

    def _put(self, node: Node, key: RemoteKey, source: object) -> bool:
        """Put an entry into a node. Return whether the entry is new."""
        entry = node.remote.get(key)
        is_new = entry is None
        if entry is None:
            order = self._orders.setdefault(key[0], OrderedDict())
            entry = node.remote[key] = RemoteEntry(node, key, order, source)
            self.num_pages[key[0]] += node.num_pages
            if not node.start:
                self._models[key[0]][key[1]] += 1
            above = entry.parent
            if above is not None:
                above.num_children += 1
        entry.use()
        self._listeners.noted(entry, added=True)
        return is_new

    def _remove(self, entry: RemoteEntry) -> None:
        """Remove an entry without children."""
        self._listeners.noted(entry, added=False)
        above = entry.parent
        del entry.node.remote[entry.key]
        entry.order.pop(entry, None)
        location, model, _ = entry.key
        self.num_pages[location] -= entry.node.num_pages
        if not entry.node.start:
            models = self._models[location]
            models[model] -= 1
            if not models[model]:
                del models[model]
        if above is not None:
            above.num_children -= 1
            if not above.num_children and above not in above.order:
                above.use()
                above.order.move_to_end(above, last=False)
        self._trie.prune(entry.node)
