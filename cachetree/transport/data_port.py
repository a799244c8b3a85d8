"""Where a worker's peers open their data connections: with a ticket, once."""

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
from cachetree.transport.handshake import Refusal
from cachetree.transport.sealing import TOKEN_BYTES, Ticket, Unsealed, new_ticket

_BACKLOG: Final = 4096
"""Connections that wait in the kernel; it keeps those that have said nothing for itself, and shows
the others first."""
_MAX_STRANGERS: Final = 256
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
        """`seals` makes those of a key; `wake` is called from other threads, as in `Outbox`.

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
        self._tickets: dict[bytes, Ticket] = {}
        """Given out and not used yet, by whom they were given to."""
        self._strangers: dict[int, tuple[socket.socket, bytearray, Deadline]] = {}
        """By descriptor, with what each has said so far; oldest first."""
        self._epoll = select.epoll()
        """Of its own: in a crowd ZMQ's poller would take longer than all the rest."""
        self._epoll.register(self._listener, select.EPOLLIN)
        poller.register(self._epoll.fileno(), zmq.POLLIN)

    def invite(self, identity: bytes) -> Ticket:
        """A ticket for a session that has no data connection yet."""
        ticket = self._tickets[identity] = new_ticket(self._port, self._config.window_bytes)
        return ticket

    def forget(self, identity: bytes) -> None:
        """Its ticket is not valid any more."""
        self._tickets.pop(identity, None)

    def arrivals(self, ready: Container[object]) -> Iterator[tuple[bytes, Channel] | Refusal]:
        """The connections whose ticket was good, and those that were closed.

        `ready` are the descriptors that a poll found ready.
        """
        if self._epoll.fileno() in ready:
            for descriptor, _ in self._epoll.poll(0):
                if descriptor in self._strangers:
                    yield from self._hear(descriptor)
            yield from self._accept()
        for descriptor, (_, _, deadline) in tuple(self._strangers.items()):
            if not deadline.has_passed:
                break
            self._dismiss(descriptor)

    def close(self) -> None:
        self._listener.close()
        for descriptor in tuple(self._strangers):
            self._dismiss(descriptor)
        self._epoll.close()

    def _accept(self) -> Iterator[tuple[bytes, Channel] | Refusal]:
        for _ in range(_MAX_STRANGERS):
            try:
                stranger, _ = self._listener.accept()
            except OSError:  # Nobody is there, or not any more, or there are no descriptors.
                return
            if len(self._strangers) == _MAX_STRANGERS:
                self._dismiss(next(iter(self._strangers)))
            stranger.setblocking(False)
            deadline = Deadline.after(_TOKEN_S, self._clock)
            self._strangers[stranger.fileno()] = stranger, bytearray(), deadline
            self._epoll.register(stranger, select.EPOLLIN)
            yield from self._hear(stranger.fileno())

    def _hear(self, descriptor: int) -> Iterator[tuple[bytes, Channel] | Refusal]:
        """What that stranger has said by now, if anything."""
        stranger, token, _ = self._strangers[descriptor]
        try:
            part = stranger.recv(TOKEN_BYTES - len(token))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        token += part
        if not part:
            self._dismiss(descriptor)
        elif len(token) == TOKEN_BYTES:
            yield self._admit(descriptor, token)

    def _admit(self, descriptor: int, token: bytearray) -> tuple[bytes, Channel] | Refusal:
        identity = self._owner(token)
        if identity is None:
            host = _host_of(self._strangers[descriptor][0])
            self._dismiss(descriptor)
            return Refusal(host, f"{host} came to bulk_port without a ticket")
        stranger, _, _ = self._strangers.pop(descriptor)
        self._epoll.unregister(stranger)
        tune(stranger)
        bound_silence(stranger, self._config.silence_s)
        seals = self._seals(self._tickets.pop(identity).key)
        return identity, Channel(stranger, seals, self._config.frame_bytes, self._wake)

    def _owner(self, token: bytearray) -> bytes | None:
        """Takes the same time for every token."""
        owner = None
        for identity, ticket in self._tickets.items():
            if hmac.compare_digest(ticket.token, token):
                owner = identity
        return owner

    def _dismiss(self, descriptor: int) -> None:
        stranger, _, _ = self._strangers.pop(descriptor)
        stranger.close()


def _host_of(stranger: socket.socket) -> str:
    with suppress(OSError):
        return str(stranger.getpeername()[0])
    return "someone"
