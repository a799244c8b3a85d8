"""Entries that are elsewhere: what workers and tiers have said that they hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from cachetree.ids import LOCAL, Location, ModelId, PageHash
from cachetree.trie import PageTrie, depth_of
from cachetree.watch import Watch


class RemoteEntries:
    """Puts them into the nodes of a tree and takes them out. Takes no lock."""

    def __init__(self, trie: PageTrie, watch: Watch) -> None:
        self._trie: Final = trie
        self._watch: Final = watch

    def add(
        self,
        location: Location,
        model: ModelId,
        parent: PageHash | None,
        pages: Sequence[PageHash],
        e_layers: Collection[int],
    ) -> None:
        if location == LOCAL:
            raise ValueError("local pages are reserved and committed, not advertised")
        key = (location, model)
        if parent is not None:
            place = self._trie.find(parent)
            if place is None or key not in place.node.remote:
                return
        layers = tuple(sorted(set(e_layers)))
        nodes = self._trie.cover(parent, pages)
        had = [node.remote[key].e_layers for node in nodes if key in node.remote]
        for node in nodes:
            node.set_remote(key, layers)
        if had.count(layers) < len(had):  # What hangs below may have E without a gap, or not.
            for node in nodes[0].walk():
                if key in node.remote:
                    node.set_remote(key, node.remote[key].e_layers)
        self._watch.shown(location, model, nodes)

    def reach(self, location: Location, model: ModelId, pages: Sequence[PageHash]) -> int:
        """How many of `pages` it has, from the root."""
        place = self._trie.deepest(None, pages)
        if place is None:
            return 0
        node, num_pages = place.node, depth_of(place)
        while (location, model) not in node.remote:
            if node.parent is None:
                return 0
            node, num_pages = node.parent, node.start
        return num_pages

    def drop(self, location: Location, model: ModelId, pages: Sequence[PageHash]) -> None:
        key = (location, model)
        for page in pages:
            place = self._trie.find(page)
            if place is not None and key in place.node.remote:
                first = self._trie.split(place.node, place.start)
                below = [first, *first.walk()]
                self._watch.hidden(location, model, reversed(below))
                for node in below:
                    node.remote.pop(key, None)
                self._trie.prune(below)
                return

    def give_way(self, pages: Sequence[PageHash]) -> bool:
        """Drop what hinders the first of `pages`, which is local, from its place; whether it did.

        A page that was only advertised is at another place because of a wrong advert.
        """
        place = self._trie.find(pages[0]) if pages else None
        if place is None or place.node.local:
            return False
        there = list(place.node.remote)
        for location, model in there:
            self.drop(location, model, pages[:1])
        return bool(there)

    def forget(self, location: Location) -> None:
        nodes = list(self._trie.root.walk())
        for node in nodes:
            for key in [key for key in node.remote if key[0] == location]:
                del node.remote[key]
        self._trie.prune(nodes)
