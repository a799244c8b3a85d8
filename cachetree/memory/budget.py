"""Bytes that the fetches of one cache may take at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType

from cachetree.clock import Deadline
from cachetree.ids import Step
from cachetree.memory.staging import Allocate, Staging


class Budget:
    """Bytes that may be in use at once."""

    def __init__(self, limit_bytes: int) -> None:
        self.num_bytes = 0
        self.limit_bytes = limit_bytes
        # Reentrant: garbage collection may give back in the middle of `take`.
        self._lock = threading.RLock()

    def take(self, num_bytes: int) -> bool:
        with self._lock:
            if self.num_bytes + num_bytes > self.limit_bytes:
                return False
            self.num_bytes += num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= num_bytes


class BudgetedStaging(Staging):
    """A staging buffer that counts against its cache's budget until it is released.

    `release`, leaving the context, or garbage collection gives the bytes back; the first of them
    counts. One that has not completed is cancelled by it.
    """

    def __init__(
        self,
        sizes: Mapping[Step, int],
        deadline: Deadline,
        allocate: Allocate,
        budget: Budget,
        note_end: Callable[[Staging], None],
    ) -> None:
        """`note_end` hears of the first `release`."""
        super().__init__(sizes, deadline, allocate)
        self._note_end: Callable[[Staging], None] | None = note_end
        self._give_back = weakref.finalize(self, budget.give_back, self.num_bytes)

    def release(self) -> None:
        """The caller reads no more. Idempotent."""
        self.cancel()
        self._give_back()
        note_end, self._note_end = self._note_end, None
        if note_end is not None:
            note_end(self)

    def __enter__(self) -> BudgetedStaging:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
