"""What a worker does for one peer that has greeted it: its fetches, its stores, what it is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from cachetree.clock import Clock, Deadline
from cachetree.disk import DiskTier, LetGo
from cachetree.errors import DeadlineExceeded, FetchError, ProtocolError, StaleEntry
from cachetree.ids import PAGE_HASH_BYTES, ModelId, PageHash
from cachetree.memory import Staging
from cachetree.transport import verbs, wire
from cachetree.transport.advertise import Advertiser
from cachetree.transport.channel import Channel
from cachetree.transport.config import WorkerConfig
from cachetree.transport.frames import MAX_FRAME_BYTES, MIN_FRAME_BYTES, Frame
from cachetree.transport.receiver import NOT_ASKED, FetchReceiver
from cachetree.transport.sender import (
    BURST,
    LOCATED_BYTES,
    SendScheduler,
    Stream,
    payloads_of,
)
from cachetree.transport.tracing import NoteServed
from cachetree.transport.wire import Fetch, Store, Why
from cachetree.tree import CacheTree, Reservation

_DRAIN_S: Final = 5.0
"""A lease outlives its stream's deadline by this, for frames that the kernel does not take yet.
Later the tree may count the bytes as free; the memory itself stays until they are gone."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Service:
    """What all sessions of one worker serve from, and count in."""

    tree: CacheTree
    disk: DiskTier | None
    config: WorkerConfig
    counts: verbs.Status
    scheduler: SendScheduler
    note_served: NoteServed
    clock: Clock


class Session:
    """One peer's streams, stores and subscription. Used by the worker's thread only."""

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
        self._stores = StoreReceiver(service, self.tell)
        self._waiting: dict[Fetch | Store, float] = {}
        """Those that wait for pages to be read from disk, and since when."""
        self._read: deque[tuple[Fetch | Store, Callable[[], None], LetGo]] = deque()
        """Those for which that is over, how each goes on, and what then lets go of its pages;
        filled by any thread."""
        self._num_promotions = 0
        """Lines that the disk has not answered for, those of cancelled requests too."""
        self._wake = wake
        self._last_id = 0

    def take(self) -> None:
        """Do what the peer has said; raises ProtocolError where that ends the session."""
        self._heard_at_s = self._clock()
        for message in self.channel.receive(self._stores.receiver_of):
            self._handle(wire.decode_to_worker(message))

    def go_on(self) -> None:
        """With what no longer waits; raises as `take`."""
        while self._read:
            request, begin, let_go = self._read.popleft()
            self._num_promotions -= 1
            try:
                if self._waiting.pop(request, None) is not None:
                    begin()
            finally:
                let_go()

    def tell(self, message: wire.ToPeer) -> None:
        """Dropped where the channel is over."""
        self.channel.put_message(wire.encode(message))

    def advertise(self) -> None:
        """Tell the peer what is new in the tree, in at most `BURST` messages."""
        for _ in range(BURST):
            if not self.channel.has_room or (advert := self.advertiser.next()) is None:
                return
            self.tell(advert)

    def expire(self) -> str:
        """End what is late; why the session has to end, empty where it goes on."""
        for id, stream in tuple(self._streams.items()):
            if stream.deadline.has_passed and not stream.is_over:
                self._fail(id, DeadlineExceeded("the worker stopped at the deadline"))
        self._stores.expire()
        silence_s = self._service.config.silence_s
        if self._has_left:
            return "goodbye"
        if self.channel.error is not None:
            return str(self.channel.error)
        is_silent = self._clock() - self._heard_at_s > silence_s
        return f"silent for {silence_s} s" if is_silent else ""

    def close(self, reason: str) -> None:
        """End everything; the streams still have to drain."""
        self._stores.close()
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
            case wire.Store():
                self._store(message)
            case wire.Cancel():
                self._cancel(message.id)
            case wire.Ping():
                self.tell(wire.Pong())
            case wire.Bye():
                self._has_left = True
            case _:
                raise ProtocolError(f"a {type(message).__name__} has no place in a session")

    def _fetch(self, fetch: Fetch) -> None:
        """Open a fetch, after its pages have been read from disk where that is needed."""
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

        self._with_page(fetch, fetch.pages[-PAGE_HASH_BYTES:], deadline, go_on)

    def _stream(self, fetch: Fetch, deadline: Deadline) -> Stream:
        """Lease what a fetch names; raises FetchError where it cannot be served."""
        service, num_held = self._service, self._service.scheduler.num_held
        if not _has_share(len(self._streams), service.config.max_streams - num_held):
            raise FetchError(
                f"the worker already serves {num_held} fetches, {len(self._streams)} of them here, "
                f"of at most {service.config.max_streams}"
            )
        pages = wire.pages_of(fetch.pages)
        steps = wire.steps_of(fetch, service.tree.family.num_layers)
        if not pages or not steps:
            raise ProtocolError("a fetch names no pages or no steps")
        if not MIN_FRAME_BYTES <= fetch.frame_bytes <= MAX_FRAME_BYTES:
            raise ProtocolError(f"a fetch asks for frames of {fetch.frame_bytes} bytes")
        until = Deadline(deadline.at_s + _DRAIN_S, self._clock)
        lease = service.tree.lease(ModelId(fetch.model), pages, self.name, until)
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

    def _store(self, store: Store) -> None:
        """Begin a store, after the page before it has been read from disk likewise."""
        if self._service.config.accepts:
            deadline = wire.deadline_of(store, self._clock)
            begin = partial(self._stores.begin, store, deadline)
            self._with_page(store, store.parent, deadline, begin)
        else:
            self._stores.refuse(
                store.id, Why.CLOSED, "this worker accepts no stores; set worker.accepts to true"
            )

    def _with_page(
        self, request: Fetch | Store, page: bytes, deadline: Deadline, go_on: Callable[[], None]
    ) -> None:
        """Call `go_on` when `page` is in memory, or will not be; never after a cancel.

        At once where it is there, or on no disk, or this peer has its share of what waits for the
        disk. Fetches are counted by where their pages were.
        """
        service, disk = self._service, self._service.disk
        model, last = ModelId(request.model), PageHash(page)
        is_here = service.tree.has(model, last)
        is_on_disk = disk is not None and not is_here and disk.has(model, last)
        if isinstance(request, Fetch):
            (service.counts.hits if is_here else service.counts.misses)["memory"] += 1
            if disk is not None and not is_here:
                (service.counts.hits if is_on_disk else service.counts.misses)["disk"] += 1
        if disk is None or not (
            is_on_disk and _has_share(self._num_promotions, disk.num_free_promotions)
        ):
            go_on()
            return

        def read(let_go: LetGo) -> None:
            self._read.append((request, go_on, let_go))
            self._wake()

        self._waiting[request] = self._clock()
        self._num_promotions += 1
        disk.promote(model, last, deadline, lambda: request in self._waiting, read)

    def _stop_waiting(self, requests: Sequence[Fetch | Store], outcome: str) -> None:
        for request in requests:
            waited_s = self._clock() - self._waiting.pop(request)
            if isinstance(request, Fetch):
                self._service.counts.fetches_by_outcome[outcome] += 1
                why = f"it was {outcome} while its pages were read from disk"
                self._service.note_served(request, waited_s, 0, why)

    def _cancel(self, id: int) -> None:
        """The peer gives up what has that id, or has copied all of it."""
        self._stores.cancel(id)
        self._stop_waiting([it for it in self._waiting if it.id == id], "cancelled")
        if (stream := self._streams.get(id)) is not None:
            self._service.counts.fetches_by_outcome["cancelled"] += not stream.is_over
            stream.end()
        self.tell(wire.Ended(id=id, error=Why.CANCELLED.value))

    def _fail(self, id: int, error: FetchError) -> None:
        """Also ends the stream of that id: of one that was asked for twice, neither goes on."""
        if (stream := self._streams.get(id)) is not None:
            stream.end()
        counts = self._service.counts
        counts.num_protocol_errors += isinstance(error, ProtocolError)
        message = wire.ended_by(id, error)
        counts.fetches_by_outcome[message.error] += 1
        self.tell(message)


def _has_share(num_own: int, num_free: int) -> bool:
    """Whether a peer that has `num_own` places, while `num_free` are free, may have one more.

    It may have three times as many as stay free: one greedy peer has 3/4 of all, each of n has
    3/(3n + 1). So there is a place for a peer that has none.
    """
    return num_own < 3 * num_free


class StoreReceiver:
    """The store of one peer that is under way. Used by the worker's thread only.

    A store takes its room from the tree's budget before its first byte is sent; only whole ones
    are ever seen. Where one ends early, for whatever reason, its room goes back at once. A peer
    begins one when the one before has ended.
    """

    def __init__(self, service: Service, tell: Callable[[wire.StoreAnswer], None]) -> None:
        """`tell` is how the peer hears what becomes of them."""
        self._service = service
        self._counts = service.counts
        self._tell = tell
        self._open: FetchReceiver | None = None
        """The end of its staging is that of the reservation, too."""

    def begin(self, store: wire.Store, deadline: Deadline) -> None:
        """Reserve room for a store, or say why not."""
        try:
            self._begin(store, deadline)
        except ProtocolError as exc:
            self.refuse(store.id, Why.PROTOCOL, wire.reason(exc))

    def receiver_of(self, frame: Frame) -> FetchReceiver | None:
        """None where its store has ended."""
        return self._open if self._open is not None and self._open.id == frame.id else None

    def cancel(self, id: int) -> None:
        """The peer gives up a store; nothing where there is none."""
        if self._open is not None and self._open.id == id:
            self.close()

    def expire(self) -> None:
        """End what is late."""
        if self._open is not None and self._open.staging.deadline.has_passed:
            self.refuse(self._open.id, Why.DEADLINE, "the store's time is over")

    def close(self) -> None:
        """Nothing more comes of it."""
        if self._open is not None:
            self._open.id = NOT_ASKED
            self._open.staging.release()
            self._open = None
            self._counts.num_open_stores -= 1

    def _landed(self, reservation: Reservation, receiver: FetchReceiver, num_bytes: int) -> None:
        self._counts.num_received_bytes += num_bytes
        if receiver.staging.is_complete:
            id = receiver.id
            reservation.commit()
            self.close()
            self._counts.stores_by_outcome["stored"] += 1
            self._tell(wire.Stored(id=id))

    def _broke(self, receiver: FetchReceiver, error: FetchError) -> None:
        self.refuse(receiver.id, Why.PROTOCOL, wire.reason(error))

    def _begin(self, store: wire.Store, deadline: Deadline) -> None:
        tree = self._service.tree
        if self._open is not None:
            raise ProtocolError(f"store {store.id} comes before store {self._open.id} has ended")
        pages, parents = wire.pages_of(store.pages), wire.pages_of(store.parent)
        steps = wire.steps_of_store(tree.family.num_layers, store.e_layers)
        if not pages or len(set(pages)) < len(pages) or len(parents) > 1 or not store.model:
            raise ProtocolError("a store names no model, no pages, a page twice, or two parents")
        model, parent = ModelId(store.model), parents[0] if parents else None
        reservation = tree.reserve(model, parent, pages, store.e_layers)
        if reservation is None:
            if parent is not None and not tree.has(model, parent):
                why = f"model {model} has no page before these"
                self.refuse(store.id, Why.UNKNOWN_PARENT, why)
            else:
                self.refuse(store.id, Why.NO_ROOM, f"there is no room for {len(pages)} pages")
            return
        if not reservation.pages:
            self._counts.stores_by_outcome["known"] += 1
        else:
            pages = reservation.pages
            sizes = {step: len(pages) * tree.family.page_bytes(step.kind) for step in steps}
            views = {step: reservation.views(step) for step in steps}
            staging = Staging(sizes, deadline, views, lambda _: reservation.release())
            landed = partial(self._landed, reservation)
            self._open = FetchReceiver(model, pages, staging, landed, self._broke)
            self._open.id = store.id
            self._counts.num_open_stores += 1
        tree.names.hear(model, store.name)
        self._tell(wire.Wanted(id=store.id, skipped=reservation.skipped))

    def refuse(self, id: int, why: Why, reason: str) -> None:
        self.cancel(id)
        self._counts.stores_by_outcome[why.value] += 1
        self._counts.num_protocol_errors += why is Why.PROTOCOL
        self._tell(wire.Ended(id=id, error=why.value, reason=reason))
