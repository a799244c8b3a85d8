"""Moves pages between servers: a worker serves a tree, a peer fetches from it.

Two processes hold one session: one TCP connection (`channel`, `send_queue`) with the messages of
`wire` and payloads in one order, which `frames` guards. Over ZMQ goes what needs no session: the
hello that begins one, and what an operator asks (`verbs`, `admin`). Where pages lie in memory that
both can read, the messages say where, and no payload goes over TCP. The ways of a fetch and of
a copy through these files are drawn in `cachetree/README.md`.

    peer             one worker: one thread, one `connection` at a time
    pending_fetches  what is asked of it, and asked again; `pace`, how fast it is
    pulls            what it has, copied as it advertises it
    peers            all that a cache has, and whom `directory` finds
    worker           the other side: one thread for all that come in over `data_port`
    session          what one of them is owed; `advertise`, what it is told
    sender, receiver pages on their way out and in
    handshake, keys  who may do what; `backoff`, how long who fails has to wait
    status, tracing  what became of it all
"""

from cachetree.transport.address import Address, open_port, parse_http, without_password
from cachetree.transport.admin import ask
from cachetree.transport.backoff import Backoff, LogLimiter
from cachetree.transport.config import PeerConfig, WorkerConfig
from cachetree.transport.directory import is_directory
from cachetree.transport.handshake import Credentials, bind_ports, check_worker, credentials_of
from cachetree.transport.keys import write_key_pair
from cachetree.transport.peer import Peer
from cachetree.transport.peers import Peers, check_peer
from cachetree.transport.pulls import Keeper
from cachetree.transport.status import PeerState, PeerStatus, PullStatus
from cachetree.transport.tracing import serve_spans, untraced
from cachetree.transport.verbs import Source, Status, StatusRequest
from cachetree.transport.wire import MAX_REQUEST_S
from cachetree.transport.worker import Worker

__all__ = [
    "MAX_REQUEST_S",
    "Address",
    "Backoff",
    "Credentials",
    "Keeper",
    "LogLimiter",
    "Peer",
    "PeerConfig",
    "PeerState",
    "PeerStatus",
    "Peers",
    "PullStatus",
    "Source",
    "Status",
    "StatusRequest",
    "Worker",
    "WorkerConfig",
    "ask",
    "bind_ports",
    "check_peer",
    "check_worker",
    "credentials_of",
    "is_directory",
    "open_port",
    "parse_http",
    "serve_spans",
    "untraced",
    "without_password",
    "write_key_pair",
]
