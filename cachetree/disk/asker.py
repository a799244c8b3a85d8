"""Callers that let the disk tier read a prefix into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from cachetree.clock import Deadline
from cachetree.ids import ModelId, PageHash, Part
from cachetree.tree import CacheTree, Lease

_MAX_ROOM_S: Final = 1.0
"""Largest number of seconds that a read into memory waits for leases to end, if memory is full."""
_LOOK_S: Final = 0.01

LetGo = Callable[[], object]
"""Function that ends the leases of pages that were read from disk into memory. Any thread may call
it, and may call it several times."""


class Asker:
    """Caller for the disk tier itself. It neither waits for free memory nor leases pages."""

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """`is_over` returns True once the pages are no longer wanted. Any thread may call it."""
        self.is_over: Final = is_over

    def keep(self, pages: Sequence[PageHash], part: Part) -> None:
        """Lease these consecutive pages, which also keeps all pages before them. Replaces the
        earlier lease of this part."""

    def let_go(self) -> None:
        """End all leases."""

    def waits(self) -> bool:
        """Wait a little for free memory. Return False if the time for waiting is over."""
        return False


NO_PEER: Final = Asker()


class AskingPeer(Asker):
    """Caller for a peer. It leases the pages in memory until `deadline` or `let_go`."""

    def __init__(
        self, tree: CacheTree, model: ModelId, deadline: Deadline, is_wanted: Callable[[], bool]
    ) -> None:
        super().__init__(lambda: deadline.has_passed or not is_wanted())
        self._lease_of: Final = partial(
            tree.lease, model, owner="a line read from disk", deadline=deadline, is_use=False
        )
        self._num_looks = round(_MAX_ROOM_S / _LOOK_S)
        self._leases: dict[Part, Lease | None] = {}

    def keep(self, pages: Sequence[PageHash], part: Part) -> None:
        before = self._leases.get(part)
        self._leases[part] = self._lease_of(pages=pages[-1:], parts=[part])
        if before is not None:
            before.release()

    def let_go(self) -> None:
        for lease in tuple(self._leases.values()):
            if lease is not None:
                lease.release()

    def waits(self) -> bool:
        time.sleep(_LOOK_S)
        self._num_looks -= 1
        return self._num_looks > 0 and not self.is_over()
