"""The worker's side of a session with one peer: the peer's fetches, and the adverts for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cachetree.clock import Clock, Deadline
from cachetree.disk import DiskTier, LetGo
from cachetree.errors import DeadlineExceeded, FetchError, ProtocolError, StaleEntry
from cachetree.ids import PAGE_HASH_BYTES, ModelId, PageHash, Step, part_of
from cachetree.transport import verbs, wire
from cachetree.transport.advertise import Advertiser
from cachetree.transport.channel import Channel
from cachetree.transport.config import WorkerConfig
from cachetree.transport.frames import MAX_FRAME_BYTES, MIN_FRAME_BYTES, Frame
from cachetree.transport.sender import (
    BURST,
    LOCATED_BYTES,
    SendScheduler,
    Stream,
    payloads_of,
)
from cachetree.transport.tracing import NoteServed
from cachetree.transport.wire import Fetch, Why
from cachetree.tree import CacheTree

_DRAIN_S: Final = 5.0
"""Seconds by which a lease outlives its fetch's deadline, because frames may still wait for the
kernel. Afterwards the tree counts the bytes as free. Their memory stays until they are sent."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Service:
    """Objects and counters that all sessions of one worker share."""

    tree: CacheTree
    disk: DiskTier | None
    config: WorkerConfig
    counts: verbs.Status
    scheduler: SendScheduler
    note_served: NoteServed
    clock: Clock


class Session:
    """Fetches of one peer, and adverts for it. Used only by the worker's thread."""

    def __init__(
        self, name: str, channel: Channel, service: Service, wake: Callable[[], None]
    ) -> None:
        self.name: Final = name
        self.channel: Final = channel
        self._service = service
        self._clock = service.clock
        self._heard_at_s = service.clock()
        self._has_left = False
        self._streams: dict[int, Stream] = {}
        max_changes = service.config.max_pending_changes
        self.advertiser: Final = Advertiser(service.tree, max_changes, wake, service.clock)
        self._waiting: dict[Fetch, float] = {}
        """Fetches that wait for pages from disk, each with the time at which its wait began."""
        self._read: deque[tuple[Fetch, Callable[[], None], LetGo]] = deque()
        """Fetches that the disk has answered. For each, the function that continues the fetch, and
        the function that releases its pages. Any thread appends."""
        self._num_promotions = 0
        """Number of this peer's reads in the disk's queue, with those for cancelled fetches."""
        self._wake = wake
        self._last_id = 0

    def take(self) -> None:
        """Read and handle the peer's messages. Raises ProtocolError for a message that ends the
        session."""
        self._heard_at_s = self._clock()
        for message in self.channel.receive(_no_receiver):
            self._handle(wire.decode_to_worker(message))

    def go_on(self) -> None:
        """Continue fetches that the disk has answered. Raises ProtocolError like `take`."""
        while self._read:
            request, begin, let_go = self._read.popleft()
            self._num_promotions -= 1
            try:
                if self._waiting.pop(request, None) is not None:
                    begin()
            finally:
                let_go()

    def tell(self, message: wire.ToPeer) -> None:
        """Send a message to the peer. Without effect if the channel has ended."""
        self.channel.put_message(wire.encode(message))

    def advertise(self) -> None:
        """Send the tree's changes to the peer, in at most `BURST` messages."""
        for _ in range(BURST):
            if not self.channel.has_room or (advert := self.advertiser.next()) is None:
                return
            self.tell(advert)

    def expire(self) -> str:
        """End late fetches. Return why the session has to end, or an empty text if it continues."""
        for id, stream in tuple(self._streams.items()):
            if stream.deadline.has_passed and not stream.is_over:
                self._fail(id, DeadlineExceeded("the worker stopped at the deadline"))
        silence_s = self._service.config.silence_s
        if self._has_left:
            return "goodbye"
        if self.channel.error is not None:
            return str(self.channel.error)
        is_silent = self._clock() - self._heard_at_s > silence_s
        return f"silent for {silence_s} s" if is_silent else ""

    def close(self, reason: str) -> None:
        """End the session and its fetches. The scheduler releases their pages later."""
        self._stop_waiting(list(self._waiting), "lost")
        self.go_on()
        for stream in self._streams.values():
            self._service.counts.fetches_by_outcome["lost"] += not stream.is_over
            stream.end()
        self.advertiser.close()
        self.tell(wire.Bye(reason=reason))

    def _handle(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Learned():
                self.advertiser.learned()
            case wire.Fetch():
                self._fetch(message)
            case wire.Cancel():
                self._cancel(message.id)
            case wire.Ping():
                self.tell(wire.Pong())
            case wire.Bye():
                self._has_left = True
            case _:
                raise ProtocolError(f"a {type(message).__name__} has no place in a session")

    def _fetch(self, fetch: Fetch) -> None:
        """Serve a fetch. If its pages are only on disk, read them into memory first."""
        if fetch.id <= self._last_id:
            why = f"fetch {fetch.id} comes after fetch {self._last_id}"
            self._fail(fetch.id, ProtocolError(why))
            return
        self._last_id = fetch.id
        deadline = wire.deadline_of(fetch, self._clock)
        begun_s = self._clock()

        def note(num_bytes: int, error: str) -> None:
            self._service.note_served(fetch, self._clock() - begun_s, num_bytes, error)

        def drained(stream: Stream) -> None:
            self._streams.pop(stream.id, None)
            note(stream.sent_bytes, "it ended before all was sent" if stream.is_cut else "")

        def go_on() -> None:
            try:
                stream = self._streams[fetch.id] = self._stream(fetch, deadline)
            except FetchError as exc:
                self._fail(fetch.id, exc)
                note(0, wire.reason(exc))
            else:
                self._service.scheduler.add(stream, drained)

        if fetch.as_copy:
            go_on()
        else:
            self._when_read(fetch, deadline, go_on)

    def _stream(self, fetch: Fetch, deadline: Deadline) -> Stream:
        """Lease the pages of a fetch (keep them in memory), and return its stream. Raises
        FetchError if the fetch cannot be served."""
        service, num_held = self._service, self._service.scheduler.num_held
        if not _has_share(len(self._streams), service.config.max_streams - num_held):
            raise FetchError(
                f"the worker already serves {num_held} fetches, {len(self._streams)} of them for "
                f"this peer, of at most {service.config.max_streams}"
            )
        pages = wire.pages_of(fetch.pages)
        steps = wire.steps_of(fetch, service.tree.family.num_layers)
        if not pages or not steps:
            raise ProtocolError("a fetch names no pages or no steps")
        if not MIN_FRAME_BYTES <= fetch.frame_bytes <= MAX_FRAME_BYTES:
            raise ProtocolError(f"a fetch asks for frames of {fetch.frame_bytes} bytes")
        until = Deadline(deadline.at_s + _DRAIN_S, self._clock)
        parts = {part_of(step) for step in steps}
        lease = service.tree.lease(
            ModelId(fetch.model), pages, self.name, until, parts, is_use=not fetch.as_copy
        )
        if lease is None:
            raise StaleEntry(f"{len(pages)} pages of model {fetch.model} are no longer here")
        reads_arena = fetch.reads_arena and service.config.shared_memory
        most_bytes = service.scheduler.limit(LOCATED_BYTES if reads_arena else fetch.frame_bytes)
        try:
            payloads = payloads_of(lease, steps, most_bytes, first_byte=fetch.first_byte)
        except FetchError:
            lease.release()
            raise
        arena = service.tree.memory if reads_arena else None
        return Stream(fetch.id, lease, payloads, self.channel, deadline, arena)

    def _when_read(self, fetch: Fetch, deadline: Deadline, go_on: Callable[[], None]) -> None:
        """Call `go_on` once the disk has put the pages of a fetch into memory, or has failed. Never
        do so after a cancel.

        Do not wait if the pages are in memory, or not on disk, or if this peer already has its
        share of the disk's queue. Also count hits and misses by tier.
        """
        service, disk = self._service, self._service.disk
        model, last = ModelId(fetch.model), PageHash(fetch.pages[-PAGE_HASH_BYTES:])
        parts = {part_of(Step(*step)) for step in fetch.steps}
        missing = [part for part in parts if not service.tree.has(model, last, part)]
        is_here = not missing
        is_on_disk = disk is not None and all(disk.has(model, last, part) for part in missing)
        (service.counts.hits if is_here else service.counts.misses)["memory"] += 1
        if disk is not None and not is_here:
            (service.counts.hits if is_on_disk else service.counts.misses)["disk"] += 1
        if (
            is_here
            or disk is None
            or not (is_on_disk and _has_share(self._num_promotions, disk.num_free_promotions))
        ):
            go_on()
            return

        def read(let_go: LetGo) -> None:
            self._read.append((fetch, go_on, let_go))
            self._wake()

        self._waiting[fetch] = self._clock()
        self._num_promotions += 1
        disk.promote(model, last, parts, deadline, lambda: fetch in self._waiting, read)

    def _stop_waiting(self, fetches: Sequence[Fetch], outcome: str) -> None:
        for fetch in fetches:
            waited_s = self._clock() - self._waiting.pop(fetch)
            self._service.counts.fetches_by_outcome[outcome] += 1
            why = f"it was {outcome} while its pages were read from disk"
            self._service.note_served(fetch, waited_s, 0, why)

    def _cancel(self, id: int) -> None:
        """Handle a peer's Cancel. The peer gives up the fetch, or has copied all of its bytes."""
        self._stop_waiting([it for it in self._waiting if it.id == id], "cancelled")
        if (stream := self._streams.get(id)) is not None:
            if not stream.is_over:
                self._service.counts.fetches_by_outcome["cancelled"] += 1
            stream.end()
        self.tell(wire.Ended(id=id, error=Why.CANCELLED.value))

    def _fail(self, id: int, error: FetchError) -> None:
        """Tell the peer that a fetch failed, and end the stream with this id. If a peer uses an id
        twice, both fetches end."""
        if (stream := self._streams.get(id)) is not None:
            stream.end()
        counts = self._service.counts
        counts.num_protocol_errors += isinstance(error, ProtocolError)
        message = wire.ended_by(id, error)
        counts.fetches_by_outcome[message.error] += 1
        self.tell(message)


def _has_share(num_own: int, num_free: int) -> bool:
    """Return whether a peer that uses `num_own` places may take one more, if `num_free` are free. A
    place is for one fetch, or for one read in the disk's queue.

    A peer may use at most three times as many places as are free. One greedy peer gets 3/4 of all
    places, each of n greedy peers 3/(3n + 1). So one place stays free for a peer without any.
    """
    return num_own < 3 * num_free


def _no_receiver(frame: Frame) -> None:
    """Raise ProtocolError, because a peer must not send payloads to a worker."""
    raise ProtocolError(f"a peer sent a frame of {frame.size} bytes")
