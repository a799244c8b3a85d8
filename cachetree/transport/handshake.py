"""Proofs of identity: CURVE on both ends of a connection, and the meaning of a failed handshake.

    peer: Credentials                         worker: AccessControl
    own key pair, the worker's key            own key pair, the peers' keys
    greeting                          ◄─►     greeting      both use CURVE, or neither does
    hello, with a key of the moment   ──►                   unreadable with another worker's key
                                      ◄──     welcome
    initiate: this is my key          ──►     on the list? otherwise ──► 400
                                      ◄──     ready         now messages pass

A worker decodes nothing from a peer before `ready`. The peer's data connection needs no key pair:
its ticket (`frames`) is sent over this connection.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.errors import AuthenticationError, CacheTreeError, FetchError
from cachetree.transport import keys
from cachetree.transport.address import Address, open_port, parse_address, parse_listen
from cachetree.transport.config import WorkerConfig
from cachetree.transport.crowd import Connections
from cachetree.transport.frames import Seals, Unsealed
from cachetree.transport.keys import KeyPair, PublicKey

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events of a socket's monitor."""

_CIPHER_BYTES: Final = 33
"""Bytes that CURVE adds to a message on the wire (RFC 26), and so to the cap on its size."""

_RECEIVED: Final = 64
"""Messages from one other side that wait to be read; beyond that the other side has to wait."""
_SENT: Final = 256
"""Messages that wait for one other side to read them; beyond that no more can be sent."""

_HANDSHAKE_MS: Final = 5000
"""Time in ms after which a connection without a completed handshake is closed."""
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_DOMAIN: Final = b"cachetree"
_ADMIN: Final = b"admin"
_READER: Final = b"reader"
"""User id that libzmq attaches to each message of a reader."""
_MAX_EVENTS: Final = 256
"""Most handshakes decided, and most events of connections seen, in one turn."""
_MAX_CONNECTIONS: Final = 256
"""Most connections that have never sent a message, and most that have. A peer's question takes
milliseconds."""
_EVENTS: Final = (  # Without the events that AccessControl causes, which it reports itself.
    FAILURES & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
)
_EVENTS_ENDPOINT: Final = "inproc://cachetree.connections"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A handshake that failed at a worker."""

    who: str
    """Name of the other side, as far as known; the same for each of its attempts."""
    why: str


class AccessControl:
    """Lets in everyone who can reach a worker's socket or, if the worker has a key, the holders of
    listed keys. Used by the worker's thread after construction.

    libzmq asks over ZAP, at an address that exists once per context. So each worker has a context
    of its own, and answers in its own thread. Without an answer no connection gets in.
    """

    def __init__(
        self,
        own: KeyPair | None,
        allowed: frozenset[PublicKey] = frozenset(),
        admins: frozenset[PublicKey] = frozenset(),
        *,
        obeys: bool = False,
    ) -> None:
        """Without a key it `obeys` everyone or no one; with a key only its `admins`."""
        self._own = own
        self._obeys = obeys
        self._allowed = frozenset(map(keys.to_bytes, allowed | admins))
        self._admins = frozenset(map(keys.to_bytes, admins))
        self._connections = Connections(_MAX_CONNECTIONS)

    def guard(
        self, context: Context, socket: Socket, poller: zmq.Poller, max_message_bytes: int
    ) -> None:
        """Prepare a socket that is not bound yet, and wake the poller for `refusals`. Its helper
        sockets are closed with the context. A message above the cap closes its connection."""
        _bound(socket, max_message_bytes + (_CIPHER_BYTES if self._own else 0))
        socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._asked = context.socket(zmq.REP)
        self._asked.set(zmq.LINGER, 0)
        self._asked.bind(_ZAP_ENDPOINT)
        socket.monitor(_EVENTS_ENDPOINT, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        # libzmq accepts no more connections while 1,000 events wait to be read, and as many as this
        # sets.
        self._monitor.set(zmq.RCVHWM, 1)
        self._monitor.connect(_EVENTS_ENDPOINT)
        for source in (self._asked, self._monitor):
            poller.register(source, zmq.POLLIN)
        # Without these two, libzmq lets everyone in if it finds no authenticator.
        socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._own:
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, self._own.secret)

    def refusals(self, ready: Container[object]) -> Iterator[Refusal]:
        """Decide the waiting handshakes, and yield those that failed; never blocks. `ready` is what
        a poll found ready."""
        for source, taken in ((self._asked, self._decided), (self._monitor, self._seen)):
            for _ in range(_MAX_EVENTS if source in ready else 0):
                if not source.poll(0):
                    break
                if refusal := taken():
                    yield refusal

    def note_message(self, message: zmq.Frame) -> None:
        """Note that the connection of this message is not silent."""
        self._connections.heard(int(message.get(zmq.SRCFD)))

    def is_admin(self, message: zmq.Frame) -> bool:
        """Return whether the message's sender may give orders."""
        return message.get("User-Id") == _ADMIN.decode()

    def seals(self, key: bytes) -> Unsealed:
        """Return the seals of a data connection with this key."""
        return Seals(key, is_worker=True) if self._own else Unsealed()

    def _decided(self) -> Refusal | None:
        frames = self._asked.recv_multipart()
        refusal, user = self._judged(frames)
        status, text = (b"400", b"no access") if refusal else (b"200", b"OK")
        request_id = frames[1] if len(frames) > 1 else b""
        self._asked.send_multipart([_ZAP_VERSION, request_id, status, text, user, b""])
        return refusal

    def _judged(self, frames: list[bytes]) -> tuple[Refusal | None, bytes]:
        """Return a refusal, or the user id of a peer that is let in."""
        is_ours = frames[:1] == [_ZAP_VERSION] and frames[2:3] == [_DOMAIN]
        match frames[3:] if is_ours else []:
            case [_, _, b"NULL"] if self._own is None:
                return None, _ADMIN if self._obeys else _READER
            case [_, _, b"CURVE", key] if self._own and key in self._allowed:
                return None, _ADMIN if key in self._admins else _READER
            case [address, _, b"CURVE", key]:
                host, who = address.decode("ascii", "replace"), keys.to_public(key)
                why = f"{host} showed key {who}, which is not in allowed_peers"
                return Refusal(f"{host} {who}", why), b""
        why = "libzmq asked about a peer in a form that is not known"
        return Refusal("libzmq", why), b""

    def _seen(self) -> Refusal | None:
        event = recv_monitor_message(self._monitor)
        match event["event"]:
            case zmq.EVENT_ACCEPTED:
                port = int(event["endpoint"].rpartition(b":")[2])
                if source := self._connections.came(event["value"], port):
                    why = f"{source} opens more connections than may wait; it says nothing over one"
                    return Refusal(f"crowd {source}", why)
                return None
            case zmq.EVENT_DISCONNECTED:
                self._connections.went(event["value"])
                return None
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if self._connections.are_ending:
                return None  # It was reported already. Its next event is its end.
        # libzmq does not say which connection it was.
        if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return Refusal("another key", "someone expected this worker to have another key")
        return Refusal(
            "no agreement",
            "someone broke off the handshake or was silent for 5 s, as happens when one side uses "
            "a key and the other does not",
        )


class Credentials:
    """A peer's proof of identity, and the worker it expects: encrypted, with the holder of one key.
    Without keys it proves nothing and trusts any worker.
    """

    def __init__(self, own: KeyPair | None = None, server: PublicKey | None = None) -> None:
        """Both keys, or neither."""
        self._own = own
        self._server = server

    def secure(self, socket: Socket, max_message_bytes: int) -> None:
        """Prepare a socket that is not connected yet; a message above the cap ends its
        connection."""
        _bound(socket, max_message_bytes + (_CIPHER_BYTES if self._own else 0))
        if self._own and self._server:
            socket.set(zmq.CURVE_SERVERKEY, keys.to_bytes(self._server))
            socket.set(zmq.CURVE_PUBLICKEY, keys.to_bytes(self._own.public))
            socket.set(zmq.CURVE_SECRETKEY, self._own.secret)

    def seals(self, key: bytes) -> Unsealed:
        """Return the seals of the data connection with the ticket of this key."""
        return Seals(key, is_worker=False) if self._own else Unsealed()

    def failure(self, event: int, who: str) -> CacheTreeError:
        """Return the error for a monitor's event about a connection that failed or ended.

        If two sides differ, the side that sees it first hangs up, and the other sees no more.
        """
        if not event & FAILURES:
            return FetchError(f"{who} closed the connection or cannot be reached")
        if self._own is None:
            return AuthenticationError(
                f"{who} broke off the handshake: it wants a key, is no worker, or was stopped at "
                "this moment; for one that has a key set key_file, and its public key in peer_keys"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return AuthenticationError(
                f"{who} does not let in this server's key {self._own.public}; add it to "
                "allowed_peers there, and start that worker again"
            )
        return AuthenticationError(
            f"{who} did not prove that it has key {self._server}: it has another one or none, is "
            "no worker, or was stopped at this moment; compare with the .pub file of that worker, "
            "or remove its key from peer_keys where it has none"
        )


def credentials_of(key_file: str | None, server_key: str | None) -> Credentials:
    """Read the key files; raises ConfigError."""
    if server_key is None:
        return Credentials()
    server = keys.read_public_key(server_key, field="the worker's key (server_key, peer_keys)")
    return Credentials(keys.read_key_pair(key_file or ""), server)


def check_worker(config: WorkerConfig) -> tuple[Address, AccessControl]:
    """Return a worker's address and access control. Raises ConfigError for everything that would
    prevent its start, except an address that cannot be bound."""
    listen = parse_listen(
        config.listen, field="listen", insecure=config.insecure, key_file=config.key_file
    )
    if config.key_file is None:
        return listen, AccessControl(None, obeys=config.admin is not None and listen.is_loopback)
    allowed = keys.read_public_keys(config.allowed_peers, field="allowed_peers")
    admins = keys.read_public_keys(config.admin or (), field="admin")
    return listen, AccessControl(keys.read_key_pair(config.key_file), allowed, admins)


def bind_ports(config: WorkerConfig, held: ExitStack) -> None:
    """Take the ports that a worker's configuration names until `held` ends; raises ConfigError if
    one is not free."""
    listen = parse_address(config.listen, field="listen")
    held.enter_context(open_port(listen, field="listen"))
    if config.bulk_port:
        held.enter_context(open_port(replace(listen, port=config.bulk_port), field="bulk_port"))


def _bound(socket: Socket, max_message_bytes: int) -> None:
    """Bound the messages of the other side that are held here."""
    socket.set(zmq.MAXMSGSIZE, max_message_bytes)
    socket.set(zmq.RCVHWM, _RECEIVED)
    socket.set(zmq.SNDHWM, _SENT)
