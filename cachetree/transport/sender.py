"""Send pages: one stream for each fetch, and a scheduler that picks the next stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from cachetree.clock import Clock, Deadline
from cachetree.errors import ProtocolError
from cachetree.ids import Step
from cachetree.memory import Pool, Slab, checksum, checksum_of_parts
from cachetree.transport import verbs, wire
from cachetree.transport.channel import Channel
from cachetree.transport.frames import Frame
from cachetree.transport.pace import Cap
from cachetree.transport.wire import MAX_PLACES
from cachetree.tree import Lease

_JOIN_BYTES: Final = 64 << 10
"""Short runs of memory are joined into frames of up to this many bytes. One frame for each run
would cost more."""

LOCATED_BYTES: Final = 4 << 20
"""Largest number of bytes in one `Located` message."""
_REMEMBERED_BYTES: Final = 128 << 10
"""A slab (the memory in which pages were reserved) may remember one checksum for each so many of
its bytes. A remembered checksum takes about 250 bytes."""
_LEAST_REMEMBERED: Final = 256


class Payload(NamedTuple):
    """The payload of one frame."""

    offset: int
    """Position of the first byte in the fetch, in bytes over all transfer steps."""
    slab: Slab
    """Slab (reserved memory) of the first buffer in `parts`; it remembers checksums."""
    parts: list[memoryview]


def payloads_of(
    lease: Lease,
    steps: Sequence[Step],
    most_bytes: int,
    *,
    first_byte: int = 0,
) -> Iterator[Payload]:
    """Cut the transfer steps of leased pages, from byte `first_byte` on, into payloads of at most
    `most_bytes`. Long runs of memory are cut; short ones are joined.

    Raises ProtocolError if `first_byte` is not within the steps.
    """
    runs = [lease.runs(step) for step in steps]
    num_bytes = sum(view.nbytes for run in runs for _, view in run)
    if not 0 <= first_byte < num_bytes:
        raise ProtocolError(f"a fetch begins at byte {first_byte} of {num_bytes}")
    return _payloads(runs, most_bytes, first_byte)


def _payloads(
    runs: Sequence[Sequence[tuple[Slab, memoryview]]], most_bytes: int, first_byte: int
) -> Iterator[Payload]:
    """Yield payloads, from byte `first_byte` of all runs on. A payload has at most `most_bytes`,
    all of one transfer step. `runs` has a list of runs for each step."""
    offset = skipped = first_byte
    most_joined = min(most_bytes, _JOIN_BYTES)
    for of_step in runs:
        joined: list[memoryview] = []
        num_joined = 0
        for slab, view in of_step:
            rest = view[skipped:]
            skipped -= view.nbytes - rest.nbytes
            while rest:
                is_long = not joined and rest.nbytes >= most_joined
                joined.append(rest[: most_bytes if is_long else most_joined - num_joined])
                rest = rest[joined[-1].nbytes :]
                num_joined += joined[-1].nbytes
                if num_joined >= most_joined or len(joined) == MAX_PLACES:
                    yield Payload(offset, slab, joined)
                    offset += num_joined
                    joined, num_joined = [], 0
        if joined:
            yield Payload(offset, slab, joined)
            offset += num_joined


class Stream:
    """Send the payloads of one fetch in order. Used by the worker's thread.

    A lease keeps the pages until the kernel has the last frame, or until the receiver has copied
    all from shared memory. Release it when `is_drained` is true. `end` stops the stream early.
    """

    def __init__(
        self,
        id: int,
        lease: Lease,
        payloads: Iterator[Payload],
        channel: Channel,
        deadline: Deadline,
        arena: Pool | None = None,
    ) -> None:
        """`arena`: memory from which the receiver copies payloads. None: the receiver gets
        frames."""
        self.id: Final = id
        self.lease: Final = lease
        self.deadline: Final = deadline
        self._payloads = payloads
        self._next = next(payloads, None)
        self.channel: Final = channel
        self._arena = arena
        self.served_bytes = 0
        """Number of bytes sent, for taking turns: in a channel, the stream with the lowest number
        sends next. A new stream starts at the lowest present number, so that others need not
        wait."""
        self.sent_bytes = 0
        self.is_cut = False
        """True if the stream ended before everything was sent."""
        self._is_read = False
        """True while the receiver may copy: positions were sent, and no Cancel came."""
        self._queued_bytes = 0
        """Value of the channel's `queued_bytes` after the last queued payload. 0 if no payload was
        queued."""

    @property
    def is_over(self) -> bool:
        return self._next is None

    @property
    def can_send(self) -> bool:
        """Whether `put` may be called now."""
        return not self.is_over and self.channel.has_room

    def put(self) -> int:
        """Send the next payload, and return its number of bytes. If the receiver can copy from the
        arena (shared memory), send positions there instead of the bytes."""
        assert self._next is not None
        offset, slab, parts = self._next
        frame = Frame(
            id=self.id,
            offset=offset,
            size=sum(part.nbytes for part in parts),
            checksum=_checksum(slab, parts),
        )
        if places := self._places(parts):
            self.channel.put_message(wire.encode(wire.Located(frame=frame, places=places)))
            self._is_read = True
        else:
            self.channel.put(frame, parts)
            self._queued_bytes = self.channel.send_queue.queued_bytes
        self.sent_bytes += frame.size
        self.served_bytes += frame.size
        self._next = next(self._payloads, None)
        return frame.size

    def end(self) -> None:
        """Stop: send no more, not even queued frames. The receiver has stopped copying."""
        self.is_cut |= not self.is_over
        self._next, self._payloads = None, iter(())
        self._is_read = False
        if self._queued_bytes:
            self.channel.send_queue.drop(self.id)

    @property
    def is_drained(self) -> bool:
        """Whether neither the kernel nor the receiver reads the pages any more."""
        is_read = self._is_read and not self.deadline.has_passed
        return not is_read and self.channel.send_queue.has_written(self._queued_bytes)

    def _places(self, parts: Sequence[memoryview]) -> tuple[tuple[int, int], ...]:
        """Return start and stop of each buffer in the arena. Empty if one is not in the arena."""
        if self._arena is None:
            return ()
        starts = [(self._arena.place_of(part), part.nbytes) for part in parts]
        places = tuple((at, at + size) for at, size in starts if at is not None)
        return places if len(places) == len(parts) else ()


def _checksum(slab: Slab, parts: Sequence[memoryview]) -> int:
    """Return the checksum of a payload. If it is one buffer, remember the checksum, because cached
    pages are often sent again."""
    if len(parts) > 1:
        return checksum_of_parts(parts)
    known = slab.checksums
    key = (np.frombuffer(parts[0], np.uint8).__array_interface__["data"][0], parts[0].nbytes)
    known_sum = known.get(key)
    if known_sum is None:
        if len(known) >= max(_LEAST_REMEMBERED, slab.num_bytes // _REMEMBERED_BYTES):
            known.clear()
        known_sum = known[key] = checksum(parts[0])
    return known_sum


BURST: Final = 16
"""Largest number of frames that one call of `send` sends, before the worker reads messages
again."""


class SendScheduler:
    """Choose which stream sends next, so that all peers get equal bytes, whatever their frame
    sizes.

    For the worker's thread, except `len`.
    """

    def __init__(self, counts: verbs.Status, max_bytes_per_s: float | None, clock: Clock) -> None:
        self._counts = counts
        self._cap = Cap(max_bytes_per_s or math.inf, clock)
        self._streams: dict[Stream, Callable[[Stream], object]] = {}
        """Streams with their callbacks. An ended stream stays until `retire` releases its pages."""

    @property
    def _sending(self) -> list[Stream]:
        return [it for it in tuple(self._streams) if not it.is_over]

    def __len__(self) -> int:
        return len(self._sending)

    @property
    def num_held(self) -> int:
        """Number of streams. An ended stream counts until `retire` releases its pages."""
        return len(self._streams)

    def limit(self, frame_bytes: int) -> int:
        """Return the largest payload at an even rate, at most `frame_bytes`."""
        return self._cap.limit(frame_bytes)

    def timeout_s(self) -> float:
        """Return the seconds until a stream may send, or is late. Infinity without streams."""
        sending = self._sending
        timeout_s = min((it.deadline.remaining_s() for it in sending), default=math.inf)
        if any(it.can_send for it in sending):
            timeout_s = min(timeout_s, self._cap.delay_s())
        return timeout_s

    def add(self, stream: Stream, on_drained: Callable[[Stream], object]) -> None:
        """Add a stream. `on_drained` is called when its pages are released."""
        sending = self._sending
        if not sending:
            self._cap.idle()
        channels = {other.channel for other in sending}
        if stream.channel not in channels:
            stream.channel.served_bytes = min((it.served_bytes for it in channels), default=0)
        of_channel = [it.served_bytes for it in sending if it.channel is stream.channel]
        stream.served_bytes = min(of_channel, default=0)
        self._streams[stream] = on_drained

    def send(self) -> None:
        """Send up to `BURST` frames. Each frame comes from the ready channel with the fewest sent
        bytes. In this channel, it comes from the ready stream with the fewest."""
        ready = [stream for stream in self._sending if stream.can_send]
        for _ in range(BURST):
            if not ready or self._cap.delay_s():
                break
            stream = min(ready, key=lambda it: (it.channel.served_bytes, it.served_bytes))
            size = stream.put()
            stream.channel.served_bytes += size
            self._cap.spend(size)
            self._counts.num_sent_bytes += size
            if stream.is_over:
                self._counts.fetches_by_outcome["ok"] += 1
            if not stream.can_send:
                ready.remove(stream)

    def retire(self) -> None:
        """Release the pages of ended streams, once neither the kernel nor a receiver reads them."""
        for stream in [it for it in self._streams if it.is_over and it.is_drained]:
            self._streams.pop(stream)(stream)
            stream.lease.release()

    def close(self) -> None:
        """Release the pages of all streams at once."""
        self.retire()
        for stream in self._streams:
            stream.lease.release()
        self._streams.clear()
