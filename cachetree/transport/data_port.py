"""Where peers open the data connections of their sessions: whoever brings a ticket is let in."""

from __future__ import annotations

import hmac
import select
import socket
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Final

import zmq

from cachetree.clock import Clock, Deadline
from cachetree.transport.address import Address, open_port
from cachetree.transport.channel import Channel, bound_silence, tune
from cachetree.transport.config import WorkerConfig
from cachetree.transport.frames import TOKEN_BYTES, Ticket, Unsealed, new_ticket
from cachetree.transport.handshake import Refusal

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
