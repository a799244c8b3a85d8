"""The peer's socket: one DEALER for one connection, never reused for the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.arena import ArenaReader
from cachetree.errors import CacheTreeError, FetchError, ProtocolError
from cachetree.memory import ArenaFile
from cachetree.transport import wire
from cachetree.transport.address import Address
from cachetree.transport.handshake import FAILURES, Credentials, TicketHolder
from cachetree.transport.sealing import UNSEALED, Ticket, Unsealed, seals_of
from cachetree.transport.wakeup import Wakeup

_MAX_RECEIVED: Final = 64
_ENDS: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILURES
_LINGER_MS: Final = 100
"""For the goodbye."""

Received = tuple[wire.ToPeer, memoryview]
"""A message and its payload; the payload is empty for all but a `Frame`."""

_NOTHING: Final = memoryview(b"")

_SEEN_BYTES: Final = 31 << 20


def keep_freed_frames() -> None:
    """Have frames received into memory of earlier ones, without the page faults of new memory.

    glibc keeps for itself what is freed in blocks up to the largest one it has seen freed (at most
    32 MiB); ZMQ allocates a block per frame. So let it see one; no page of it is touched.
    """
    np.empty(_SEEN_BYTES, np.uint8)


class Connection:
    """A connection attempt and what comes of it. Used by one thread; blocks only in `wait`.

    It does not reconnect: one that is down stays down, so that nothing of a worker's former life
    can be taken for the next one's. It goes on elsewhere once, where the worker's hello says so.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        to: Address,
        wakeup: Wakeup,
        max_frame_bytes: int,
        credentials: Credentials,
    ) -> None:
        self._context = context
        self._wakeup = wakeup
        self._max_message_bytes = max(max_frame_bytes, wire.MAX_HEADER_BYTES)
        self._seals: Unsealed = UNSEALED
        self.arena: ArenaReader | None = None
        """The worker's memory, where it is to be read."""
        self._connect(to, credentials)

    @property
    def url(self) -> str:
        """Where it leads now."""
        return self._to.url

    def go_on(self, ticket: Ticket | None, who: str) -> None:
        """Have the rest of the session where the worker wants it, if that is not here.

        Raises AuthenticationError where it would be protected too little.
        """
        self._credentials.check(ticket, who)
        if ticket is not None:
            self._disconnect()
            self._seals = seals_of(ticket, is_worker=False)
            self._connect(Address(self._to.host, ticket.port), TicketHolder(ticket))

    def wait(self, timeout_ms: int) -> None:
        """Until something arrives or ends, the wakeup is woken, or the time is over."""
        ready = self._poller.poll(timeout_ms)
        self._has_events = any(source is self._monitor for source, _ in ready)

    def receive(self) -> Iterator[Received]:
        """What has arrived; raises ProtocolError for what cannot be a message."""
        for _ in range(_MAX_RECEIVED):
            try:
                header = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            payload = _NOTHING
            if header.more:
                frame = self._socket.recv(copy=False)
                payload = frame.buffer
                if frame.more:
                    raise ProtocolError("a message has more than two frames")
            message = wire.decode_to_peer(self._seals.open(header.buffer))
            if header.more:
                payload = self._seals.open_payload(payload)
            size = message.size if isinstance(message, wire.Frame) else 0
            if payload.nbytes != size:
                raise ProtocolError(
                    f"a {type(message).__name__} announces {size} bytes of payload and brings "
                    f"{payload.nbytes}"
                )
            yield message, payload

    def send(self, message: wire.ToWorker) -> None:
        """Raises FetchError where the worker has stopped reading."""
        header = self._seals.seal(wire.encode(message))
        try:
            self._socket.send(header, zmq.NOBLOCK)
        except zmq.Again as exc:
            raise FetchError("the worker does not read what it is sent") from exc

    def send_frame(self, frame: wire.Frame, payload: memoryview) -> zmq.MessageTracker:
        """Hand `payload` over without a copy; it must stay until the tracker is done."""
        header = self._seals.seal(wire.encode(frame))
        try:
            self._socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again as exc:
            raise FetchError("the worker does not read what it is sent") from exc
        tracker = self._socket.send(self._seals.seal_payload(payload), copy=False, track=True)
        assert tracker is not None
        return tracker

    def end(self, who: str) -> CacheTreeError | None:
        """Why there is no connection, where the last `wait` saw it fail or close.

        Read what has arrived first. The first event says the most; ask once.
        """
        if not self._has_events:
            return None
        event = recv_monitor_message(self._monitor)
        return self._credentials.failure(event["event"], event["value"], who)

    def share(self, arena: ArenaFile) -> None:
        """Read from the worker's memory; it comes in frames where that cannot be."""
        with suppress(OSError):
            self.arena = ArenaReader(arena)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        self._disconnect()

    def _connect(self, to: Address, credentials: Credentials) -> None:
        self._to = to
        self._credentials = credentials
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._socket.set(zmq.RECONNECT_IVL, -1)
        self._socket.set(zmq.IPV6, int(to.is_ipv6))
        credentials.secure(self._socket, self._max_message_bytes)
        self._monitor = self._socket.get_monitor_socket(_ENDS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._has_events = False
        self._socket.connect(to.url)

    def _disconnect(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
