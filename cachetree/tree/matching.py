"""Who has the longest prefix of a prompt: one walk for all models and locations."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cachetree.ids import LOCAL, Location, ModelId, PageHash
from cachetree.planning import Match
from cachetree.tree.entries import EReach, LocalEntry, RemoteEntry, RemoteKey
from cachetree.tree.trie import PageTrie, depth_of


def find_matches(
    trie: PageTrie, pages: Sequence[PageHash]
) -> tuple[list[Match], Collection[LocalEntry], Collection[RemoteEntry]]:
    """The longest prefix of `pages` per (model, location), and the entries where they end."""
    found: list[Match] = []
    used: dict[ModelId, LocalEntry] = {}
    known: dict[RemoteKey, RemoteEntry] = {}
    place = trie.deepest(None, pages)
    if place is None:
        return found, (), ()
    top = trie.root.children[pages[0]]
    node, num_pages = place.node, depth_of(place)
    # Upwards: whoever has an entry in a node has one in every node above it.
    while True:
        if len(node.local) > len(used):
            for model, entry in node.local.items():
                if model not in used:
                    used[model] = entry
                    found.append(_match(LOCAL, model, num_pages, entry.e_reach))
        if len(node.remote) > len(known):
            for key, remote in node.remote.items():
                if key not in known:
                    known[key] = remote
                    found.append(_match(*key, num_pages, remote.e_reach))
        if len(used) == len(top.local) and len(known) == len(top.remote):
            return found, used.values(), known.values()
        assert node.parent is not None
        node, num_pages = node.parent, node.start


def _match(location: Location, model: ModelId, num_pages: int, e_reach: EReach) -> Match:
    return Match(
        model=model, location=location, num_pages=num_pages, e_pages=e_reach.pages(num_pages)
    )
