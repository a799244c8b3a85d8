"""Who hears of what comes into a tree and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from cachetree.ids import DISK, Location, ModelId
from cachetree.tree.entries import Change, LocalEntry, Node

Listener = Callable[[Change], None]


class ChangeListeners:
    """Two kinds of listeners. Everything is called with the tree's lock held.

    Those of memory hear of each local entry. Those of what is kept hear of pages that are in
    memory or on disk: that they came, perhaps twice, and that they went from both.
    """

    def __init__(self) -> None:
        self.of_memory: Final[list[Listener]] = []
        self.of_kept: Final[list[Listener]] = []

    @staticmethod
    def in_memory(node: Node) -> Iterator[Change]:
        return (entry.change(added=True) for entry in node.local.values())

    @staticmethod
    def kept(node: Node) -> Iterator[Change]:
        yield from ChangeListeners.in_memory(node)
        for (location, model), entry in node.remote.items():
            if location == DISK and model not in node.local:
                yield _change([node], model, entry.e_layers, added=True)

    def published(self, change: Change) -> None:
        for listener in (*self.of_memory, *self.of_kept):
            listener(change)

    def evicted(self, entry: LocalEntry) -> None:
        """Called while it is still in its node."""
        if not (self.of_memory or self.of_kept):
            return
        is_on_disk = (DISK, entry.model) in entry.node.remote
        change = entry.change(added=False)
        for listener in (*self.of_memory, *(() if is_on_disk else self.of_kept)):
            listener(change)

    def shown(self, location: Location, model: ModelId, nodes: Sequence[Node]) -> None:
        """A remote entry was noted in these nodes, which follow each other."""
        if location != DISK or not self.of_kept or all(model in node.local for node in nodes):
            return
        change = _change(nodes, model, nodes[0].remote[location, model].e_layers, added=True)
        for listener in self.of_kept:
            listener(change)

    def hidden(self, location: Location, model: ModelId, nodes: Iterable[Node]) -> None:
        """A remote entry goes from these nodes, children first. Called while it is there."""
        if location != DISK or not self.of_kept:
            return
        for node in nodes:
            if (location, model) in node.remote and model not in node.local:
                change = _change([node], model, (), added=False)
                for listener in self.of_kept:
                    listener(change)


def _change(
    nodes: Sequence[Node], model: ModelId, e_layers: tuple[int, ...], *, added: bool
) -> Change:
    return Change(
        added=added,
        model=model,
        parent=nodes[0].parent_page,
        pages=tuple([page for node in nodes for page in node.pages]),
        e_layers=e_layers,
    )
