"""What waits to be pushed to one worker, parents before children."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from cachetree.transport.advertise import ChangeQueue
from cachetree.tree import CacheTree, Change, Listener


class PushQueue:
    """Everything that is in a tree, then what comes into it.

    It belongs to the pusher's thread, but for `len` and `close`. When more than `max_changes` come
    while others are pushed, they give way to what is in the tree by then.
    """

    def __init__(self, tree: CacheTree, max_changes: int, wake: Callable[[], None]) -> None:
        self._tree = tree
        self._new = ChangeQueue(self._subscribe, max_changes, wake)
        self._next = deque(self._new.restart())
        self.num_restarts = 0

    def __len__(self) -> int:
        return len(self._next) + len(self._new)

    def first(self) -> Change | None:
        """What is next, again and again until `drop`."""
        if self._new.has_overflowed:
            self.restart()
        if not self._next:
            self._next.extend(self._new.take())
        return self._next[0] if self._next else None

    def drop(self, change: Change) -> None:
        """It has had its turn."""
        if self._next and self._next[0] is change:
            self._next.popleft()

    def restart(self) -> None:
        """Begin again with everything that is in the tree."""
        self.num_restarts += 1
        self._next = deque(self._new.restart())

    def close(self) -> None:
        """Take in nothing that is new."""
        self._new.close()

    def _subscribe(self, listener: Listener) -> tuple[Iterator[Change], Callable[[], None]]:
        """To what comes alone."""
        return self._tree.subscribe(lambda change: listener(change) if change.added else None)
