"""Host memory for one request's fetch: filled and read one transfer step (layer) after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from cachetree.clock import Deadline
from cachetree.errors import Cancelled, DeadlineExceeded, FetchError, without_frames
from cachetree.ids import Span, Step
from cachetree.memory.copying import copy, cut, scatter
from cachetree.memory.slab import Blocks, Pool

Views = Mapping[Step, Sequence[memoryview]]
"""Memory of each step, as one view for each run."""

NoteEnd = Callable[["Staging"], None]


class Staging:
    """Memory into which one fetch writes the steps of a plan, in order, while readers wait.

    One writer (a transport thread) calls `write` and `fail`; any number of readers call `wait` and
    `views`. Every wait ends: a step lands, the fetch fails, or the deadline passes. The memory is
    given back after `release`, the end of a `with` block, or garbage collection, once no view of it
    exists.
    """

    def __init__(
        self,
        sizes: Mapping[Step, int],
        deadline: Deadline,
        views: Views | None = None,
        note_end: NoteEnd = lambda staging: None,
    ) -> None:
        """`views` has the memory of each step; without `views`, memory is allocated. `note_end` is
        called at the first `release`."""
        self.sizes: Final = dict(sizes)
        """Bytes of each step."""
        self.steps: Final[Sequence[Step]] = tuple(sizes)
        self.deadline: Final = deadline
        self.num_bytes: Final = sum(sizes.values())
        if views is None:
            views = {step: [np.empty(size, np.uint8).data] for step, size in sizes.items()}
        self._views = views
        self._across: tuple[Sequence[memoryview], memoryview] | None = None
        """Views of several runs, and a buffer that the writer fills instead of them. `land` copies
        the buffer into the views. None while the writer fills memory that is one run."""
        self._note_end: NoteEnd | None = note_end
        self._missing = dict(sizes)
        self._changed = threading.Condition()
        self.error: FetchError | None = None
        """Error that ended the fetch early. None while the fetch runs, and once it is complete."""
        self.num_landed_bytes = 0
        self.started_s: Final = deadline.clock()
        self.completed_s: float | None = None
        """Time when the last byte landed, on the deadline's clock."""
        self.traceparent = ""
        """Trace id of the request that needs the fetch. Set before the writer begins; empty if the
        request is not traced."""
        self.landed_s: dict[Step, float] = {}
        """Time when each step landed, on the same clock; only for a traced request."""

    def write(self, step: Step, offset: int, payload: memoryview) -> None:
        """Copy `payload` into the step at `offset`. Each byte must be written exactly once.

        Raises the errors of `room`.
        """
        copy(self.room(step, offset, payload.nbytes), payload)
        self.land(step, payload.nbytes)

    def room(self, step: Step, offset: int, size: int) -> memoryview:
        """Return memory for bytes of a step. The writer fills it, then calls `land`.

        Raises ValueError if the bytes would not fit, and Cancelled after `cancel` or `release`.
        """
        if offset < 0 or offset + size > self.sizes[step] or size > self._missing[step]:
            raise ValueError(f"{size} bytes at {offset} do not fit {step}")
        views = self._views.get(step)
        if views is None or isinstance(self.error, Cancelled):
            raise _cancelled()
        parts = cut(views, Span(offset, offset + size))
        if len(parts) == 1:
            self._across = None
            return parts[0]
        self._across = parts, memoryview(bytearray(size))
        return self._across[1]

    def land(self, step: Step, size: int) -> None:
        """Count bytes that the writer has put into the memory that the last `room` returned."""
        if self._across is not None:
            scatter(*self._across)
            self._across = None
        with self._changed:
            self._missing[step] -= size
            self.num_landed_bytes += size
            if not self._missing[step]:
                if self.traceparent:
                    self.landed_s[step] = self.deadline.clock()
                if self.is_complete:
                    self.completed_s = self.deadline.clock()
                self._changed.notify_all()

    def fail(self, error: FetchError) -> None:
        """End the fetch early. The first error wins; errors after the last step are ignored."""
        with self._changed:
            if self.error is None and not self.is_complete:
                self.error = without_frames(error)
                self._changed.notify_all()

    def check(self) -> None:
        """Raise a copy of the error that ended the fetch early, if any. The original error would
        keep the frames of the writer's thread alive, with their views of memory."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def cancel(self) -> None:
        """Give up the fetch. The writer notices this at its next `write`, or by reading `error`."""
        self.fail(_cancelled())

    @property
    def is_complete(self) -> bool:
        """Return whether every step has landed."""
        return self.num_landed_bytes == self.num_bytes

    def has_landed(self, step: Step) -> bool:
        """Return whether all bytes of `step` have landed, so that `wait` would not block."""
        return not self._missing[step]

    def views(self, step: Step) -> Sequence[memoryview]:
        """Return the bytes of a step, as one view for each run of memory. They are valid once the
        step has landed."""
        return self._views[step]

    def wait(self, step: Step, deadline: Deadline | None = None) -> None:
        """Block until `step` has landed; raise the error if the fetch fails first.

        A `deadline` of the reader's own ends only this wait, not the fetch.
        """
        is_own = deadline is not None and deadline.at_s < self.deadline.at_s
        remaining_s = (deadline if deadline and is_own else self.deadline).remaining_s()
        with self._changed:
            self._changed.wait_for(lambda: not self._missing[step] or self.error, remaining_s)
            if not self._missing[step]:
                return
            if is_own and self.error is None:
                raise DeadlineExceeded(f"{_name(step)} did not arrive within the wait")
            self.fail(DeadlineExceeded(f"{_name(step)} did not arrive in time"))
            self.check()

    def release(self) -> None:
        """Stop reading. An incomplete fetch is cancelled. Idempotent."""
        self.cancel()
        self._views = {}
        note_end, self._note_end = self._note_end, None
        if note_end is not None:
            note_end(self)

    @property
    def is_released(self) -> bool:
        """Return whether the reader has called `release`."""
        return self._note_end is None

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def staged(
    pool: Pool,
    parts: Mapping[Step, Blocks],
    deadline: Deadline,
    note_end: NoteEnd = lambda staging: None,
) -> Staging:
    """Return a staging in memory of a pool. The memory goes back to the pool when the staging is
    released or deleted. Raises NoRoom."""
    loan = pool.take(list(parts.values()))
    views = {
        step: [loan.memory[run.start : run.stop] for run in runs]
        for step, runs in zip(parts, loan.runs, strict=True)
    }

    def end(staging: Staging) -> None:
        give_back()
        note_end(staging)

    staging = Staging({it: num * size for it, (num, size) in parts.items()}, deadline, views, end)
    places = [run for runs in loan.runs for run in runs]
    give_back = weakref.finalize(staging, pool.give_back, loan, places)
    return staging


def _cancelled() -> Cancelled:
    return Cancelled("the request no longer needs this fetch")


def _name(step: Step) -> str:
    return f"{step.kind.value} of layer {step.layer}"
