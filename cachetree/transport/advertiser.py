"""Tells one peer what a tree holds: a snapshot, then numbered changes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from cachetree.entries import Change
from cachetree.transport.adverts import entries_of, pack
from cachetree.transport.wire import NO_ADVERTS, Entries, Entry, Reset, Synced
from cachetree.tree import CacheTree

Advert = Reset | Entries | Synced


class Advertiser:
    """A bounded queue between the tree's writers and one peer.

    Changes come under the tree's lock from any thread; `peek` and `sent` belong to the worker's
    thread. When the peer is too slow for the queue, the queue is dropped and a new snapshot
    begins: what the peer knows may be late, never wrong.
    """

    def __init__(
        self, tree: CacheTree, *, epoch: int, max_pending: int, wake: Callable[[], None]
    ) -> None:
        self._tree = tree
        self._epoch = epoch
        self._max_pending = max_pending
        self._wake = wake
        self._lock = threading.Lock()
        self._changes: deque[Change] = deque()
        self._has_overflowed = False
        self._seq = 0
        self.sent_seq = NO_ADVERTS
        """Of the last part that was sent; 0 after a Reset."""
        self._unsent: Advert | None = None
        self._adverts: Iterator[Advert] = iter(())
        self._unsubscribe: Callable[[], None] = lambda: None
        self._subscribe()

    def peek(self) -> Advert | None:
        """The next message for the peer, again and again until `sent`."""
        if self._has_overflowed:
            self._subscribe()
        if self._unsent is None:
            self._unsent = next(self._adverts, None)
        if self._unsent is None and (changes := self._take()):
            self._adverts = self._numbered(changes)
            self._unsent = next(self._adverts, None)
        return self._unsent

    def sent(self) -> None:
        if self._unsent is not None:
            self.sent_seq = 0 if isinstance(self._unsent, Reset) else self._unsent.seq
        self._unsent = None

    def close(self) -> None:
        self._unsubscribe()

    def _subscribe(self) -> None:
        self._unsubscribe()
        with self._lock:
            self._changes.clear()
            self._has_overflowed = False
        snapshot, self._unsubscribe = self._tree.subscribe_kept(self._note)
        self._unsent = None
        self._adverts = self._snapshot(snapshot)

    def _note(self, change: Change) -> None:
        with self._lock:
            if len(self._changes) >= self._max_pending:
                self._changes.clear()
                self._has_overflowed = True
            if not self._has_overflowed:
                self._changes.append(change)
        self._wake()

    def _take(self) -> list[Change]:
        with self._lock:
            changes = list(self._changes)
            self._changes.clear()
        return changes

    def _snapshot(self, changes: Iterable[Change]) -> Iterator[Advert]:
        self._seq = 0
        yield Reset(epoch=self._epoch)
        yield from self._numbered(changes)
        yield Synced(seq=self._seq)

    def _numbered(self, changes: Iterable[Change]) -> Iterator[Advert]:
        for entries in pack(_entries(changes)):
            self._seq += 1
            yield Entries(seq=self._seq, entries=entries)


def _entries(changes: Iterable[Change]) -> Iterator[Entry]:
    for change in changes:
        yield from entries_of(
            added=change.added,
            model=change.model,
            parent=change.parent,
            pages=change.pages,
            e_layers=change.e_layers,
        )
