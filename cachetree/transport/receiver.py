"""Receiving pages: frames checked and placed straight where they stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cachetree.checkpoint import Family
from cachetree.clock import Clock
from cachetree.errors import FetchError, ProtocolError
from cachetree.ids import ModelId, PageHash, Span
from cachetree.memory import ArenaReader, Staging, checksum_of_parts
from cachetree.transport import verbs, wire
from cachetree.transport.channel import Arrival, Channel
from cachetree.transport.config import WorkerConfig
from cachetree.transport.frames import Frame
from cachetree.transport.wire import Fetch, Located, Refused
from cachetree.tree import CacheTree, Reservation, join_hashes

NOT_ASKED: Final = 0
"""In place of a request's id."""


class FetchReceiver:
    """Places the frames of one fetch, over one request or several. For the peer's thread only.

    What has been placed was verified and stays; the next request begins behind it.
    """

    def __init__(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        self.staging: Final = staging
        self.id = NOT_ASKED
        """Of the request under way."""
        self.num_requests = 0
        self.asked_at_s = 0.0
        self.broken_at_s = 0.0
        """When the last request broke off."""
        self.asked_at_bytes = 0
        """What the link had carried when the request was sent."""
        self._model = model
        self._pages = pages
        self._sizes = list(staging.sizes.values())
        self._step = 0
        self._offset = 0
        self._skip_empty()

    @property
    def is_complete(self) -> bool:
        return self._step == len(self._sizes)

    @property
    def rest_bytes(self) -> int:
        """Not placed yet."""
        return self.staging.num_bytes - self.staging.num_landed_bytes

    def fits(self, family: Family) -> bool:
        """Whether every step has the size of all pages."""
        return self._sizes == [
            len(self._pages) * family.page_bytes(step.kind) for step in self.staging.steps
        ]

    def request(self, id: int, *, frame_bytes: int, reads_arena: bool) -> Fetch:
        """Ask for what has not been placed yet."""
        self.id = id
        self.num_requests += 1
        return Fetch(
            id=id,
            model=self._model,
            pages=join_hashes(self._pages),
            steps=tuple((step.kind, step.layer) for step in self.staging.steps),
            first_step=self._step,
            first_offset=self._offset,
            frame_bytes=frame_bytes,
            reads_arena=reads_arena,
            timeout_ms=int(self.staging.deadline.remaining_s() * 1000),
            traceparent=self.staging.traceparent,
        )

    def read(self, located: Located, arena: ArenaReader) -> None:
        """Copy and verify; raises as `buffer_for` and `mark_received` do.

        The lease keeps the worker's memory until it hears that all of it was copied.
        """
        places = [Span(*place) for place in located.places if 0 <= place[0] < place[1]]
        size = located.frame.size
        if sum(map(len, places)) != size or len(places) < len(located.places):
            raise ProtocolError(f"{located.places} are not places of {size} bytes")
        buffer = self.buffer_for(located.frame)
        try:
            digest = checksum_of_parts(arena.copy_in_pieces(buffer, places))
        except OSError as exc:
            raise ProtocolError(f"the worker's memory cannot be read: {exc}") from exc
        self.mark_received(located.frame, is_sound=digest == located.frame.checksum)

    def buffer_for(self, frame: Frame) -> memoryview:
        """Where the next frame goes; raises ProtocolError, or what ended the staging."""
        if self.is_complete or (frame.step, frame.offset) != (self._step, self._offset):
            raise ProtocolError(
                f"a frame for step {frame.step} at {frame.offset} came where step {self._step} "
                f"at {self._offset} was due"
            )
        if not 0 < frame.size <= self._sizes[self._step] - self._offset:
            raise ProtocolError(
                f"a frame of {frame.size} bytes at {self._offset} does not fit step "
                f"{self._step} of {self._sizes[self._step]} bytes"
            )
        return self.staging.room(self.staging.steps[self._step], self._offset, frame.size)

    def mark_received(self, frame: Frame, *, is_sound: bool) -> None:
        """Count what was put into the last buffer; raises ProtocolError where it is not sound."""
        if not is_sound:
            raise ProtocolError(
                f"the checksum of step {frame.step} at {frame.offset} is wrong; the bytes were "
                "damaged on their way"
            )
        self.staging.land(self.staging.steps[self._step], frame.size)
        self._offset += frame.size
        self._skip_empty()

    def _skip_empty(self) -> None:
        while not self.is_complete and self._offset == self._sizes[self._step]:
            self._step += 1
            self._offset = 0


_MAX_OF_ONE_PEER: Final = 4

_Refusal = tuple[Refused, str]
"""Why a store is not taken."""


@dataclass(eq=False)
class StoreReceiver:
    """Stores of one peer that are under way. Used by the worker's thread only.

    A store takes its room from the tree's budget before its first byte is sent; only whole ones
    are ever seen. Where one ends early, for whatever reason, its room goes back at once.
    """

    _tree: CacheTree
    _config: WorkerConfig
    _counts: verbs.Counts
    _channel: Channel
    """Where the peer is told what becomes of its stores."""
    _clock: Clock
    _open: dict[int, tuple[FetchReceiver, Reservation]] = field(default_factory=dict, init=False)

    def begin(self, store: wire.Store) -> None:
        """Reserve room for a store, or say why not."""
        try:
            refusal = self._begin(store)
        except ProtocolError as exc:
            refusal = Refused.PROTOCOL, wire.reason(exc)
        if refusal is not None:
            self._refuse(store.id, *refusal)

    def buffer_for(self, frame: Frame) -> memoryview | None:
        """Where its bytes go; None where its store has ended, or ends with it."""
        receiver, _ = self._open.get(frame.id, (None, None))
        try:
            return None if receiver is None else receiver.buffer_for(frame)
        except FetchError as exc:
            self._refuse(frame.id, Refused.PROTOCOL, wire.reason(exc))
            return None

    def is_pending(self, frame: Frame) -> bool:
        """Whether the store still goes on that `buffer_for` was asked for."""
        return frame.id in self._open

    def mark_received(self, arrival: Arrival) -> None:
        """A frame came whole into its buffer; its store may have ended already."""
        id = arrival.frame.id
        receiver, reservation = self._open.get(id, (None, None))
        if receiver is None or reservation is None:
            return
        try:
            receiver.mark_received(arrival.frame, is_sound=arrival.is_sound)
        except FetchError as exc:
            self._refuse(id, Refused.PROTOCOL, wire.reason(exc))
            return
        self._counts.num_received_bytes += arrival.frame.size
        if receiver.is_complete:
            self._close(id)
            reservation.commit()
            self._counts.stores_by_outcome["stored"] += 1
            self._reply(wire.Stored(id=id))

    def cancel(self, id: int) -> None:
        """The peer gives up a store; nothing where there is none."""
        if id in self._open:
            self._close(id).release()

    def expire(self) -> None:
        """End what is late."""
        for id, (receiver, _) in tuple(self._open.items()):
            if receiver.staging.deadline.has_passed:
                self._refuse(id, Refused.DEADLINE, "the store's time is over")

    def close(self) -> None:
        """The peer is gone."""
        for id in tuple(self._open):
            self.cancel(id)

    def _reply(self, message: wire.StoreAnswer) -> None:
        self._channel.put_message(wire.encode(message))

    def _close(self, id: int) -> Reservation:
        self._counts.num_open_stores -= 1
        return self._open.pop(id)[1]

    def _begin(self, store: wire.Store) -> _Refusal | None:
        family = self._tree.family
        if not self._config.accepts:
            why = "this worker accepts no stores; set worker.accepts to true there"
            return Refused.CLOSED, why
        num_open = self._counts.num_open_stores
        if num_open >= self._config.max_stores or len(self._open) >= _MAX_OF_ONE_PEER:
            return Refused.BUSY, f"{num_open} stores are open"
        if store.id in self._open:
            raise ProtocolError(f"store {store.id} is open already")
        pages, parents = wire.pages_of(store.pages), wire.pages_of(store.parent)
        steps = wire.steps_of_store(family.num_layers, store.e_layers)
        if not pages or len(set(pages)) < len(pages) or len(parents) > 1 or not store.model:
            raise ProtocolError("a store names no model, no pages, a page twice, or two parents")
        model, parent = ModelId(store.model), parents[0] if parents else None
        reservation = self._tree.reserve(model, parent, pages, store.e_layers)
        if reservation is None:
            if parent is not None and not self._tree.has(model, parent):
                return Refused.UNKNOWN_PARENT, f"model {model} has no page before these"
            return Refused.NO_ROOM, f"there is no room for {len(pages)} pages"
        if not reservation.pages:
            self._counts.stores_by_outcome["known"] += 1
        else:
            num_pages = len(reservation.pages)
            sizes = {step: num_pages * family.page_bytes(step.kind) for step in steps}
            deadline = wire.deadline_of(store, self._clock)
            staging = Staging(sizes, deadline, {it: reservation.views(it) for it in steps})
            receiver = FetchReceiver(model, reservation.pages, staging)
            self._open[store.id] = (receiver, reservation)
            self._counts.num_open_stores += 1
        self._reply(wire.Wanted(id=store.id, skipped=reservation.skipped))
        return None

    def _refuse(self, id: int, why: Refused, reason: str) -> None:
        self.cancel(id)
        self._counts.stores_by_outcome[why.value] += 1
        self._counts.num_protocol_errors += why is Refused.PROTOCOL
        self._reply(wire.StoreRefused(id=id, error=why, reason=reason))
