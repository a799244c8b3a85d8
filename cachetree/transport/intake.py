"""What peers store in a worker: frames checked and placed straight into a reservation."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Final

from cachetree.clock import Clock, Deadline
from cachetree.errors import FetchError, ProtocolError
from cachetree.ids import ModelId, PageHash
from cachetree.memory.staging import Staging
from cachetree.transport import wire
from cachetree.transport.channel import Arrival
from cachetree.transport.config import WorkerConfig
from cachetree.transport.frames import Frame
from cachetree.transport.landing import Landing
from cachetree.transport.wire import Refused
from cachetree.tree.lease import Reservation
from cachetree.tree.tree import CacheTree

Reply = wire.Wanted | wire.StoreRefused | wire.Stored | wire.Credit

_MAX_OF_ONE_PEER: Final = 4


class Intake:
    """Stores under way, of all peers. Used by the worker's thread only.

    A store takes its room from the tree's budget before its first byte is sent; only whole ones
    are ever seen. Where one ends early, for whatever reason, its room goes back at once.
    """

    def __init__(
        self, tree: CacheTree, config: WorkerConfig, counts: Counter[str], clock: Clock
    ) -> None:
        self._tree = tree
        self._config = config
        self._counts = counts
        self._clock = clock
        self._open: dict[tuple[bytes, int], tuple[Landing, Reservation]] = {}
        self._refused: deque[tuple[bytes, wire.StoreRefused]] = deque()
        """Who still has to be told."""

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, identity: bytes, store: wire.Store) -> Reply:
        """Reserve room for a store, or say why not."""
        self._counts["stores"] += 1
        try:
            return self._begin(identity, store)
        except _Refusal as exc:
            return self._refuse(store.id, exc.why, str(exc))
        except ProtocolError as exc:
            return self._refuse(store.id, Refused.PROTOCOL, wire.reason(exc))

    def room(self, identity: bytes, frame: Frame) -> memoryview | None:
        """Where its bytes go; None where its store has ended, or ends with it."""
        landing, _ = self._open.get((identity, frame.id), (None, None))
        try:
            return None if landing is None else landing.room(frame)
        except FetchError as exc:
            self._refused.append((identity, self._break(identity, frame.id, exc)))
            return None

    def wants(self, identity: bytes, frame: Frame) -> bool:
        """Whether the store still goes on that `room` was given for."""
        return (identity, frame.id) in self._open

    def placed(self, identity: bytes, arrival: Arrival) -> Reply | None:
        """A frame came whole into its room; None where its store has ended already."""
        id, size = arrival.frame.id, arrival.frame.size
        landing, reservation = self._open.get((identity, id), (None, None))
        if landing is None or reservation is None:
            return None
        try:
            landing.land(arrival.frame, is_sound=arrival.is_sound)
        except FetchError as exc:
            return self._break(identity, id, exc)
        self._counts["received_bytes"] += size
        if not landing.is_complete:
            return wire.Credit(id=id, num_bytes=landing.take_credit())
        del self._open[identity, id]
        reservation.commit()
        self._counts["store stored"] += 1
        return wire.Stored(id=id)

    def cancel(self, identity: bytes, id: int) -> None:
        """The peer gives up a store; nothing where there is none."""
        _, reservation = self._open.pop((identity, id), (None, None))
        if reservation is not None:
            reservation.release()

    def forget(self, identity: bytes) -> None:
        """The peer is gone."""
        for key in [key for key in self._open if key[0] == identity]:
            self.cancel(*key)

    def expire(self) -> Iterator[tuple[bytes, wire.StoreRefused]]:
        """End what is late; whom to tell of that, and of frames that did not fit."""
        while self._refused:
            yield self._refused.popleft()
        for (identity, id), (landing, _) in tuple(self._open.items()):
            if landing.staging.deadline.has_passed:
                self.cancel(identity, id)
                yield identity, self._refuse(id, Refused.DEADLINE, "the store's time is over")

    def _begin(self, identity: bytes, store: wire.Store) -> Reply:
        family = self._tree.family
        if not self._config.accepts:
            raise _Refusal(
                Refused.CLOSED, "this worker accepts no stores; set worker.accepts to true there"
            )
        if len(self._open) >= self._config.max_stores or self._num_of(identity) >= _MAX_OF_ONE_PEER:
            raise _Refusal(Refused.BUSY, f"{len(self._open)} stores are open")
        if (identity, store.id) in self._open:
            raise ProtocolError(f"store {store.id} is open already")
        pages, parents = wire.split_pages(store.pages), wire.split_pages(store.parent)
        steps = wire.steps_of_store(family.num_layers, store.e_layers)
        if not pages or len(set(pages)) < len(pages) or len(parents) > 1 or not store.model:
            raise ProtocolError("a store names no model, no pages, a page twice, or two parents")
        model, parent = ModelId(store.model), parents[0] if parents else None
        reservation = self._tree.reserve(model, parent, pages, store.e_layers)
        if reservation is None:
            raise self._why_not(model, parent, len(pages))
        if not reservation.pages:
            self._counts["store known"] += 1
        else:
            seconds = min(max(store.timeout_ms, 0) / 1000, self._config.max_fetch_s)
            num_pages = len(reservation.pages)
            sizes = {step: num_pages * family.page_bytes(step.kind) for step in steps}
            deadline = Deadline.after(seconds, self._clock)
            room = Staging(sizes, deadline, lambda num_bytes: reservation.whole())
            landing = Landing(model, reservation.pages, room)
            self._open[identity, store.id] = (landing, reservation)
        return wire.Wanted(
            id=store.id,
            skipped=reservation.skipped,
            frame_bytes=self._config.frame_bytes,
            window_bytes=self._config.window_bytes,
        )

    def _break(self, identity: bytes, id: int, error: FetchError) -> wire.StoreRefused:
        self.cancel(identity, id)
        return self._refuse(id, Refused.PROTOCOL, wire.reason(error))

    def _num_of(self, identity: bytes) -> int:
        return sum(key[0] == identity for key in self._open)

    def _why_not(self, model: ModelId, parent: PageHash | None, num_pages: int) -> _Refusal:
        if parent is not None and not self._tree.has(model, parent):
            return _Refusal(Refused.UNKNOWN_PARENT, f"model {model} has no page before these")
        return _Refusal(Refused.NO_ROOM, f"there is no room for {num_pages} pages")

    def _refuse(self, id: int, why: Refused, reason: str) -> wire.StoreRefused:
        self._counts["refused_stores"] += 1
        self._counts[f"store {why.value}"] += 1
        self._counts["protocol_errors"] += why is Refused.PROTOCOL
        return wire.StoreRefused(id=id, error=why.value, reason=reason)


class _Refusal(Exception):
    """A store that is allowed, but cannot be taken now."""

    def __init__(self, why: Refused, reason: str) -> None:
        super().__init__(reason)
        self.why = why
