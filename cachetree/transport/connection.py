"""The peer's sockets: one DEALER and one data connection, never reused for the next session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.clock import Clock
from cachetree.errors import CacheTreeError, FetchError, ProtocolError
from cachetree.memory import ArenaFile, ArenaReader
from cachetree.transport import channel, wire
from cachetree.transport.address import Address
from cachetree.transport.channel import Arrival, Channel, Sink
from cachetree.transport.config import PeerConfig
from cachetree.transport.handshake import FAILURES, Credentials
from cachetree.transport.receiver import NOT_ASKED
from cachetree.transport.sealing import Ticket
from cachetree.transport.wakeup import Wakeup

_MAX_RECEIVED: Final = 64
_ENDS: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILURES
_LINGER_MS: Final = 100
"""For the goodbye."""


class Connection:
    """A connection attempt and what comes of it. Used by one thread; blocks only in `wait`.

    It does not reconnect: one that is down stays down, so that nothing of a worker's former life
    can be taken for the next one's. Payloads have a connection of their own, once the worker's
    hello has said where.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        to: Address,
        wakeup: Wakeup,
        max_frame_bytes: int,
        credentials: Credentials,
        clock: Clock = time.monotonic,
    ) -> None:
        self._to = to
        self._wakeup = wakeup
        self._credentials = credentials
        self._max_frame_bytes = max_frame_bytes
        self._clock = clock
        self.is_greeted = False
        """The worker's hello was good."""
        self.is_whole = False
        """The data connection works too."""
        self.heard_at_s = self.pinged_at_s = self._data_heard_at_s = clock()
        self.channel: Channel | None = None
        """The data connection, from `go_on` on."""
        self._bulk_port = 0
        self.window_bytes = 0
        """Most bytes of one fetch that the worker has under way."""
        self.last_id = NOT_ASKED
        """Of the newest fetch or store."""
        self.owed: Final[dict[int, int]] = {}
        """By fetch that ended early, the most bytes that may still come in its frames."""
        self._ready: set[object] = set()
        self.arena: ArenaReader | None = None
        """The worker's memory, where it is to be read."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._socket.set(zmq.RECONNECT_IVL, -1)
        self._socket.set(zmq.IPV6, int(to.is_ipv6))
        credentials.secure(self._socket, wire.MAX_HEADER_BYTES)
        self._monitor = self._socket.get_monitor_socket(_ENDS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        self._socket.connect(to.url)

    @property
    def _bulk_url(self) -> str:
        """Where the data connection leads, for people."""
        return f"bulk_port {self._bulk_port} of {self._to.host}"

    def go_on(self, ticket: Ticket | None, who: str) -> None:
        """Open the data connection."""
        if ticket is None:
            raise ProtocolError(f"{who} gave no ticket for a data connection")
        self._bulk_port, self.window_bytes = ticket.port, ticket.window_bytes
        self.channel = channel.connect(
            self._to.host,
            ticket,
            self._credentials.seals(ticket.key),
            self._max_frame_bytes,
            self._wakeup.wake,
        )
        self._poller.register(self.channel.fileno(), zmq.POLLIN)
        self._data_heard_at_s = self._clock()

    def new_id(self) -> int:
        """For the next fetch or store."""
        self.last_id += 1
        return self.last_id

    def wait(self, timeout_ms: int) -> None:
        """Until something arrives or ends, the wakeup is woken, or the time is over."""
        self._ready = {source for source, _ in self._poller.poll(timeout_ms)}

    def receive(self) -> Iterator[wire.ToPeer]:
        """What has arrived over ZMQ; raises ProtocolError for what cannot be a message."""
        if self._socket not in self._ready:
            return
        for _ in range(_MAX_RECEIVED):
            try:
                header = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if header.more:
                raise ProtocolError("a message has more than one frame")
            yield wire.decode_to_peer(header.buffer)

    def receive_frames(self, sink: Sink) -> Iterator[Arrival]:
        """What has arrived over the data connection; raises ProtocolError likewise."""
        if self.channel is not None and self.channel.fileno() in self._ready:
            received_bytes = self.channel.received_bytes
            yield from self.channel.receive(sink)
            if self.channel.received_bytes != received_bytes:
                self._data_heard_at_s = self._clock()

    def send(self, message: wire.ToWorker) -> None:
        """Raises FetchError where the worker has stopped reading."""
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again as exc:
            raise FetchError("the worker does not read what it is sent") from exc

    def require_heard(self, config: PeerConfig, who: str) -> None:
        """Raises FetchError where one of the two connections was silent for too long."""
        now_s = self._clock()
        patience_s = config.silence_s if self.is_greeted else config.connect_s
        if now_s - self.heard_at_s > patience_s:
            raise FetchError(f"{who} was silent for {patience_s} s")
        patience_s = config.silence_s if self.is_whole else config.connect_s
        if self.is_greeted and now_s - self._data_heard_at_s > patience_s:
            raise FetchError(f"{who} was silent for {patience_s} s at {self._bulk_url}")

    def end(self, who: str) -> CacheTreeError | None:
        """Why there is no connection, where the last `wait` saw it fail or close.

        Read what has arrived first. The first event says the most; ask once.
        """
        if self._monitor in self._ready:
            event = recv_monitor_message(self._monitor)
            return self._credentials.failure(event["event"], event["value"], who)
        if self.channel is not None and self.channel.error is not None:
            return FetchError(
                f"{who} closed the connection to its {self._bulk_url}, or it cannot be reached "
                f"there: {self.channel.error}"
            )
        return None

    def share(self, arena: ArenaFile) -> None:
        """Read from the worker's memory; it comes in frames where that cannot be."""
        with suppress(OSError):
            self.arena = ArenaReader(arena)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        if self.channel is not None:
            self.channel.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
