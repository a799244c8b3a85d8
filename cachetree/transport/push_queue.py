"""What waits to be pushed to one worker, parents before children."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from cachetree.entries import Change
from cachetree.tree import CacheTree


class PushQueue:
    """Everything that is in a tree, then what comes into it.

    Changes come under the tree's lock from any thread; the rest belongs to the pusher's thread,
    but for `len` and `close`. When more than `max_changes` wait, they give way to what is in the
    tree by then.
    """

    def __init__(self, tree: CacheTree, max_changes: int, wake: Callable[[], None]) -> None:
        self._tree = tree
        self._max_changes = max_changes
        self._wake = wake
        self._lock = threading.Lock()
        self._there: deque[Change] = deque()
        self._changes: deque[Change] = deque()
        self._has_overflowed = False
        self._is_closed = False
        self.num_restarts = 0
        self._unsubscribe: Callable[[], None] = lambda: None
        self._subscribe()

    def __len__(self) -> int:
        return len(self._there) + len(self._changes)

    def first(self) -> Change | None:
        """What is next, again and again until `drop`."""
        if self._has_overflowed:
            self.restart()
        with self._lock:
            waiting = self._there or self._changes
            return waiting[0] if waiting else None

    def drop(self, change: Change) -> None:
        """It has had its turn."""
        with self._lock:
            waiting = self._there or self._changes
            if waiting and waiting[0] is change:
                waiting.popleft()

    def restart(self) -> None:
        """Begin again with everything that is in the tree."""
        self.num_restarts += 1
        self._subscribe()

    def close(self) -> None:
        """Take in nothing that is new."""
        self._is_closed = True
        self._unsubscribe()

    def _subscribe(self) -> None:
        self._unsubscribe()
        with self._lock:
            self._changes.clear()
            self._has_overflowed = False
        there, self._unsubscribe = self._tree.subscribe(self._note)
        if self._is_closed:
            self._unsubscribe()
        self._there = deque(there)

    def _note(self, change: Change) -> None:
        if not change.added:
            return
        with self._lock:
            if len(self._changes) >= self._max_changes:
                self._changes.clear()
                self._has_overflowed = True
            if not self._has_overflowed:
                self._changes.append(change)
        self._wake()
