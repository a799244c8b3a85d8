"""The port at which peers open data connections, one for each session. Each connection needs a
ticket."""

from __future__ import annotations

import hmac
import select
import socket
from collections.abc import Callable, Container, Iterator
from itertools import chain, takewhile
from typing import Final

import zmq

from cachetree.clock import Clock, Deadline
from cachetree.transport.address import Address, open_port
from cachetree.transport.channel import Channel, bound_silence, tune
from cachetree.transport.config import WorkerConfig
from cachetree.transport.crowd import crowding, source_of
from cachetree.transport.frames import TOKEN_BYTES, Ticket, Unsealed, new_ticket
from cachetree.transport.handshake import Refusal

_BACKLOG: Final = 4096
"""Largest number of connections that wait in the kernel. The kernel reports a connection when its
first bytes arrive, or all of them if so many wait."""
_MAX_TICKETS: Final = 1024
"""Largest number of unused tickets. If there are more, the oldest ticket becomes invalid."""
_MAX_SILENT: Final = 256
"""Largest number of accepted connections that have sent nothing yet."""
_SILENT_S: Final = 2
"""Seconds after which a connection that has sent nothing is closed."""


class DataPort:
    """Listening TCP socket for data connections; it admits only connections with a ticket. Never
    blocks. Except the constructor, only for the worker's thread."""

    def __init__(
        self,
        listen: Address,
        seals: Callable[[bytes], Unsealed],
        poller: zmq.Poller,
        wake: Callable[[], None],
        config: WorkerConfig,
        clock: Clock,
    ) -> None:
        """`seals` returns the seals (encryption) of a connection for its ticket's key. Other
        threads call `wake`, as in `SendQueue`.

        Raises ConfigError if the address cannot be bound.
        """
        self._seals = seals
        self._wake = wake
        self._config = config
        self._clock = clock
        self._epoll = select.epoll()
        """Poller of this port's connections, because ZMQ's poller is slow with very many."""
        self._listener = open_port(listen, field="bulk_port", backlog=_BACKLOG)
        self._listener.setblocking(False)
        # The kernel reports a connection once its first bytes have arrived.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
        self._port: Final[int] = self._listener.getsockname()[1]
        self._tickets: dict[str, tuple[Ticket, Deadline]] = {}
        """Unused tickets by the name of the peer, oldest first."""
        self._silent: dict[int, tuple[socket.socket, Deadline]] = {}
        """Connections that have sent nothing yet, the oldest first. Keys are file descriptors."""
        self._sources: dict[int, str] = {}
        """Source of each connection in `_silent`: a part of its IP address (`crowd.source_of`)."""
        self._epoll.register(self._listener, select.EPOLLIN)
        poller.register(self._epoll.fileno(), zmq.POLLIN)

    def issue_ticket(self, who: str) -> Ticket:
        """Issue a ticket for one connection of peer `who`, valid for `silence_s`. It replaces the
        peer's earlier ticket."""
        if len(self._tickets) == _MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        ticket = new_ticket(self._port)
        self._tickets.pop(who, None)
        self._tickets[who] = ticket, Deadline.after(self._config.silence_s, self._clock)
        return ticket

    def arrivals(self, ready: Container[object]) -> Iterator[tuple[str, Channel] | Refusal]:
        """Accept connections. Yield the peer's name and the channel for each one with a valid
        ticket, and a refusal for each one that sent something else.

        `ready` has the descriptors that a poll found ready.
        """
        if self._epoll.fileno() in ready:
            spoken = [descriptor for descriptor, _ in self._epoll.poll(0)]
            for descriptor in chain(spoken, self._accepted()):
                if descriptor in self._silent:
                    yield from self._hear(descriptor)
        else:
            self._epoll.modify(self._listener, select.EPOLLIN)
        for descriptor in takewhile(lambda it: self._silent[it][1].has_passed, [*self._silent]):
            self._dismiss(descriptor)

    def close(self) -> None:
        self._listener.close()
        for descriptor in tuple(self._silent):
            self._dismiss(descriptor)
        self._epoll.close()

    def _accepted(self) -> Iterator[int]:
        for _ in range(_MAX_SILENT):
            try:
                connection, (host, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # No descriptors are left. The next turn tries again.
                self._epoll.modify(self._listener, 0)
                return
            if len(self._silent) == _MAX_SILENT:
                self._dismiss(crowding(self._sources))
            self._sources[connection.fileno()] = source_of(host)
            connection.setblocking(False)
            deadline = Deadline.after(_SILENT_S, self._clock)
            self._silent[connection.fileno()] = connection, deadline
            self._epoll.register(connection, select.EPOLLIN)
            yield connection.fileno()

    def _hear(self, descriptor: int) -> Iterator[tuple[str, Channel] | Refusal]:
        """Read the token of a connection's ticket, if it has arrived, and admit or close the
        connection. A partial token is invalid."""
        connection, _ = self._silent[descriptor]
        token, host = b"", ""
        try:
            token, (host, *_) = connection.recv(TOKEN_BYTES), connection.getpeername()
        except BlockingIOError:
            return
        except OSError:  # The connection is closed.
            pass
        who = self._owner(token)
        if who is None:
            self._dismiss(descriptor)
            if token:
                yield Refusal(host, f"{host} came to bulk_port without a ticket")
            return
        del self._silent[descriptor], self._sources[descriptor]
        self._epoll.unregister(connection)
        tune(connection)
        bound_silence(connection, self._config.silence_s)
        yield who, Channel(connection, self._seals(self._tickets.pop(who)[0].key), self._wake)

    def _dismiss(self, descriptor: int) -> None:
        connection, _ = self._silent.pop(descriptor)
        del self._sources[descriptor]
        connection.close()

    def _owner(self, token: bytes) -> str | None:
        """Return the name of the peer to which this token was issued. None if no valid ticket has
        it. Takes the same time for every token."""
        owner = None
        for who, (ticket, deadline) in self._tickets.items():
            if hmac.compare_digest(ticket.token, token) and not deadline.has_passed:
                owner = who
        return owner
