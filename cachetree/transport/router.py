"""The worker's sockets: bounded messages in and out, and the data connection of each session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.clock import Clock
from cachetree.errors import ConfigError, ProtocolError
from cachetree.ids import Location
from cachetree.transport import verbs, wire
from cachetree.transport.address import Address
from cachetree.transport.channel import Channel
from cachetree.transport.config import WorkerConfig
from cachetree.transport.data_port import DataPort
from cachetree.transport.handshake import FAILURES, Gate, Refusal, refusal_at_worker
from cachetree.transport.sealing import Ticket
from cachetree.transport.wakeup import Wakeup

_MAX_RECEIVED: Final = 64
"""Messages taken in one turn."""
_KEEPALIVE_PROBES: Final = 3


class Received(NamedTuple):
    """One message of a peer."""

    identity: bytes
    message: wire.ToWorker | ProtocolError
    """Or what is wrong with it."""
    is_admin: bool
    """Whether it is an order of someone who may give it."""
    host: str
    """From where it came, for people."""


class PeerGone(Exception):
    """The connection to that peer is closed."""


class Router:
    """A bound ROUTER socket, and the data connections of those who greeted there.

    Used by one thread after construction; never blocks but in `wait`.
    """

    def __init__(
        self, listen: Address, wakeup: Wakeup, gate: Gate, config: WorkerConfig, clock: Clock
    ) -> None:
        """The connection of a peer that vanishes from the network ends after `silence_s`.

        Raises ConfigError where an address cannot be bound.
        """
        self._context = zmq.Context()
        self._gate = gate
        self._poller = zmq.Poller()
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        self._socket = self._new_socket(listen, config.silence_s)
        gate.guard(self._context, self._socket, wire.MAX_HEADER_BYTES)
        try:
            self.address: Final = self._bind(listen)
            self._data_port = DataPort(
                Address(listen.host, config.bulk_port),
                gate.seals,
                self._poller,
                wakeup.wake,
                config,
                clock,
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        gate.register(self._poller)
        self.channels: Final[dict[bytes, Channel]] = {}
        """The data connections that are open, by the session."""
        self._ready: set[object] = set()
        """Sockets and descriptors that the last `wait` found ready."""
        self._refusals: list[Refusal] = []
        self._has_disconnects = False

    def wait(self, timeout_ms: int) -> None:
        """Until something arrives, a peer leaves, the wakeup is woken, or the time is over.

        Handshakes that wait are decided on the way.
        """
        self._ready = {source for source, _ in self._poller.poll(timeout_ms)}
        self._refusals = list(self._gate.answer())
        self._has_disconnects = False
        for _ in range(_MAX_RECEIVED if self._monitor in self._ready else 0):
            if not self._monitor.poll(0):
                break
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._has_disconnects = True
            elif refusal := refusal_at_worker(event["event"], event["value"]):
                self._refusals.append(refusal)

    def receive(self) -> Iterator[Received]:
        """What has arrived over ZMQ."""
        if self._socket not in self._ready:
            return
        for _ in range(_MAX_RECEIVED):
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            header = self._socket.recv(copy=False)
            is_whole, more = not header.more, header.more
            while more:
                more = self._socket.recv(copy=False).more
            message: wire.ToWorker | ProtocolError
            try:
                if not is_whole:
                    raise ProtocolError("a message has more than one frame")
                message = wire.decode_to_worker(header.buffer)
            except ProtocolError as exc:
                message = exc
            is_admin = isinstance(message, verbs.Order) and self._gate.is_admin(header)
            yield Received(identity, message, is_admin, str(header.get("Peer-Address")))

    def invite(self, identity: bytes) -> Ticket:
        """To open a data connection for a new session."""
        return self._data_port.invite(identity)

    def arrivals(self) -> Iterator[Channel]:
        """The data connections that were opened since."""
        for arrival in self._data_port.arrivals(self._ready):
            if isinstance(arrival, Refusal):
                self._refusals.append(arrival)
                continue
            identity, channel = arrival
            self.channels[identity] = channel
            self._poller.register(channel.fileno(), zmq.POLLIN)
            self._ready.add(channel.fileno())
            yield channel

    def readable(self) -> Iterator[tuple[bytes, Channel]]:
        """The data connections that something came over."""
        for identity, channel in tuple(self.channels.items()):
            if channel.fileno() in self._ready:
                yield identity, channel

    def forget(self, identity: bytes) -> None:
        """The session is over."""
        self._data_port.forget(identity)
        channel = self.channels.pop(identity, None)
        if channel is not None:
            self._poller.unregister(channel.fileno())
            channel.close()

    def send(self, identity: bytes, message: wire.ToPeer) -> bool:
        """False where the peer's queue is full; raises PeerGone."""
        header = wire.encode(message)
        try:
            self._socket.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as exc:
            if exc.errno == zmq.EHOSTUNREACH:
                raise PeerGone(identity.hex()) from exc
            raise
        self._socket.send(header)
        return True

    def has_disconnects(self) -> bool:
        """Whether the last `wait` saw a connection close."""
        return self._has_disconnects

    def refusals(self) -> Sequence[Refusal]:
        """Handshakes that the last `wait` saw fail."""
        return self._refusals

    def close(self) -> None:
        for identity in tuple(self.channels):
            self.forget(identity)
        self._data_port.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=0)

    def _new_socket(self, listen: Address, silence_s: float) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.IPV6, int(listen.is_ipv6))
        _bound_silence(socket, silence_s)
        return socket

    def _bind(self, listen: Address) -> Location:
        try:
            self._socket.bind(listen.url)
        except zmq.ZMQError as exc:
            raise ConfigError(
                f"listen is {listen.url!r}, which cannot be bound ({exc.strerror}); choose "
                "another port, or port 0 for a free one"
            ) from exc
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILURES)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        return Location(self._socket.get_string(zmq.LAST_ENDPOINT))


def _bound_silence(socket: zmq.Socket[bytes], silence_s: float) -> None:
    """Have the kernel end a TCP connection whose other end does not acknowledge any more."""
    socket.set(zmq.TCP_MAXRT, round(silence_s * 1000))  # With something to send,
    socket.set(zmq.TCP_KEEPALIVE, 1)  # and without: the kernel asks.
    probe_s = max(1, round(silence_s / _KEEPALIVE_PROBES / 2))
    socket.set(zmq.TCP_KEEPALIVE_IDLE, max(1, round(silence_s / 2)))
    socket.set(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    socket.set(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)
