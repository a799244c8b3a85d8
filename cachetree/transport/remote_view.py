"""What one worker advertises, applied to the tree in the worker's order."""

from __future__ import annotations

from typing import Final

from cachetree.errors import ProtocolError
from cachetree.ids import Location, ModelId
from cachetree.transport.wire import NO_ADVERTS, Entries, Entry, Reset, Synced, split_pages
from cachetree.tree.tree import CacheTree

_UNKNOWN: Final = -1
"""In place of a sequence number: nothing counts until the next snapshot."""


class RemoteView:
    """The part of `tree` that belongs to one worker.

    A part that does not follow the one before it empties the view: `needs_snapshot` is then true
    until the next Reset. Used by the peer's thread only.
    """

    def __init__(self, tree: CacheTree, location: Location) -> None:
        self._tree = tree
        self._location = location
        self._seq = _UNKNOWN
        self.is_synced = False
        """A whole snapshot has been applied since the last `forget`."""
        self.needs_snapshot = True
        self.snapshot = 0
        """Which one it began with, as the worker calls it."""

    def apply(self, message: Reset | Entries | Synced) -> None:
        """Raises ProtocolError for entries that cannot exist."""
        if isinstance(message, Reset):
            self.forget()
            self.needs_snapshot = False
            self.snapshot = message.snapshot
            self._seq = 0
        elif self._seq != _UNKNOWN:
            is_part = isinstance(message, Entries)
            if message.seq != self._seq + is_part:
                self.forget()
                return
            self._seq = message.seq
            if isinstance(message, Entries):
                for entry in message.entries:
                    self._apply(entry)
            else:
                self.is_synced = True

    def compare(self, seq: int) -> None:
        """The worker has sent every part up to `seq`: forget all where one did not come."""
        if self._seq != _UNKNOWN and seq not in (NO_ADVERTS, self._seq):
            self.forget()

    def forget(self) -> None:
        """Drop everything; only a Reset begins anew."""
        if self._seq != _UNKNOWN:
            self._tree.forget(self._location)
        self._seq = _UNKNOWN
        self.is_synced = False
        self.needs_snapshot = True

    def _apply(self, entry: Entry) -> None:
        pages = split_pages(entry.pages)
        parents = split_pages(entry.parent)
        num_layers = self._tree.family.num_layers
        if len(parents) > 1 or not all(0 <= layer < num_layers for layer in entry.e_layers):
            raise ProtocolError(f"worker {self._location} advertises entries that cannot exist")
        model = ModelId(entry.model)
        if entry.added:
            parent = parents[0] if parents else None
            self._tree.add_remote(self._location, model, parent, pages, entry.e_layers)
        else:
            self._tree.drop_remote(self._location, model, pages)
