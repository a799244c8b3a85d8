"""Host memory that one fetch fills and one request reads, step by step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from cachetree.clock import Deadline
from cachetree.errors import Cancelled, DeadlineExceeded, FetchError
from cachetree.ids import Step
from cachetree.memory.copying import copy

Allocate = Callable[[int], memoryview]
"""Gives that many writable bytes; the engine passes a page-locked allocator on CUDA."""


def pageable(num_bytes: int) -> memoryview:
    """The default allocator: ordinary memory, not zeroed."""
    return np.empty(num_bytes, dtype=np.uint8).data


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


class Staging:
    """The steps of one plan in host memory, landing in order while a reader waits for them.

    One writer (a transport thread) calls `write` and `fail`; any number of readers call `wait`
    and `view`. Whatever happens, every wait ends: a step lands, the fetch fails, or the deadline
    passes. The buffers belong to this object and go with it.
    """

    def __init__(
        self, sizes: Mapping[Step, int], deadline: Deadline, allocate: Allocate = pageable
    ) -> None:
        self.steps: Final[Sequence[Step]] = tuple(sizes)
        self.deadline: Final = deadline
        self.num_bytes: Final = sum(sizes.values())
        arena = allocate(self.num_bytes)
        self._views: dict[Step, memoryview] = {}
        offset = 0
        for step, size in sizes.items():
            self._views[step] = arena[offset : offset + size]
            offset += size
        self._missing = dict(sizes)
        self._changed = threading.Condition()
        self._error: FetchError | None = None
        self.num_landed_bytes = 0
        self.started_s: Final = deadline.clock()
        self.completed_s: float | None = None
        """When the last byte landed, on the deadline's clock."""

    def write(self, step: Step, offset: int, payload: memoryview) -> None:
        """Copy `payload` into the step at `offset`; each byte must come exactly once.

        Raises as `room`.
        """
        copy(self.room(step, offset, payload.nbytes), payload)
        self.land(step, payload.nbytes)

    def room(self, step: Step, offset: int, size: int) -> memoryview:
        """Where a writer puts the bytes itself that it then counts by `land`.

        Raises ValueError where they would not fit, Cancelled after `cancel`.
        """
        if offset < 0 or offset + size > self._views[step].nbytes or size > self._missing[step]:
            raise ValueError(f"{size} bytes at {offset} do not fit {step}")
        if isinstance(self._error, Cancelled):
            raise self._error
        return self._views[step][offset : offset + size]

    def land(self, step: Step, size: int) -> None:
        """Count bytes that the writer has put into `room` or `view(step)` itself."""
        with self._changed:
            self._missing[step] -= size
            self.num_landed_bytes += size
            if not self._missing[step]:
                if self.is_complete:
                    self.completed_s = self.deadline.clock()
                self._changed.notify_all()

    def fail(self, error: FetchError) -> None:
        """End the fetch early; the first error wins, and one after the last step is ignored."""
        with self._changed:
            if self._error is None and not self.is_complete:
                self._error = error
                self._changed.notify_all()

    def cancel(self) -> None:
        """The reader gives up; the writer learns of it at its next `write` or `error`."""
        self.fail(Cancelled("the request no longer needs this fetch"))

    @property
    def error(self) -> FetchError | None:
        """What ended the fetch early; None while it goes on, or once it is complete."""
        return self._error

    @property
    def is_complete(self) -> bool:
        """Whether every step has landed."""
        return self.num_landed_bytes == self.num_bytes

    def has_landed(self, step: Step) -> bool:
        """Whether all bytes of `step` are there, so that `wait` would not block."""
        return not self._missing[step]

    def view(self, step: Step) -> memoryview:
        """The bytes of a step; meaningful once it has landed."""
        return self._views[step]

    def wait(self, step: Step, deadline: Deadline | None = None) -> None:
        """Block until `step` has landed; raises what ended the fetch instead.

        A `deadline` of the reader's own ends only this wait, not the fetch.
        """
        if deadline is not None and deadline.at_s < self.deadline.at_s:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._missing[step] or self._error, deadline.remaining_s()
                )
                if self._missing[step] and self._error is None:
                    raise DeadlineExceeded(f"{_name(step)} did not arrive within the wait")
        with self._changed:
            while self._missing[step]:
                if self._error is not None:
                    raise self._error
                if not self._changed.wait(self.deadline.remaining_s()):
                    self._error = self._error or DeadlineExceeded(
                        f"{_name(step)} did not arrive in time"
                    )
                    self._changed.notify_all()


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

    def __exit__(self, *_: object) -> None:
        self.release()


def _name(step: Step) -> str:
    return f"{step.kind.value} of layer {step.layer}"
