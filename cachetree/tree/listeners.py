"""Listeners of additions to a tree and removals from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from cachetree.ids import DISK
from cachetree.tree.entries import Change, LocalEntry, Node, RemoteEntry

Listener = Callable[[Change], None]


class ChangeListeners:
    """Two lists of functions that the tree calls at each change, with its lock held.

    Listeners in `of_memory` get each local entry that is added or removed. For listeners in
    `of_kept`, memory and disk are one place. They get an addition, perhaps twice, and a removal
    when the entry has left both.
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
        remote = filter(_is_on_disk_alone, node.remote.values())
        yield from (entry.change(added=True) for entry in remote)

    def published(self, change: Change) -> None:
        for listener in (*self.of_memory, *self.of_kept):
            listener(change)

    def evicted(self, entry: LocalEntry) -> None:
        """Report an eviction. Called while the entry is still in its node."""
        if not (self.of_memory or self.of_kept):
            return
        change = entry.change(added=False)
        for listener in self.of_memory:
            listener(change)
        if (DISK, *entry.key) not in entry.node.remote:
            for listener in self.of_kept:
                listener(change)

    def noted(self, entry: RemoteEntry, *, added: bool) -> None:
        """Report the addition or removal of an entry that is on disk and not in memory. Call it
        after an addition, parents first, and before a removal, children first."""
        if self.of_kept and _is_on_disk_alone(entry):
            for listener in self.of_kept:
                listener(entry.change(added=added))


def _is_on_disk_alone(entry: RemoteEntry) -> bool:
    return entry.key[0] == DISK and entry.key[1:] not in entry.node.local
