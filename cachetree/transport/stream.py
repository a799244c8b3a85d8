"""One fetch as the worker serves it: leased views cut into frames, never beyond the window."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import zmq

from cachetree.checksum import checksum
from cachetree.clock import Deadline
from cachetree.errors import ProtocolError
from cachetree.lease import Lease
from cachetree.plan import Kind, Step
from cachetree.transport.wire import Frame

COPY_BYTES: Final = 64 << 10
"""Runs shorter than this are joined into one frame by a copy; ZMQ would copy them anyway."""


class Stream:
    """Sends the steps of one lease in order. Used by the worker's thread only.

    The lease is held until ZMQ has let go of the last frame: `end` stops the stream, and
    `is_drained` then says when `lease.release` is due.
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
    ) -> None:
        self.id: Final = id
        self.lease: Final = lease
        self.deadline: Final = deadline
        self.frame_bytes: Final = frame_bytes
        self.window_bytes: Final = window_bytes
        self.in_flight_bytes = 0
        self.served_bytes = 0
        """Sent, on top of what its neighbours had been sent when it came."""
        self.is_over = False
        self._sent_bytes = 0
        self._step, self._offset = first
        if not 0 <= self._step < len(steps):
            raise ProtocolError(f"a fetch begins with step {self._step} of {len(steps)}")
        # Raises StaleEntry here, before the first frame, where E is absent.
        self._views = deque(
            deque(lease.e(step.layer) if step.kind is Kind.E else lease.kv(step.layer))
            for step in steps[self._step :]
        )
        if not 0 <= self._offset < sum(run.nbytes for run in self._views[0]):
            raise ProtocolError(f"a fetch begins at {self._offset} of step {self._step}")
        self._advance(self._offset)
        self._trackers: deque[zmq.MessageTracker] = deque()

    def is_ready(self, limit: int) -> bool:
        """Whether a frame of at most `limit` bytes may go now. If not, credit is to come."""
        size = min(limit, self.frame_bytes)
        return not self.is_over and self.in_flight_bytes + size <= self.window_bytes

    def next_payload(self, limit: int) -> memoryview:
        """The next bytes to send, at most `limit`. Nothing changes until `sent`."""
        limit = min(limit, self.frame_bytes)
        runs = self._views[0]
        first = runs[0]
        if len(runs) == 1 or first.nbytes >= min(limit, COPY_BYTES):
            return first[:limit]
        parts: list[memoryview] = []
        room = min(limit, COPY_BYTES)
        for run in runs:
            parts.append(run[:room])
            room -= parts[-1].nbytes
            if not room:
                break
        return memoryview(b"".join(parts))

    def header(self, payload: memoryview) -> Frame:
        return Frame(
            id=self.id,
            step=self._step,
            offset=self._offset,
            size=payload.nbytes,
            checksum=checksum(payload),
        )

    def sent(self, payload: memoryview, tracker: zmq.MessageTracker) -> None:
        """`payload` was handed to ZMQ."""
        self._trackers.append(tracker)
        while self._trackers and self._trackers[0].done:
            self._trackers.popleft()
        self._sent_bytes += payload.nbytes
        self.served_bytes += payload.nbytes
        self.in_flight_bytes += payload.nbytes
        self._offset += payload.nbytes
        self._advance(payload.nbytes)
        self.is_over = not self._views

    def credit(self, num_bytes: int) -> None:
        """The receiver placed that much in all; raises ProtocolError for more than was sent."""
        if not 0 < num_bytes <= self._sent_bytes:
            raise ProtocolError(f"a credit of {num_bytes} bytes where {self._sent_bytes} were sent")
        self.in_flight_bytes = min(self.in_flight_bytes, self._sent_bytes - num_bytes)

    def end(self) -> None:
        """Send no more."""
        self.is_over = True
        self._views.clear()

    @property
    def is_drained(self) -> bool:
        return all(tracker.done for tracker in self._trackers)

    def _advance(self, num_bytes: int) -> None:
        runs = self._views[0]
        while num_bytes:
            run = runs.popleft()
            if num_bytes < run.nbytes:
                runs.appendleft(run[num_bytes:])
            num_bytes -= min(num_bytes, run.nbytes)
        if not runs:
            self._views.popleft()
            self._step += 1
            self._offset = 0
