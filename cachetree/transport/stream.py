"""One fetch as the worker serves it: leased views cut into frames, or where they are found."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np

from cachetree.clock import Deadline
from cachetree.errors import ProtocolError
from cachetree.ids import Span
from cachetree.memory.checksum import checksum, checksum_of_parts
from cachetree.memory.memory import Memory
from cachetree.planning.plan import Step
from cachetree.transport.frames import Frame
from cachetree.transport.outbox import Outbox
from cachetree.transport.wire import MAX_PLACES, Located
from cachetree.tree.lease import Lease

_JOIN_BYTES: Final = 64 << 10
"""Runs shorter than this are joined into one frame: a frame for each costs more."""

LOCATED_BYTES: Final = 4 << 20
"""Most that one header locates."""
_REMEMBERED_BYTES: Final = 128 << 10
"""A slab keeps a checksum for so many of its bytes; each takes about 250."""
_LEAST_REMEMBERED: Final = 256


class Stream:
    """Sends the steps of one lease in order. Used by the worker's thread only.

    The lease is held until the kernel has the last frame, and until a receiver that reads the
    arena has credited all of it: `end` stops the stream, and `is_drained` then says when
    `lease.release` is due.
    """

    def __init__(
        self,
        id: int,
        lease: Lease,
        steps: Sequence[Step],
        *,
        frame_bytes: int,
        window_bytes: int,
        deadline: Deadline,
        first: tuple[int, int] = (0, 0),
        arena: Memory | None = None,
        pages: Span | None = None,
    ) -> None:
        """Of the lease's `pages`; of all by default."""
        self.id: Final = id
        self.lease: Final = lease
        self.deadline: Final = deadline
        self.frame_bytes: Final = frame_bytes
        self.window_bytes: Final = window_bytes
        self.in_flight_bytes = 0
        self.served_bytes = 0
        """Sent, on top of what its neighbours had been sent when it came."""
        self.is_over = False
        self._arena = arena
        """If the receiver reads it."""
        self._sent_bytes = 0
        self._step, self._offset = first
        self._run = 0
        """Which of the lease's runs comes next."""
        self._slabs = lease.slabs(pages)
        if not 0 <= self._step < len(steps):
            raise ProtocolError(f"a fetch begins with step {self._step} of {len(steps)}")
        # Raises StaleEntry here, before the first frame, where E is absent.
        self._views = deque(deque(lease.views(step, pages)) for step in steps[self._step :])
        if not 0 <= self._offset < sum(run.nbytes for run in self._views[0]):
            raise ProtocolError(f"a fetch begins at {self._offset} of step {self._step}")
        self._advance(self._offset)
        self._outbox: Outbox | None = None
        """What carries the payloads, if any went that way."""
        self._queued_bytes = 0

    def is_ready(self, limit: int) -> bool:
        """Whether a frame of at most `limit` bytes may go now. If not, credit is to come.

        What the receiver reads in the arena takes no room on its way, and so no window.
        """
        size = min(limit, self.frame_bytes)
        fits = self._arena is not None or self.in_flight_bytes + size <= self.window_bytes
        return fits and not self.is_over

    def next_located(self, limit: int) -> Located | None:
        """Where the next bytes are, if the receiver can read them there. As `next_frame`."""
        if self._arena is None:
            return None
        runs = self._next_runs(limit)
        starts = [self._arena.place_of(run) for run in runs]
        places = [
            (start, start + run.nbytes)
            for start, run in zip(starts, runs, strict=True)
            if start is not None
        ]
        if len(places) < len(runs):
            self._arena = None
            return None
        return Located(
            id=self.id,
            step=self._step,
            offset=self._offset,
            size=sum(run.nbytes for run in runs),
            checksum=self._checksum(runs),
            places=tuple(places),
        )

    def next_frame(self, limit: int) -> tuple[Frame, list[memoryview]]:
        """The next bytes to send, at most `limit`. Nothing changes until `sent`."""
        runs = self._next_runs(min(limit, self.frame_bytes))
        frame = Frame(
            id=self.id,
            step=self._step,
            offset=self._offset,
            size=sum(run.nbytes for run in runs),
            checksum=self._checksum(runs),
        )
        return frame, runs

    @property
    def reads_arena(self) -> bool:
        """Whether the receiver does, as far as is known."""
        return self._arena is not None

    def queued(self, outbox: Outbox) -> None:
        """The last payload was put there."""
        self._outbox = outbox
        self._queued_bytes = outbox.queued_bytes

    def sent(self, num_bytes: int) -> None:
        """So much is on its way."""
        self._sent_bytes += num_bytes
        self.served_bytes += num_bytes
        self.in_flight_bytes += num_bytes
        self._offset += num_bytes
        self._advance(num_bytes)
        self.is_over = not self._views

    def credit(self, num_bytes: int) -> None:
        """The receiver placed that much in all; raises ProtocolError for more than was sent."""
        if not 0 < num_bytes <= self._sent_bytes:
            raise ProtocolError(f"a credit of {num_bytes} bytes where {self._sent_bytes} were sent")
        self.in_flight_bytes = min(self.in_flight_bytes, self._sent_bytes - num_bytes)

    def end(self) -> None:
        """Send no more, of what waits for the kernel neither."""
        self.is_over = True
        if self._outbox is not None:
            self._outbox.drop(self.id)
        self._views.clear()
        self._arena = None

    @property
    def is_drained(self) -> bool:
        """Whether nobody reads the pages any more."""
        is_read = self._arena is None or not self.in_flight_bytes or self.deadline.has_passed
        is_sent = self._outbox is None or self._outbox.has_written(self._queued_bytes)
        return is_read and is_sent

    def _next_runs(self, limit: int) -> list[memoryview]:
        """At most `limit` bytes: a long run by itself, or as many short ones as make a long one."""
        runs = self._views[0]
        first = runs[0]
        if len(runs) == 1 or first.nbytes >= min(limit, _JOIN_BYTES):
            return [first[:limit]]
        parts: list[memoryview] = []
        room = min(limit, _JOIN_BYTES)
        for run in islice(runs, MAX_PLACES):
            parts.append(run[:room])
            room -= parts[-1].nbytes
            if not room:
                break
        return parts

    def _checksum(self, runs: Sequence[memoryview]) -> int:
        """Of a long run it is remembered: what is cached is mostly sent more than once."""
        if len(runs) > 1:
            return checksum_of_parts(runs)
        slab = self._slabs[self._run]
        known = slab.checksums
        key = (np.frombuffer(runs[0], np.uint8).__array_interface__["data"][0], runs[0].nbytes)
        found = known.get(key)
        if found is None:
            if len(known) >= max(_LEAST_REMEMBERED, slab.num_bytes // _REMEMBERED_BYTES):
                known.clear()
            found = known[key] = checksum(runs[0])
        return found

    def _advance(self, num_bytes: int) -> None:
        runs = self._views[0]
        while num_bytes:
            run = runs.popleft()
            if num_bytes < run.nbytes:
                runs.appendleft(run[num_bytes:])
            else:
                self._run += 1
            num_bytes -= min(num_bytes, run.nbytes)
        if not runs:
            self._views.popleft()
            self._step += 1
            self._offset = self._run = 0
