"""Sending pages: one stream per fetch or store, and who sends next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from cachetree.clock import Clock, Deadline
from cachetree.errors import ProtocolError
from cachetree.ids import Span, Step
from cachetree.memory import Pool, checksum, checksum_of_parts
from cachetree.transport import verbs, wire
from cachetree.transport.channel import Channel
from cachetree.transport.frames import MAX_FRAME_BYTES, Frame
from cachetree.transport.pace import Cap
from cachetree.transport.wire import MAX_PLACES
from cachetree.tree import Lease

_JOIN_BYTES: Final = 64 << 10
"""Views shorter than this are joined into one frame: a frame for each costs more."""

LOCATED_BYTES: Final = 4 << 20
"""Most that one header locates."""
_REMEMBERED_BYTES: Final = 128 << 10
"""A slab keeps a checksum for so many of its bytes; each takes about 250."""
_LEAST_REMEMBERED: Final = 256


class Load(NamedTuple):
    """What a stream sends: some steps of a lease, of these of its pages, or of all; it begins with
    step and offset `first`."""

    lease: Lease
    steps: Sequence[Step]
    pages: Span | None = None
    first: tuple[int, int] = (0, 0)


class Stream:
    """Sends the steps of one lease in order. Used by one thread.

    The lease is held until the kernel has the last frame, and until a receiver that reads the
    arena has `copied` all of it: `end` stops the stream, and `is_drained` then says when
    `lease.release` is due.
    """

    def __init__(
        self,
        id: int,
        load: Load,
        channel: Channel,
        frame_bytes: int,
        deadline: Deadline,
        arena: Pool | None = None,
    ) -> None:
        """Its frames have payloads of at most `frame_bytes`. Raises ProtocolError, StaleEntry."""
        lease, steps, pages, first = load
        self.id: Final = id
        self.lease: Final = lease
        self.deadline: Final = deadline
        self._channel = channel
        self._frame_bytes = frame_bytes
        self.served_bytes = 0
        """Sent, on top of what its neighbours had been sent when it came."""
        self.is_over = False
        self.is_cut = False
        """It ended before all was sent."""
        self._arena = arena
        """While the receiver reads it."""
        self.sent_bytes = 0
        self._step, self._offset = first
        if not 0 <= self._step < len(steps):
            raise ProtocolError(f"a fetch begins with step {self._step} of {len(steps)}")
        # Raises StaleEntry here, before the first frame, where E is absent.
        self._rest = deque(
            deque(zip(lease.slabs(step, pages), lease.views(step, pages), strict=True))
            for step in steps[self._step :]
        )
        """Of each step, what is not sent yet, and in which slab it is."""
        if not 0 <= self._offset < sum(view.nbytes for _, view in self._rest[0]):
            raise ProtocolError(f"a fetch begins at {self._offset} of step {self._step}")
        self._advance(self._offset)
        self._queued_bytes = 0
        """What the channel's queue had with its last payload; 0 where none went that way."""

    @property
    def can_send(self) -> bool:
        """Whether `put` may be called now."""
        return not self.is_over and self._channel.has_room

    def put(self, limit: int = MAX_FRAME_BYTES) -> int:
        """Send the next bytes, or where the receiver can read them; how many those were, at most
        `limit`."""
        most_bytes = self._frame_bytes if self._arena is None else LOCATED_BYTES
        views = self._next_views(min(limit, most_bytes))
        places = self._places(views)
        if self._arena is not None and len(places) < len(views):  # Some of it is not in there.
            self._arena = None
            return self.put(limit)
        frame = Frame(
            id=self.id,
            step=self._step,
            offset=self._offset,
            size=sum(view.nbytes for view in views),
            checksum=self._checksum(views),
        )
        if places:
            self._channel.put_message(wire.encode(wire.Located(frame=frame, places=places)))
        else:
            self._channel.put(frame, views)
            self._queued_bytes = self._channel.send_queue.queued_bytes
        self.sent_bytes += frame.size
        self.served_bytes += frame.size
        self._offset += frame.size
        self._advance(frame.size)
        self.is_over = not self._rest
        return frame.size

    def copied(self) -> None:
        """The receiver reads the arena no more; what it has not read comes in frames."""
        self._arena = None

    def end(self) -> None:
        """Send no more, of what waits for the kernel neither."""
        self.is_over = True
        self.is_cut |= bool(self._rest)
        if self._queued_bytes:
            self._channel.send_queue.drop(self.id)
        self._rest.clear()
        self._arena = None

    @property
    def is_drained(self) -> bool:
        """Whether nobody reads the pages any more."""
        is_read = self._arena is None or self.deadline.has_passed
        return is_read and self._channel.send_queue.has_written(self._queued_bytes)

    def _places(self, views: Sequence[memoryview]) -> tuple[tuple[int, int], ...]:
        """Of those that lie in the arena, from where to where."""
        if self._arena is None:
            return ()
        starts = map(self._arena.place_of, views)
        return tuple(
            (start, start + view.nbytes)
            for start, view in zip(starts, views, strict=True)
            if start is not None
        )

    def _next_views(self, limit: int) -> list[memoryview]:
        """At most `limit` bytes: a long view alone, or as many short ones as make a long one."""
        rest = self._rest[0]
        _, first = rest[0]
        if len(rest) == 1 or first.nbytes >= min(limit, _JOIN_BYTES):
            return [first[:limit]]
        parts: list[memoryview] = []
        room = min(limit, _JOIN_BYTES)
        for _, view in islice(rest, MAX_PLACES):
            parts.append(view[:room])
            room -= parts[-1].nbytes
            if not room:
                break
        return parts

    def _checksum(self, views: Sequence[memoryview]) -> int:
        """Of a long view it is remembered: what is cached is mostly sent more than once."""
        if len(views) > 1:
            return checksum_of_parts(views)
        slab, _ = self._rest[0][0]
        known = slab.checksums
        key = (np.frombuffer(views[0], np.uint8).__array_interface__["data"][0], views[0].nbytes)
        found = known.get(key)
        if found is None:
            if len(known) >= max(_LEAST_REMEMBERED, slab.num_bytes // _REMEMBERED_BYTES):
                known.clear()
            found = known[key] = checksum(views[0])
        return found

    def _advance(self, num_bytes: int) -> None:
        rest = self._rest[0]
        while num_bytes:
            slab, view = rest.popleft()
            if num_bytes < view.nbytes:
                rest.appendleft((slab, view[num_bytes:]))
            num_bytes -= min(num_bytes, view.nbytes)
        if not rest:
            self._rest.popleft()
            self._step += 1
            self._offset = 0


BURST: Final = 16
"""Frames sent before incoming messages are looked at again."""


OnDrained = Callable[[Stream], object]


class SendScheduler:
    """Streams of all peers get equal bytes, whatever their frames.

    Used by the worker's thread only.
    """

    def __init__(self, counts: verbs.Counts, max_bytes_per_s: float | None, clock: Clock) -> None:
        self._counts = counts
        self._cap = Cap(max_bytes_per_s or math.inf, clock)
        self._sending: dict[Stream, OnDrained] = {}
        self._draining: dict[Stream, OnDrained] = {}

    def __len__(self) -> int:
        return len(self._sending)

    def timeout_s(self) -> float:
        """How long nobody has to look."""
        remaining_s = (stream.deadline.remaining_s() for stream in self._sending)
        timeout_s = min(remaining_s, default=math.inf)
        if any(stream.can_send for stream in self._sending):
            timeout_s = min(timeout_s, self._cap.delay_s())
        return timeout_s

    def add(self, stream: Stream, on_drained: OnDrained) -> None:
        """Send it; call `on_drained` once its pages are given back."""
        if not self._sending:
            self._cap.idle()
        stream.served_bytes = min((other.served_bytes for other in self._sending), default=0)
        self._sending[stream] = on_drained

    def send(self) -> None:
        """Up to `BURST` frames, each of the ready stream that got the fewest bytes."""
        ready = [stream for stream in self._sending if stream.can_send]
        for _ in range(BURST):
            if not ready or self._cap.delay_s():
                break
            stream = min(ready, key=lambda it: it.served_bytes)
            size = stream.put(self._cap.limit(MAX_FRAME_BYTES))
            self._cap.spend(size)
            self._counts.num_sent_bytes += size
            if stream.is_over:
                self._counts.fetches_by_outcome["ok"] += 1
            if not stream.can_send:
                ready.remove(stream)

    def retire(self) -> None:
        """Give back the pages of streams that are over, once nobody reads them any more."""
        for stream in [it for it in self._sending if it.is_over]:
            self._draining[stream] = self._sending.pop(stream)
        for stream in [it for it in self._draining if it.is_drained]:
            self._draining.pop(stream)(stream)
            stream.lease.release()

    def close(self) -> None:
        """Nobody is served any more."""
        self.retire()
        for stream in self._draining:
            stream.lease.release()
        self._draining.clear()
