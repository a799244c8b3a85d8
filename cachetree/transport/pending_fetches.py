"""The running fetches of one peer: start them, resume them after faults, end late ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from cachetree.checkpoint import Family
from cachetree.clock import Clock
from cachetree.errors import Cancelled, DeadlineExceeded, FetchError, ProtocolError
from cachetree.ids import ModelId, PageHash
from cachetree.memory import Staging
from cachetree.planning import Link
from cachetree.transport import wire
from cachetree.transport.backoff import Breaker
from cachetree.transport.config import PeerConfig
from cachetree.transport.connection import Connection
from cachetree.transport.frames import Frame
from cachetree.transport.pace import Bandwidth
from cachetree.transport.receiver import NOT_ASKED, FrameReceiver
from cachetree.transport.send_queue import MOST_BATCH_BYTES
from cachetree.transport.status import PeerStatus
from cachetree.tree import join_hashes

_TICK_S: Final = 0.01
"""Seconds between two checks for fetches that their readers gave up."""


class PendingFetches:
    """The running fetches of one peer. Used only by the peer's thread.

    If the connection ends, or frames are damaged or missing, a fetch waits for `resume`, which
    requests the missing bytes, on this connection or the next. A fetch may resume `max_retries`
    times, within `resume_s` and before its deadline. `breaker` counts each error of the worker or
    the link once. It does not count a busy worker, or a fetch that its reader gives up.
    """

    def __init__(
        self,
        who: str,
        family: Family,
        config: PeerConfig,
        breaker: Breaker,
        counts: PeerStatus,
        clock: Clock,
    ) -> None:
        self._who = who
        self.bandwidth: Final = Bandwidth(clock)
        self._family = family
        self._config = config
        self._breaker = breaker
        self._counts = counts
        self._clock = clock
        self.connection: Connection | None = None
        """Present connection, set by `Peer`. None without a connection."""
        self.as_copies = False
        """Whether this peer fetches to keep copies, not for requests. `Pulls` sets it."""
        self._asked: dict[int, FrameReceiver] = {}
        """Fetches with a running request. Keys are the requests' ids."""
        self._broken: list[FrameReceiver] = []
        """Interrupted fetches, which wait for `resume`."""

    @property
    def _connection(self) -> Connection:
        assert self.connection is not None
        return self.connection

    @property
    def _carried_bytes(self) -> int:
        """Bytes received over this connection; with shared memory, all bytes copied from there."""
        connection = self._connection
        return (
            connection.channel.received_bytes
            if connection.arena is None
            else self._counts.num_landed_bytes
        )

    @property
    def _all(self) -> list[FrameReceiver]:
        return [*self._asked.values(), *self._broken]

    @property
    def free_link(self) -> Link | None:
        """Measured link for a new fetch. `ahead` counts the bytes of ended fetches that may still
        arrive before it. Thread-safe."""
        link, connection = self.bandwidth.link, self.connection
        if link is None or connection is None:
            return link
        asked = tuple(self._asked.items())
        given_up = [(id, it) for id, it in asked if it.staging.error is not None]
        # The peer's thread may end a fetch now. Read in this order, its bytes count exactly once.
        owed = {id: self._owed_to(it, connection) for id, it in given_up} | connection.owed
        frame_bytes = self._config.frame_bytes
        return replace(link, ahead=sum(owed.values()), frame_bytes=frame_bytes)

    @property
    def is_under_way(self) -> bool:
        """Whether the worker has not yet sent all that this peer requested."""
        return bool(self._asked)

    def timeout_s(self) -> float:
        """Return the seconds until `check` has to run. Infinity if there are no fetches."""
        remaining_s = [it.staging.deadline.remaining_s() for it in self._all]
        return min(_TICK_S, *remaining_s) if remaining_s else math.inf

    def begin(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        sizes = [len(pages) * self._family.page_bytes(step.kind) for step in staging.steps]
        if staging.is_complete:
            return
        if sizes != list(staging.sizes.values()):
            self.refuse(staging, FetchError("the staging's sizes are not those of the pages"))
        elif not self._breaker.admits():
            error = FetchError(f"{self._who} failed too often; another fetch is trying it now")
            self.refuse(staging, error)
        else:
            self._ask(FrameReceiver(model, pages, staging, self._landed, self._broke))

    def refuse(self, staging: Staging, error: FetchError) -> None:
        """Fail a fetch that cannot start."""
        self._counts.num_failed_fetches += 1
        staging.fail(error)

    def receiver_of(self, frame: Frame) -> FrameReceiver | None:
        """Return the receiver of a frame. None if the frame's request was cancelled. Raises
        ProtocolError for an id that was never requested."""
        if frame.id > self._connection.last_id:
            raise ProtocolError(f"{self._who} sent a frame that nobody asked for")
        receiver = self._asked.get(frame.id)
        if receiver is None and (owed_bytes := self._connection.owed.get(frame.id)):
            self._connection.owed[frame.id] = max(0, owed_bytes - frame.size)
        return receiver

    def read(self, located: wire.Located) -> None:
        """Copy a payload out of the worker's memory."""
        receiver, arena = self.receiver_of(located.frame), self._connection.arena
        if receiver is None:
            return
        if arena is None:
            why = f"{self._who} sent places of a memory that is not read here"
            self._broke(receiver, ProtocolError(why))
            return
        receiver.read(located, arena)
        if receiver.staging.is_complete:  # Until this message, the worker keeps the pages.
            self._connection.send(wire.Cancel(id=located.frame.id))

    def ended(self, message: wire.Ended) -> None:
        """Handle an `Ended`: the worker sends nothing more for this fetch."""
        if (receiver := self._asked.get(message.id)) is not None:
            self._broke(receiver, wire.error_of(message, self._who))
        self._connection.owed.pop(message.id, None)

    def check(self) -> None:
        """End fetches that are late, waited too long for `resume`, or lost their readers."""
        for receiver in self._all:
            error = receiver.staging.error
            if error is None and receiver.staging.deadline.has_passed:
                error = DeadlineExceeded(f"{self._who} did not send everything in time")
            waited_s = self._clock() - receiver.since_s if receiver.id == NOT_ASKED else 0.0
            if error is None and waited_s > self._config.resume_s:
                error = FetchError(
                    f"{self._who} did not come back within {self._config.resume_s} s"
                )
            if error is not None:
                self._end(receiver, error)

    def resume(self) -> None:
        """Request the missing bytes of interrupted fetches."""
        while self._broken:
            self._counts.num_retries += 1
            self._ask(self._broken.pop(0))

    def interrupt(self, error: FetchError) -> None:
        """Interrupt all fetches, because the connection has ended."""
        for receiver in tuple(self._asked.values()):
            self._suspend(receiver, error)

    def end(self, error: FetchError) -> None:
        """Fail all fetches. None of them resumes."""
        for receiver in self._all:
            self._end(receiver, type(error)(str(error)))

    def _ask(self, receiver: FrameReceiver) -> None:
        connection, staging = self._connection, receiver.staging
        receiver.id = connection.new_id()
        receiver.num_requests += 1
        receiver.since_s = self._clock()
        receiver.asked_at_bytes = self._carried_bytes
        try:
            fetch = wire.Fetch(
                id=receiver.id,
                model=receiver.model,
                pages=join_hashes(receiver.pages),
                steps=tuple((step.kind, step.layer) for step in staging.steps),
                first_byte=staging.num_landed_bytes,
                frame_bytes=self._config.frame_bytes,
                reads_arena=connection.arena is not None,
                timeout_ms=int(1000 * min(staging.deadline.remaining_s(), wire.MAX_REQUEST_S)),
                as_copy=self.as_copies,
                traceparent=staging.traceparent,
            )
            connection.send(fetch)
        except ProtocolError as exc:  # The pages do not fit into one message.
            receiver.id = NOT_ASKED
            self._end(receiver, exc)
        except Exception as exc:
            receiver.id = NOT_ASKED
            self._end(receiver, FetchError(f"internal error: {exc}"))
            raise
        else:
            self._asked[receiver.id] = receiver

    def _landed(self, receiver: FrameReceiver, num_bytes: int) -> None:
        self._counts.num_landed_bytes += num_bytes
        if receiver.staging.is_complete:
            self._measure(receiver, None)
            self._withdraw(receiver)
            self._breaker.succeeded()

    def _broke(self, receiver: FrameReceiver, error: FetchError) -> None:
        """Handle a fetch that cannot continue. After a ProtocolError (wrong or missing bytes) the
        fetch waits for `resume`. Any other error ends it."""
        if not isinstance(error, ProtocolError):
            self._end(receiver, error)
            return
        self._counts.num_protocol_errors += 1
        self._breaker.failed(error)
        self._connection.send(wire.Cancel(id=receiver.id))
        self._suspend(receiver, error)

    def _suspend(self, receiver: FrameReceiver, error: FetchError) -> None:
        self._withdraw(receiver)
        receiver.since_s = self._clock()
        if receiver.num_requests > self._config.max_retries:
            self._end(receiver, type(error)(str(error)))
        else:
            self._broken.append(receiver)

    def _owed_to(self, receiver: FrameReceiver, connection: Connection) -> int:
        """Return an upper bound on the bytes that the worker has sent for a fetch and that have not
        arrived yet."""
        staging = receiver.staging
        rest_bytes = staging.num_bytes - staging.num_landed_bytes
        return 0 if connection.arena is not None else min(rest_bytes, 2 * MOST_BATCH_BYTES)

    def _withdraw(self, receiver: FrameReceiver) -> None:
        """Note that the running request of a fetch has ended."""
        if self.connection is not None and (owed_bytes := self._owed_to(receiver, self.connection)):
            self.connection.owed[receiver.id] = owed_bytes
        del self._asked[receiver.id]
        receiver.id = NOT_ASKED

    def _end(self, receiver: FrameReceiver, error: FetchError) -> None:
        """Fail a fetch, and cancel its request. It does not resume."""
        error = receiver.staging.error or error
        if receiver.id != NOT_ASKED:
            if self.connection is not None:
                self.connection.send(wire.Cancel(id=receiver.id))
                self._measure(receiver, error)
            self._withdraw(receiver)
            if isinstance(error, DeadlineExceeded):
                self._breaker.failed(error)
        self._breaker.released()
        if receiver in self._broken:
            self._broken.remove(receiver)
        # Last, because the reader may then look at the counts and the link.
        self._counts.num_failed_fetches += not isinstance(error, Cancelled)
        receiver.staging.fail(error)

    def _measure(self, receiver: FrameReceiver, error: FetchError | None) -> None:
        num_bytes = self._carried_bytes - receiver.asked_at_bytes
        self.bandwidth.note(num_bytes, self._clock() - receiver.since_s, error)
