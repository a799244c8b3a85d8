"""Where peers open the data connections of their sessions: whoever brings a ticket is let in."""

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
"""Connections that wait in the kernel; it keeps those that have said nothing for itself, and shows
the others first. In a crowd of so many it shows all of them."""
_MAX_TICKETS: Final = 1024
"""Given out and not used yet; for one more the oldest goes."""
_MAX_SILENT: Final = 256
"""Connections that were shown and have said nothing."""
_SILENT_S: Final = 2
"""A connection that has said nothing by then is closed."""


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
        self._epoll = select.epoll()
        """Of its own: in a crowd ZMQ's poller would take longer than all the rest."""
        self._listener = open_port(listen, field="bulk_port", backlog=_BACKLOG)
        self._listener.setblocking(False)
        # Who brings a ticket is met with it in hand, however many come with none.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
        self._port: Final[int] = self._listener.getsockname()[1]
        self._tickets: dict[str, tuple[Ticket, Deadline]] = {}
        """Given out and not used yet, by whom they were given to; oldest first."""
        self._silent: dict[int, tuple[socket.socket, Deadline]] = {}
        """By descriptor; oldest first."""
        self._sources: dict[int, str] = {}
        """Of the same."""
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
            except OSError:  # There are no descriptors: not again before another turn.
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
        """What that connection says, if anything: a ticket comes whole, or it is none."""
        connection, _ = self._silent[descriptor]
        token, host = b"", ""
        try:
            token, (host, *_) = connection.recv(TOKEN_BYTES), connection.getpeername()
        except BlockingIOError:
            return
        except OSError:  # Nobody is there any more.
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
        """Of a ticket whose time is not over; takes the same time for every token."""
        owner = None
        for who, (ticket, deadline) in self._tickets.items():
            if hmac.compare_digest(ticket.token, token) and not deadline.has_passed:
                owner = who
        return owner
