"""The worker's socket: bounded messages in, headers and zero-copy payloads out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.errors import ConfigError, ProtocolError
from cachetree.ids import Location
from cachetree.transport import verbs, wire
from cachetree.transport.address import Address
from cachetree.transport.handshake import FAILURES, Gate, Refusal, refusal_at_worker
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
    """A bound ROUTER socket. Used by one thread after construction; never blocks but in `wait`."""

    def __init__(
        self,
        listen: Address,
        wakeup: Wakeup,
        gate: Gate,
        *,
        max_payload_bytes: int,
        silence_s: float,
    ) -> None:
        """What a peer may send at once: a header, or a payload of `max_payload_bytes`.

        The connection of one that vanishes from the network ends after `silence_s`.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.IPV6, int(listen.is_ipv6))
        _bound_silence(self._socket, silence_s)
        self._gate = gate
        try:
            gate.guard(self._context, self._socket, max(max_payload_bytes, wire.MAX_HEADER_BYTES))
            self._socket.bind(listen.url)
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"listen is {listen.url!r}, which cannot be bound ({exc.strerror}); choose "
                "another port, or port 0 for a free one"
            ) from exc
        self.address: Final = Location(self._socket.get_string(zmq.LAST_ENDPOINT))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILURES)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        gate.register(self._poller)
        self._refusals: list[Refusal] = []
        self._has_disconnects = False

    def wait(self, timeout_ms: int) -> None:
        """Until something arrives, a peer leaves, the wakeup is woken, or the time is over.

        Handshakes that wait are decided on the way.
        """
        self._poller.poll(timeout_ms)
        self._refusals = list(self._gate.answer())
        self._has_disconnects = False
        for _ in range(_MAX_RECEIVED):
            if not self._monitor.poll(0):
                break
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._has_disconnects = True
            elif refusal := refusal_at_worker(event["event"], event["value"]):
                self._refusals.append(refusal)

    def receive(self) -> Iterator[Received]:
        """What has arrived."""
        for _ in range(_MAX_RECEIVED):
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            header = self._socket.recv(copy=False)
            payload, num_frames = NOTHING, 1
            more = header.more
            while more:
                frame = self._socket.recv(copy=False)
                more, payload = frame.more, frame.buffer
                num_frames += 1
            try:
                received: wire.ToWorker | ProtocolError = _read(header.buffer, payload, num_frames)
            except ProtocolError as exc:
                received = exc
            is_admin = isinstance(received, verbs.Order) and self._gate.is_admin(header)
            yield Received(identity, received, payload, is_admin)

    def send(self, identity: bytes, message: wire.ToPeer) -> bool:
        """False where the peer's queue is full; raises PeerGone."""
        header = wire.encode(message)
        if not self._address(identity):
            return False
        self._socket.send(header)
        return True

    def send_frame(
        self, identity: bytes, frame: wire.Frame | wire.Located, payload: memoryview
    ) -> zmq.MessageTracker | None:
        """Hand `payload` over without a copy; it must stay until the tracker is done.

        None where the peer's queue is full; raises PeerGone.
        """
        header = wire.encode(frame)
        if not self._address(identity):
            return None
        if not payload:
            self._socket.send(header)
            return zmq.MessageTracker()
        self._socket.send(header, zmq.SNDMORE)
        return self._socket.send(payload, copy=False, track=True)

    def has_disconnects(self) -> bool:
        """Whether the last `wait` saw a connection close."""
        return self._has_disconnects

    def refusals(self) -> Sequence[Refusal]:
        """Handshakes that the last `wait` saw fail."""
        return self._refusals

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=0)

    def _address(self, identity: bytes) -> bool:
        try:
            self._socket.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as exc:
            if exc.errno == zmq.EHOSTUNREACH:
                raise PeerGone(identity.hex()) from exc
            raise
        return True


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
