"""Tells one peer what a tree holds: a snapshot, then numbered changes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from cachetree.transport.adverts import entries_of, pack
from cachetree.transport.change_queue import ChangeQueue
from cachetree.transport.wire import NO_ADVERTS, Entries, Entry, Learned, Reset, Synced
from cachetree.tree.entries import Change
from cachetree.tree.tree import CacheTree

Advert = Reset | Entries | Synced


class Advertiser:
    """A bounded queue between the tree's writers and one peer.

    `peek` and `sent` belong to the worker's thread. When the peer is too slow for the queue, the
    queue is dropped and a new snapshot begins: what the peer knows may be late, never wrong.
    """

    def __init__(
        self, tree: CacheTree, *, epoch: int, max_pending: int, wake: Callable[[], None]
    ) -> None:
        self._epoch = epoch
        self._changes = ChangeQueue(tree.subscribe_kept, max_pending, wake)
        self._seq = 0
        self.sent_seq = NO_ADVERTS
        """Of the last part that was sent; 0 after a Reset."""
        self.num_learned = -1
        """Changes that the peer has told it knows; may be read from any thread."""
        self._learned_seq = NO_ADVERTS
        self._told: deque[tuple[int, int]] = deque()
        """Up to which part, and which number of changes, each lot goes that was sent."""
        self._unsent: Advert | None = None
        self._adverts: Iterator[Advert] = iter(())
        self._restart()

    def peek(self) -> Advert | None:
        """The next message for the peer, again and again until `sent`."""
        if self._changes.has_overflowed:
            self._restart()
        if self._unsent is None:
            self._unsent = next(self._adverts, None)
        if self._unsent is None and (changes := self._changes.take()):
            self._adverts = self._numbered(changes)
            self._unsent = next(self._adverts, None)
        return self._unsent

    def sent(self) -> None:
        if self._unsent is not None:
            self.sent_seq = 0 if isinstance(self._unsent, Reset) else self._unsent.seq
        self._unsent = None

    @property
    def num_noted(self) -> int:
        """Changes up to now; may be read from any thread."""
        return self._changes.num_noted

    def learned(self, told: Learned) -> None:
        """The peer knows all up to that part."""
        if told.snapshot == self._snapshot_id:
            self._learned_seq = told.seq
            self._settle()

    def close(self) -> None:
        self._changes.close()

    def _restart(self) -> None:
        self._unsent = None
        self._told.clear()
        self._learned_seq = NO_ADVERTS
        self._snapshot_id = time.monotonic_ns()
        self._adverts = self._snapshot(self._changes.restart())

    def _snapshot(self, changes: Iterable[Change]) -> Iterator[Advert]:
        self._seq = 0
        yield Reset(epoch=self._epoch, snapshot=self._snapshot_id)
        yield from self._numbered(changes)
        yield Synced(seq=self._seq)

    def _numbered(self, changes: Iterable[Change]) -> Iterator[Advert]:
        num_taken = self._changes.num_taken
        for entries in pack(_entries(changes)):
            self._seq += 1
            yield Entries(seq=self._seq, entries=entries)
        self._told.append((self._seq, num_taken))
        self._settle()

    def _settle(self) -> None:
        while self._told and self._told[0][0] <= self._learned_seq:
            self.num_learned = self._told.popleft()[1]


def _entries(changes: Iterable[Change]) -> Iterator[Entry]:
    for change in changes:
        yield from entries_of(
            added=change.added,
            model=change.model,
            parent=change.parent,
            pages=change.pages,
            e_layers=change.e_layers,
        )
