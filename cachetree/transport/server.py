"""The worker's sockets: questions and their answers, and the data connection of each session."""

from __future__ import annotations

import hmac
import select
import socket
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.clock import Clock, Deadline
from cachetree.errors import ConfigError, ProtocolError
from cachetree.ids import Location
from cachetree.transport import verbs, wire
from cachetree.transport.address import Address, open_port
from cachetree.transport.channel import Channel, bound_silence, silence_limits, tune
from cachetree.transport.config import WorkerConfig
from cachetree.transport.frames import MAX_MESSAGE_BYTES, TOKEN_BYTES, Ticket, Unsealed, new_ticket
from cachetree.transport.handshake import FAILURES, Gate, Refusal, refusal_at_worker
from cachetree.transport.wakeup import Wakeup

_BACKLOG: Final = 4096
"""Connections that wait in the kernel; it keeps those that have said nothing for itself, and shows
the others first."""
_MAX_TICKETS: Final = 1024
"""Given out and not used yet; for one more the oldest goes."""
_MAX_PENDING: Final = 256
"""Connections that have shown a part of a ticket; for one more the oldest goes."""
_TOKEN_S: Final = 2
"""A connection that has not shown all of it by then is closed."""


class DataPort:
    """A listening TCP socket. Used by the worker's thread after construction; never blocks."""

    def __init__(
        self,
        listen: Address,
        seals: Callable[[bytes], Unsealed],
        poller: zmq.Poller,
        wake: Callable[[], None],
        config: WorkerConfig,
        clock: Clock,
    ) -> None:
        """`seals` makes those of a key; `wake` is called from other threads, as in `SendQueue`.

        Raises ConfigError where the address cannot be bound."""
        self._seals = seals
        self._wake = wake
        self._config = config
        self._clock = clock
        self._listener = open_port(listen, field="bulk_port", backlog=_BACKLOG)
        self._listener.setblocking(False)
        # Who brings a ticket is met with it in hand, however many come with none.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _TOKEN_S)
        self._port: Final[int] = self._listener.getsockname()[1]
        self._tickets: dict[str, tuple[Ticket, Deadline]] = {}
        """Given out and not used yet, by whom they were given to; oldest first."""
        self._pending: dict[int, tuple[socket.socket, bytearray, Deadline]] = {}
        """By descriptor, with what each has said so far; oldest first."""
        self._epoll = select.epoll()
        """Of its own: in a crowd ZMQ's poller would take longer than all the rest."""
        self._epoll.register(self._listener, select.EPOLLIN)
        poller.register(self._epoll.fileno(), zmq.POLLIN)

    def issue_ticket(self, who: str) -> Ticket:
        """For one connection of theirs within `silence_s`; they have no other ticket then."""
        if len(self._tickets) == _MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        ticket = new_ticket(self._port)
        self._tickets.pop(who, None)
        self._tickets[who] = ticket, Deadline.after(self._config.silence_s, self._clock)
        return ticket

    def arrivals(self, ready: Container[object]) -> Iterator[tuple[str, Channel] | Refusal]:
        """The connections whose ticket was good, with whose it was, and those that were closed.

        `ready` are the descriptors that a poll found ready.
        """
        for who, (_, deadline) in tuple(self._tickets.items()):
            if not deadline.has_passed:
                break
            del self._tickets[who]
        if self._epoll.fileno() in ready:
            for descriptor, _ in self._epoll.poll(0):
                if descriptor in self._pending:
                    yield from self._hear(descriptor)
            yield from self._accept()
        for descriptor, (_, _, deadline) in tuple(self._pending.items()):
            if not deadline.has_passed:
                break
            self._dismiss(descriptor)

    def close(self) -> None:
        self._listener.close()
        for descriptor in tuple(self._pending):
            self._dismiss(descriptor)
        self._epoll.close()

    def _accept(self) -> Iterator[tuple[str, Channel] | Refusal]:
        for _ in range(_MAX_PENDING):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # Nobody is there, or not any more, or there are no descriptors.
                return
            if len(self._pending) == _MAX_PENDING:
                self._dismiss(next(iter(self._pending)))
            connection.setblocking(False)
            deadline = Deadline.after(_TOKEN_S, self._clock)
            self._pending[connection.fileno()] = connection, bytearray(), deadline
            self._epoll.register(connection, select.EPOLLIN)
            yield from self._hear(connection.fileno())

    def _hear(self, descriptor: int) -> Iterator[tuple[str, Channel] | Refusal]:
        """What that connection has said by now, if anything."""
        connection, token, _ = self._pending[descriptor]
        try:
            part = connection.recv(TOKEN_BYTES - len(token))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        token += part
        if not part:
            self._dismiss(descriptor)
        elif len(token) == TOKEN_BYTES:
            yield self._admit(descriptor, token)

    def _admit(self, descriptor: int, token: bytearray) -> tuple[str, Channel] | Refusal:
        who = self._owner(token)
        if who is None:
            host = _host_of(self._pending[descriptor][0])
            self._dismiss(descriptor)
            return Refusal(host, f"{host} came to bulk_port without a ticket")
        connection, _, _ = self._pending.pop(descriptor)
        self._epoll.unregister(connection)
        tune(connection)
        bound_silence(connection, self._config.silence_s)
        seals = self._seals(self._tickets.pop(who)[0].key)
        return who, Channel(connection, seals, self._wake)

    def _owner(self, token: bytearray) -> str | None:
        """Takes the same time for every token."""
        owner = None
        for who, (ticket, _) in self._tickets.items():
            if hmac.compare_digest(ticket.token, token):
                owner = who
        return owner

    def _dismiss(self, descriptor: int) -> None:
        connection, _, _ = self._pending.pop(descriptor)
        connection.close()


def _host_of(connection: socket.socket) -> str:
    with suppress(OSError):
        return str(connection.getpeername()[0])
    return "someone"


_MAX_RECEIVED: Final = 64
"""Messages taken in one turn."""


class Received(NamedTuple):
    """One message of a peer."""

    identity: bytes
    message: wire.ToWorker | ProtocolError
    """Or what is wrong with it."""
    is_admin: bool
    """Whether it is an order of someone who may give it."""
    host: str
    """From where it came, for people."""


class Router:
    """A bound ROUTER socket, and the port for the sessions of those who greeted there.

    Used by one thread after construction; never blocks but in `wait`.
    """

    def __init__(self, listen: Address, gate: Gate, config: WorkerConfig, clock: Clock) -> None:
        """The connection of a peer that vanishes from the network ends after `silence_s`.

        Raises ConfigError where an address cannot be bound.
        """
        self._context = zmq.Context()
        self._gate = gate
        self._wakeup = Wakeup()
        self.wake: Final = self._wakeup.wake
        """Ends a `wait`; from any thread."""
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._socket = self._new_socket(listen, config.silence_s)
        gate.guard(self._context, self._socket, MAX_MESSAGE_BYTES)
        try:
            self.address: Final = self._bind(listen)
            self._data_port = DataPort(
                Address(listen.host, config.bulk_port),
                gate.seals,
                self._poller,
                self.wake,
                config,
                clock,
            )
        except ConfigError:
            self._context.destroy(linger=0)
            self._wakeup.close()
            raise
        gate.register(self._poller)
        self._ready: set[object] = set()
        """Sockets and descriptors that the last `wait` found ready."""

    def wait(self, timeout_ms: int) -> None:
        """Until something arrives, `wake` is called, or the time is over."""
        self._ready = {source for source, _ in self._poller.poll(timeout_ms)}
        self._wakeup.drain()

    def arrivals(self) -> Iterator[tuple[str, Channel] | Refusal]:
        """The channels that were opened since, and by whom; they are `drop`ped in the end. And who
        was not let in: handshakes that wait are decided on the way."""
        yield from self._gate.answer()
        for _ in range(_MAX_RECEIVED if self._monitor in self._ready else 0):
            if not self._monitor.poll(0):
                break
            event = recv_monitor_message(self._monitor)
            if refusal := refusal_at_worker(event["event"], event["value"]):
                yield refusal
        for arrival in self._data_port.arrivals(self._ready):
            if isinstance(arrival, tuple):
                self._poller.register(arrival[1].fileno(), zmq.POLLIN)
                self._ready.add(arrival[1].fileno())
            yield arrival

    def receive(self) -> Iterator[Received]:
        """What has arrived over ZMQ."""
        if self._socket not in self._ready:
            return
        for _ in range(_MAX_RECEIVED):
            try:
                identity, header, *more = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message: wire.ToWorker | ProtocolError
            try:
                if more:
                    raise ProtocolError("a message has more than one frame")
                message = wire.decode_to_worker(header.buffer)
            except ProtocolError as exc:
                message = exc
            is_admin = isinstance(message, verbs.Order) and self._gate.is_admin(header)
            yield Received(identity.bytes, message, is_admin, str(header.get("Peer-Address")))

    def issue_ticket(self, who: str) -> Ticket:
        return self._data_port.issue_ticket(who)

    def is_readable(self, channel: Channel) -> bool:
        return channel.fileno() in self._ready

    def drop(self, channel: Channel) -> None:
        self._poller.unregister(channel.fileno())
        channel.close()

    def send(self, identity: bytes, message: wire.ToPeer) -> None:
        """Over ZMQ; dropped where that peer is gone, or does not read."""
        self._socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        self._data_port.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=0)
        self._wakeup.close()

    def _new_socket(self, listen: Address, silence_s: float) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, int(listen.is_ipv6))
        socket.set(zmq.TCP_KEEPALIVE, 1)
        keepalive = zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT
        limits = silence_limits(silence_s)
        for option, value in zip((zmq.TCP_MAXRT, *keepalive), limits, strict=True):
            socket.set(option, value)
        return socket

    def _bind(self, listen: Address) -> Location:
        try:
            self._socket.bind(listen.url)
        except zmq.ZMQError as exc:
            raise ConfigError(
                f"listen is {listen.url!r}, which cannot be bound ({exc.strerror}); choose "
                "another port, or port 0 for a free one"
            ) from exc
        self._monitor = self._socket.get_monitor_socket(FAILURES)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        return Location(self._socket.get_string(zmq.LAST_ENDPOINT))
