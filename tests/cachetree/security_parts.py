"""Servers with keys, and listeners between them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from transport_parts import FAMILY, FAST, nobody, unheard

from cachetree import Location, PeerConfig
from cachetree.transport import Credentials, channel, credentials_of, keys, wire
from cachetree.transport.frames import Seals, Ticket


@dataclass(frozen=True)
class Party:
    """A server's key files."""

    pair: keys.KeyPair
    key_file: str
    public_file: str

    def serving(self, *allowed: Party, **settings: object) -> dict[str, object]:
        """Return settings of a worker that lets these parties in."""
        keys_of_all = tuple(it.pair.public for it in allowed)
        return {"key_file": self.key_file, "allowed_peers": keys_of_all, **settings}

    def asking(self, worker: Party, **settings: object) -> PeerConfig:
        own = {"key_file": self.key_file, "server_key": worker.pair.public}
        return msgspec.structs.replace(FAST, **own, **settings)


def new_party(folder: Path, name: str) -> Party:
    pair, secret_file, public_file = keys.write_key_pair(folder, name)
    return Party(pair, str(secret_file), str(public_file))


class Tap:
    """A relay that passes on the bytes of one connection in both directions, and keeps a copy."""

    def __init__(self, to: Location, host: str = "127.0.0.1") -> None:
        """If `host` is another address of this machine, the relay takes the same port as `to`."""
        self._to = int(to.rsplit(":", 1)[1])
        self._listener = socket.create_server((host, 0 if host == "127.0.0.1" else self._to))
        self.address = Location(f"tcp://{host}:{self._listener.getsockname()[1]}")
        self.seen = bytearray()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Tap:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def _start(self, run, *args: socket.socket) -> None:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._to))
        self._start(self._pass, near, far)
        self._start(self._pass, far, near)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while chunk := source.recv(1 << 16):
                self.seen += chunk
                sink.sendall(chunk)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()


@contextlib.contextmanager
def dealer_to(address, credentials, name=b""):
    """Open a peer's connection by hand, under a name of the peer's choice."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 200)
    dealer.set(zmq.RECONNECT_IVL, -1)
    if name:
        dealer.set(zmq.ROUTING_ID, name)
    credentials.secure(dealer, 1 << 20)
    dealer.connect(address)
    try:
        yield dealer
    finally:
        context.destroy()


def credentials_for(config: PeerConfig) -> Credentials:
    return credentials_of(config.key_file, config.server_key)


def send_garbage(address: Location, config: PeerConfig, garbage: bytes = b"garbage") -> None:
    with dealer_to(address, credentials_for(config)) as dealer:
        with contextlib.suppress(zmq.Again):  # Refused already.
            dealer.send(garbage, zmq.NOBLOCK)
        dealer.poll(200)


@contextlib.contextmanager
def greeted(address: Location, config: PeerConfig) -> Iterator[Ticket]:
    """Yield the ticket in a worker's hello, to a peer that only says hello and stays connected."""
    with dealer_to(address, credentials_for(config)) as dealer:
        dealer.send(wire.encode(wire.hello(FAMILY, "", 0)))
        assert dealer.poll(20_000)
        hello = wire.decode_to_peer(memoryview(dealer.recv()))
        assert isinstance(hello, wire.Hello)
        assert hello.ticket is not None
        yield hello.ticket


def ticket_of(address: Location, config: PeerConfig) -> Ticket:
    """Return the ticket of a peer that leaves at once. Its session ends when the worker notices."""
    with greeted(address, config) as ticket:
        return ticket


class TicketUser:
    """A peer that uses a worker's bulk_port by hand."""

    def __init__(self, ticket: Ticket) -> None:
        self.channel = channel.connect(
            "127.0.0.1", ticket, Seals(ticket.key, is_worker=False), unheard
        )

    def is_let_in(self, seconds: float = 2.0) -> bool:
        """Whether the worker sends a readable message before it hangs up."""
        give_up_at_s = time.monotonic() + seconds
        while self.channel.error is None and time.monotonic() < give_up_at_s:
            for header in self.channel.receive(nobody):
                return isinstance(wire.decode_to_peer(header), wire.Reset)
            time.sleep(0.002)
        return False

    def __enter__(self) -> TicketUser:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
