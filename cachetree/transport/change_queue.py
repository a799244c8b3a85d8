"""Changes of a tree on their way to one reader, who may be slow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from cachetree.tree.entries import Change
from cachetree.tree.watch import Listener

Subscribe = Callable[[Listener], tuple[Iterator[Change], Callable[[], None]]]
"""As `CacheTree.subscribe`: what is there now, and a function that ends the subscription."""


class ChangeQueue:
    """Bounded: when more than `max_changes` wait, all of them are dropped until `restart`.

    Changes come under the tree's lock from any thread; the rest belongs to the reader's thread,
    but for `len` and `close`.
    """

    def __init__(self, subscribe: Subscribe, max_changes: int, wake: Callable[[], None]) -> None:
        self._subscribe = subscribe
        self._max_changes = max_changes
        self._wake = wake
        self._lock = threading.Lock()
        self._changes: deque[Change] = deque()
        self.num_noted = 0
        """Changes that ever came; may be read from any thread."""
        self.num_taken = 0
        """Of these, how many the reader knows: taken, or in what `restart` gave."""
        self.has_overflowed = False
        """Something was dropped: begin again."""
        self._is_closed = False
        self._unsubscribe: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._changes)

    def restart(self) -> Iterator[Change]:
        """What is in the tree now; what comes later is taken in from here on."""
        self._unsubscribe()
        with self._lock:
            self._changes.clear()
            self.num_taken = self.num_noted
            self.has_overflowed = False
        there, self._unsubscribe = self._subscribe(self._note)
        if self._is_closed:
            self._unsubscribe()
        return there

    def take(self) -> list[Change]:
        """All that waits, in order."""
        with self._lock:
            changes = list(self._changes)
            self._changes.clear()
            self.num_taken = self.num_noted
        return changes

    def close(self) -> None:
        """Take in nothing that is new. Idempotent."""
        self._is_closed = True
        self._unsubscribe()

    def _note(self, change: Change) -> None:
        with self._lock:
            self.num_noted += 1
            if len(self._changes) >= self._max_changes:
                self._changes.clear()
                self.has_overflowed = True
            if not self.has_overflowed:
                self._changes.append(change)
        self._wake()
