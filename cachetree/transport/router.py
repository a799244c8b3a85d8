"""The worker's sockets: bounded messages in, headers and zero-copy payloads out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.errors import ConfigError, ProtocolError
from cachetree.ids import Location
from cachetree.transport import verbs, wire
from cachetree.transport.address import Address
from cachetree.transport.config import WorkerConfig
from cachetree.transport.handshake import FAILURES, Gate, KeyGate, Refusal, refusal_at_worker
from cachetree.transport.sealing import UNSEALED, Ticket, Unsealed, new_ticket, seals_of
from cachetree.transport.wakeup import Wakeup

_MAX_RECEIVED: Final = 64
"""Messages taken in one turn."""
_KEEPALIVE_PROBES: Final = 3


NOTHING: Final = memoryview(b"")


class Received(NamedTuple):
    """One message of a peer."""

    identity: bytes
    message: wire.ToWorker | ProtocolError
    """Or what is wrong with it."""
    payload: memoryview
    """Empty for all but a `Frame`."""
    is_admin: bool
    """Whether it is an order of someone who may give it."""


class PeerGone(Exception):
    """The connection to that peer is closed."""


class Router:
    """A bound ROUTER socket, and another one for sessions that CURVE does not carry.

    Used by one thread after construction; never blocks but in `wait`.
    """

    def __init__(self, listen: Address, wakeup: Wakeup, gate: Gate, config: WorkerConfig) -> None:
        """What a peer may send at once: a header, or a frame of a store.

        The connection of one that vanishes from the network ends after `silence_s`.
        """
        self._context = zmq.Context()
        self._gate = gate
        self._poller = zmq.Poller()
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        self._monitors: list[zmq.Socket[bytes]] = []
        payload_bytes = config.frame_bytes if config.accepts else 0
        max_message_bytes = max(payload_bytes, wire.MAX_HEADER_BYTES)
        self._socket = self._new_socket(listen, config.silence_s)
        gate.guard(self._context, self._socket, max_message_bytes)
        self._bind(self._socket, listen, "listen")
        self._sockets = [self._socket]
        self.address: Final = Location(self._socket.get_string(zmq.LAST_ENDPOINT))
        gate.register(self._poller)
        self._bulk = config.bulk_in_use
        if isinstance(gate, KeyGate) and self._bulk != "curve":
            there = Address(listen.host, config.bulk_port)
            self._sockets.append(self._new_socket(there, config.silence_s))
            gate.guard_sessions(self._sockets[-1], max_message_bytes)
            self._bind(self._sockets[-1], there, "bulk_port")
        self._seals: dict[bytes, Unsealed] = {}
        """Of the sessions on the last socket."""
        self._awaited: set[bytes] = set()
        """Those of them that nothing has come from yet."""
        self._refusals: list[Refusal] = []
        self._has_disconnects = False

    def wait(self, timeout_ms: int) -> None:
        """Until something arrives, a peer leaves, the wakeup is woken, or the time is over.

        Handshakes that wait are decided on the way.
        """
        self._poller.poll(timeout_ms)
        self._refusals = list(self._gate.answer())
        self._has_disconnects = False
        for monitor in self._monitors:
            for _ in range(_MAX_RECEIVED):
                if not monitor.poll(0):
                    break
                event = recv_monitor_message(monitor)
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    self._has_disconnects = True
                elif refusal := refusal_at_worker(event["event"], event["value"]):
                    self._refusals.append(refusal)

    def receive(self) -> Iterator[Received]:
        """What has arrived."""
        for socket in self._sockets:
            for _ in range(_MAX_RECEIVED):
                try:
                    identity = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                header = socket.recv(copy=False)
                payload, num_frames = NOTHING, 1
                more = header.more
                while more:
                    frame = socket.recv(copy=False)
                    more, payload = frame.more, frame.buffer
                    num_frames += 1
                if (identity in self._seals) is (socket is self._socket):
                    continue  # Of a session that is over, or of another one than it says.
                self._awaited.discard(identity)
                seals = self._seals.get(identity, UNSEALED)
                try:
                    opened = seals.open(header.buffer)
                    payload = seals.open_payload(payload) if num_frames > 1 else payload
                    received: wire.ToWorker | ProtocolError = _read(opened, payload, num_frames)
                except ProtocolError as exc:
                    received = exc
                is_admin = isinstance(received, verbs.Order) and self._gate.is_admin(header)
                yield Received(identity, received, payload, is_admin)

    def admit(self, identity: bytes) -> tuple[bytes, Ticket | None]:
        """The identity under which messages of a new session come, and how its peer gets there."""
        if not isinstance(self._gate, KeyGate) or self._bulk == "curve":
            return identity, None
        port = int(self._sockets[-1].get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        ticket = new_ticket(self._bulk, port)
        self._gate.tokens.add(ticket.token)
        self._awaited.add(ticket.token)
        self._seals[ticket.token] = seals_of(ticket, is_worker=True)
        return ticket.token, ticket

    def forget(self, identity: bytes) -> None:
        """The session is over."""
        if self._seals.pop(identity, None) is not None:
            self._awaited.discard(identity)
            self._gate.forget(identity)

    def send(self, identity: bytes, message: wire.ToPeer) -> bool:
        """False where the peer's queue is full, or it is still on its way; raises PeerGone."""
        header = wire.encode(message)
        socket = self._address(identity)
        if socket is None:
            return False
        socket.send(self._seals.get(identity, UNSEALED).seal(header))
        return True

    def send_frame(
        self, identity: bytes, frame: wire.Frame | wire.Located, payload: memoryview
    ) -> zmq.MessageTracker | None:
        """Hand `payload` over without a copy; it must stay until the tracker is done.

        None where the peer's queue is full; raises PeerGone.
        """
        header = wire.encode(frame)
        socket = self._address(identity)
        if socket is None:
            return None
        seals = self._seals.get(identity, UNSEALED)
        if not payload:
            socket.send(seals.seal(header))
            return zmq.MessageTracker()
        socket.send(seals.seal(header), zmq.SNDMORE)
        return socket.send(seals.seal_payload(payload), copy=False, track=True)

    def has_disconnects(self) -> bool:
        """Whether the last `wait` saw a connection close."""
        return self._has_disconnects

    def refusals(self) -> Sequence[Refusal]:
        """Handshakes that the last `wait` saw fail."""
        return self._refusals

    def close(self) -> None:
        for socket, monitor in zip(self._sockets, self._monitors, strict=True):
            socket.disable_monitor()
            monitor.close(linger=0)
        self._context.destroy(linger=0)

    def _new_socket(self, listen: Address, silence_s: float) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.IPV6, int(listen.is_ipv6))
        _bound_silence(socket, silence_s)
        return socket

    def _bind(self, socket: zmq.Socket[bytes], listen: Address, field: str) -> None:
        try:
            socket.bind(listen.url)
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{field} is {listen.url!r}, which cannot be bound ({exc.strerror}); choose "
                "another port, or port 0 for a free one"
            ) from exc
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILURES)
        self._monitors.append(monitor)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _address(self, identity: bytes) -> zmq.Socket[bytes] | None:
        """Begin a message to a peer; seal none before, because none may be sealed in vain."""
        if identity in self._awaited:
            return None
        socket = self._sockets[-1] if identity in self._seals else self._socket
        try:
            socket.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError as exc:
            if exc.errno == zmq.EHOSTUNREACH:
                raise PeerGone(identity.hex()) from exc
            raise
        return socket


def _read(header: memoryview, payload: memoryview, num_frames: int) -> wire.ToWorker:
    message = wire.decode_to_worker(header)
    size = message.size if isinstance(message, wire.Frame) else 0
    expected = 2 if isinstance(message, wire.Frame) else 1
    if num_frames != expected or payload.nbytes != size:
        raise ProtocolError(
            f"a {type(message).__name__} of {num_frames} frames brings {payload.nbytes} bytes of "
            f"payload instead of {size}"
        )
    return message


def _bound_silence(socket: zmq.Socket[bytes], silence_s: float) -> None:
    """Have the kernel end a TCP connection whose other end does not acknowledge any more."""
    socket.set(zmq.TCP_MAXRT, round(silence_s * 1000))  # With something to send,
    socket.set(zmq.TCP_KEEPALIVE, 1)  # and without: the kernel asks.
    probe_s = max(1, round(silence_s / _KEEPALIVE_PROBES / 2))
    socket.set(zmq.TCP_KEEPALIVE_IDLE, max(1, round(silence_s / 2)))
    socket.set(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    socket.set(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)
