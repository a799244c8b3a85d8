"""Servers with keys, and what comes between them."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from transport_parts import FAST

from cachetree import Location, PeerConfig
from cachetree.transport import credentials_of, keys


@dataclass(frozen=True)
class Party:
    """A server's key files."""

    pair: keys.KeyPair
    key_file: str
    public_file: str

    def serving(self, *allowed: Party) -> dict[str, object]:
        """Settings of a worker that lets these in."""
        return {"key_file": self.key_file, "allowed_peers": tuple(it.pair.public for it in allowed)}

    def asking(self, worker: Party) -> PeerConfig:
        return msgspec.structs.replace(FAST, key_file=self.key_file, server_key=worker.pair.public)


def new_party(folder: Path, name: str) -> Party:
    pair, secret_file, public_file = keys.write_key_pair(folder, name)
    return Party(pair, str(secret_file), str(public_file))


class Tap:
    """Passes on the bytes of one connection in both directions, and keeps them."""

    def __init__(self, to: Location) -> None:
        self._to = int(to.rsplit(":", 1)[1])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Location(f"tcp://127.0.0.1:{self._listener.getsockname()[1]}")
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


def send_garbage(address: Location, config: PeerConfig, garbage: bytes = b"garbage") -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 200)
    credentials_of(config.key_file, config.server_key).secure(dealer, 1 << 20)
    dealer.connect(address)
    with contextlib.suppress(zmq.Again):  # Refused already.
        dealer.send(garbage, zmq.NOBLOCK)
    dealer.poll(200)
    context.destroy()
