"""Proofs of identity: CURVE on both ends of a connection, and the meaning of a failed handshake.

    peer: Credentials                         worker: AccessControl
    own key pair, the worker's key            own key pair, the peers' keys
    greeting                          ◄─►     greeting      both use CURVE, or neither does
    hello, with a temporary key       ──►                   unreadable with another worker's key
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
"""Events of a ZMQ monitor that mean a failed handshake."""

_CIPHER_BYTES: Final = 33
"""Number of bytes that CURVE adds to a message on the wire (RFC 26). The limit on a message's size
is higher by this number."""

_RECEIVED: Final = 64
"""Largest number of messages from one connection that wait to be read. Then the sender has to
wait."""
_SENT: Final = 256
"""Largest number of messages to one connection that wait to be sent. If so many wait, further
messages are dropped."""

_HANDSHAKE_MS: Final = 5000
"""Time in ms after which a connection without a completed handshake is closed."""
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_DOMAIN: Final = b"cachetree"
_ADMIN: Final = b"admin"
_READER: Final = b"reader"
"""User id that libzmq attaches to each message of a peer that may only read."""
_MAX_EVENTS: Final = 256
"""Largest numbers of handshakes and of events that one pass of the worker's loop handles."""
_MAX_CONNECTIONS: Final = 256
"""Largest number of open connections that have never sent a message, and of those that have. A
normal connection lasts milliseconds: one question and its answer."""
_EVENTS: Final = (  # Without the events that AccessControl causes, which it reports itself.
    FAILURES & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
)
_EVENTS_ENDPOINT: Final = "inproc://cachetree.connections"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A connection that a worker did not accept."""

    who: str
    """Name of the other side, as far as it is known. All attempts of one side have the same name,
    so that their log lines can be limited."""
    why: str


class AccessControl:
    """Decide which connections a worker accepts. A worker with a key accepts only listed keys; a
    worker without a key accepts all connections.

    For each connection, libzmq asks over ZAP (its authentication protocol) whether to accept it.
    The address for ZAP exists once per context. So each worker has its own context, and answers in
    its own thread. Without an answer libzmq accepts no connection. Except the constructor, only for
    the worker's thread.
    """

    def __init__(
        self,
        own: KeyPair | None,
        allowed: frozenset[PublicKey] = frozenset(),
        admins: frozenset[PublicKey] = frozenset(),
        *,
        obeys: bool = False,
    ) -> None:
        """`own` is the worker's key pair. If there is one, holders of `allowed` keys may read, and
        holders of `admins` keys may also give orders. If there is none, everyone may read, and
        everyone may give orders if `obeys`."""
        self._own = own
        self._obeys = obeys
        self._allowed = frozenset(map(keys.to_bytes, allowed | admins))
        self._admins = frozenset(map(keys.to_bytes, admins))
        self._connections = Connections(_MAX_CONNECTIONS)

    def guard(
        self, context: Context, socket: Socket, poller: zmq.Poller, max_message_bytes: int
    ) -> None:
        """Prepare a socket before it is bound. From then on, `poller` also reports handshakes,
        which `refusals` decides. A message that is too large closes its connection."""
        _bound(socket, max_message_bytes + (_CIPHER_BYTES if self._own else 0))
        socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._asked = context.socket(zmq.REP)
        self._asked.set(zmq.LINGER, 0)
        self._asked.bind(_ZAP_ENDPOINT)
        socket.monitor(_EVENTS_ENDPOINT, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        # libzmq accepts no more connections while 1,000 events wait, plus as many as set here.
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
        """Decide the waiting handshakes, and yield the refused ones. Never blocks. `ready` has the
        sockets that a poll found ready."""
        for source, taken in ((self._asked, self._decided), (self._monitor, self._seen)):
            for _ in range(_MAX_EVENTS if source in ready else 0):
                if not source.poll(0):
                    break
                if refusal := taken():
                    yield refusal

    def note_message(self, message: zmq.Frame) -> None:
        """Note that `message` has arrived: its connection is now one of those that have sent a
        message (see `crowd.Connections`)."""
        self._connections.heard(int(message.get(zmq.SRCFD)))

    def is_admin(self, message: zmq.Frame) -> bool:
        """Whether the message's sender may give orders."""
        return message.get("User-Id") == _ADMIN.decode()

    def seals(self, key: bytes) -> Unsealed:
        """Return the seals for a data connection with this ticket key."""
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
                    why = f"{source} opens too many connections that send nothing"
                    return Refusal(f"crowd {source}", why)
                return None
            case zmq.EVENT_DISCONNECTED:
                self._connections.went(event["value"])
                return None
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if self._connections.are_ending:
                return None  # `came` has reported this connection already.
        # libzmq does not say which connection it was.
        if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return Refusal("another key", "a peer expected this worker to have another key")
        return Refusal(
            "no agreement",
            "a peer broke off the handshake or was silent for 5 s; this happens if one side uses a "
            "key and the other does not",
        )


class Credentials:
    """A peer's key pair, and the key that its worker has to prove. With both keys, the connection
    is encrypted. Without them, the peer proves nothing and trusts any worker.
    """

    def __init__(self, own: KeyPair | None = None, server: PublicKey | None = None) -> None:
        """Pass both keys, or neither."""
        self._own = own
        self._server = server

    def secure(self, socket: Socket, max_message_bytes: int) -> None:
        """Prepare a socket before it connects. A message that is too large ends its connection."""
        _bound(socket, max_message_bytes + (_CIPHER_BYTES if self._own else 0))
        if self._own and self._server:
            socket.set(zmq.CURVE_SERVERKEY, keys.to_bytes(self._server))
            socket.set(zmq.CURVE_PUBLICKEY, keys.to_bytes(self._own.public))
            socket.set(zmq.CURVE_SECRETKEY, self._own.secret)

    def seals(self, key: bytes) -> Unsealed:
        """Return the seals for a data connection with this ticket key."""
        return Seals(key, is_worker=False) if self._own else Unsealed()

    def failure(self, event: int, who: str) -> CacheTreeError:
        """Return the error for a ZMQ monitor's event: the connection to `who` failed or ended.

        The error's text lists several causes, because the other side may close the connection
        without a reason.
        """
        if not event & FAILURES:
            return FetchError(f"{who} closed the connection or cannot be reached")
        if self._own is None:
            return AuthenticationError(
                f"{who} broke off the handshake: it wants a key, is no worker, or was stopped at "
                "this moment; if it has a key, set key_file here, and its public key in peer_keys"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return AuthenticationError(
                f"{who} does not let in this server's key {self._own.public}; add it to "
                "allowed_peers there, and start that worker again"
            )
        return AuthenticationError(
            f"{who} did not prove that it has key {self._server}: it has another one or none, is "
            "no worker, or was stopped at this moment; compare with the .pub file of that worker, "
            "or remove its key from peer_keys if it has none"
        )


def credentials_of(key_file: str | None, server_key: str | None) -> Credentials:
    """Read the key files of a peer. Raises ConfigError."""
    if server_key is None:
        return Credentials()
    server = keys.read_public_key(server_key, field="the worker's key (server_key, peer_keys)")
    return Credentials(keys.read_key_pair(key_file or ""), server)


def check_worker(config: WorkerConfig) -> tuple[Address, AccessControl]:
    """Check the settings of a worker; return its address and access control. Raises ConfigError for
    every fault, but does not try to bind the address."""
    listen = parse_listen(
        config.listen, field="listen", insecure=config.insecure, key_file=config.key_file
    )
    if config.key_file is None:
        return listen, AccessControl(None, obeys=config.admin is not None and listen.is_loopback)
    allowed = keys.read_public_keys(config.allowed_peers, field="allowed_peers")
    admins = keys.read_public_keys(config.admin or (), field="admin")
    return listen, AccessControl(keys.read_key_pair(config.key_file), allowed, admins)


def bind_ports(config: WorkerConfig, held: ExitStack) -> None:
    """Check that the ports of a worker's configuration are free, and keep them bound until `held`
    closes. Raises ConfigError."""
    listen = parse_address(config.listen, field="listen")
    held.enter_context(open_port(listen, field="listen"))
    if config.bulk_port:
        held.enter_context(open_port(replace(listen, port=config.bulk_port), field="bulk_port"))


def _bound(socket: Socket, max_message_bytes: int) -> None:
    """Bound the size and number of messages that wait in a socket."""
    socket.set(zmq.MAXMSGSIZE, max_message_bytes)
    socket.set(zmq.RCVHWM, _RECEIVED)
    socket.set(zmq.SNDHWM, _SENT)
