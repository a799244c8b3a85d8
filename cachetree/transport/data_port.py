"""Where a worker's peers open their data connections: with a ticket, once."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Final

import zmq

from cachetree.clock import Clock, Deadline
from cachetree.errors import ConfigError
from cachetree.transport.address import Address
from cachetree.transport.channel import Channel, bound_silence, tune
from cachetree.transport.config import WorkerConfig
from cachetree.transport.handshake import Refusal
from cachetree.transport.sealing import TOKEN_BYTES, Ticket, TicketBulk, new_ticket, seals_of

_MAX_STRANGERS: Final = 64
"""Connections that have not shown a ticket; for one more the oldest goes."""
_TOKEN_S: Final = 2.0
"""A connection that has not shown one by then is closed."""


class DataPort:
    """A listening TCP socket. Used by the worker's thread after construction; never blocks."""

    def __init__(
        self,
        listen: Address,
        bulk: TicketBulk,
        poller: zmq.Poller,
        wake: Callable[[], None],
        config: WorkerConfig,
        clock: Clock,
    ) -> None:
        """`wake` is called from other threads, as in `Outbox`.

        Raises ConfigError where the address cannot be bound."""
        self._bulk = bulk
        self._poller = poller
        self._wake = wake
        self._config = config
        self._clock = clock
        host = "" if listen.host == "*" else listen.host
        family = socket.AF_INET6 if listen.is_ipv6 else socket.AF_INET
        try:
            self._listener = socket.create_server((host, listen.port), family=family, backlog=256)
        except OSError as exc:
            raise ConfigError(
                f"bulk_port is {listen.url!r}, which cannot be bound ({exc.strerror}); choose "
                "another port, or port 0 for a free one"
            ) from exc
        self._listener.setblocking(False)
        self._port: Final[int] = self._listener.getsockname()[1]
        self._tickets: dict[bytes, Ticket] = {}
        """Given out and not used yet, by whom they were given to."""
        self._strangers: dict[socket.socket, tuple[bytearray, Deadline]] = {}
        """What each has said so far; oldest first."""
        poller.register(self._listener, zmq.POLLIN)

    def invite(self, identity: bytes) -> Ticket:
        """A ticket for a session that has no data connection yet."""
        ticket = self._tickets[identity] = new_ticket(
            self._bulk, self._port, self._config.window_bytes
        )
        return ticket

    def forget(self, identity: bytes) -> None:
        """Its ticket is not valid any more."""
        self._tickets.pop(identity, None)

    def arrivals(self, ready: Container[object]) -> Iterator[tuple[bytes, Channel] | Refusal]:
        """The connections whose ticket was good, and those that were closed.

        `ready` are the descriptors that a poll found ready.
        """
        if self._listener.fileno() in ready:
            self._accept()
        for stranger, (token, deadline) in tuple(self._strangers.items()):
            is_gone = deadline.has_passed
            with suppress(BlockingIOError):
                try:
                    part = stranger.recv(TOKEN_BYTES - len(token))
                except ConnectionError:
                    part = b""
                token += part
                is_gone = is_gone or not part
            if len(token) < TOKEN_BYTES:
                if is_gone:
                    self._dismiss(stranger)
                continue
            identity = self._owner(token)
            if identity is None:
                host = _host_of(stranger)
                self._dismiss(stranger)
                yield Refusal(host, f"{host} came to bulk_port without a ticket")
                continue
            self._forget_stranger(stranger)
            tune(stranger)
            bound_silence(stranger, self._config.silence_s)
            seals = seals_of(self._tickets.pop(identity), is_worker=True)
            yield identity, Channel(stranger, seals, self._config.frame_bytes, self._wake)

    def close(self) -> None:
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()
        self._strangers.clear()

    def _accept(self) -> None:
        for _ in range(_MAX_STRANGERS):
            try:
                stranger, _ = self._listener.accept()
            except OSError:  # Nobody is there, or not any more, or there are no descriptors.
                return
            if len(self._strangers) == _MAX_STRANGERS:
                self._dismiss(next(iter(self._strangers)))
            stranger.setblocking(False)
            self._strangers[stranger] = bytearray(), Deadline.after(_TOKEN_S, self._clock)
            self._poller.register(stranger, zmq.POLLIN)

    def _owner(self, token: bytearray) -> bytes | None:
        """Takes the same time for every token."""
        owner = None
        for identity, ticket in self._tickets.items():
            if hmac.compare_digest(ticket.token, token):
                owner = identity
        return owner

    def _dismiss(self, stranger: socket.socket) -> None:
        self._forget_stranger(stranger)
        stranger.close()

    def _forget_stranger(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self._poller.unregister(stranger)


def _host_of(stranger: socket.socket) -> str:
    with suppress(OSError):
        return str(stranger.getpeername()[0])
    return "someone"
