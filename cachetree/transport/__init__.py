"""Moves pages between servers: a worker serves a tree, a peer fetches from it and stores in it.

Two processes hold one session: one TCP connection with the messages of `wire` and payloads in one
order, which `frames` guards. Over ZMQ goes what needs no session: the hello that begins one, and
what an operator asks (`verbs`). Where pages lie in memory that both can read, the messages say
where, and no payload goes over TCP.

A fetch, from the reader to the pages and back:

    reader's process                          worker's process
    peer             one thread, one session
    pending_fetches  asks, asks again
    receiver         writes the request
    connection, channel ══ Fetch ═══════════► channel, session one thread, all sessions; what is
                                                               only on disk comes first; leases
                                                               the pages
                                              sender           cuts them into frames, in fair turns
    channel          ◄═════════ frames ══════ send_queue       gives them to the kernel
    pending_fetches
    receiver         checks them, counts them in the reader's staging

A store, from the tree that has an entry to the tree that keeps it:

    storing process                           worker's process
    advertise        notes what comes in
    peer             one thread, one session
    pending_stores   one entry at a time
    connection, channel ══ Store ═══════════► channel, session the page before it comes first
    pending_stores   ◄═════════ Wanted ══════                  takes room for it
    sender           cuts it into frames
    send_queue       ══════════ frames ═════► channel
                                              receiver         checks them
    pending_stores   ◄═════════ Stored ══════ session          commits the entry

`worker` has the thread of all sessions and `server` its sockets, where peers are let in;
`advertise` tells them what is held. `peers` has one peer for each worker and takes in whom
`directory` finds, `admin` answers and asks for operators, `handshake` and `keys` say who may do
what, `backoff` how long who fails has to wait, `status` counts.
"""

from cachetree.transport.address import parse_http
from cachetree.transport.admin import ask
from cachetree.transport.backoff import Backoff, LogLimiter
from cachetree.transport.config import PeerConfig, WorkerConfig
from cachetree.transport.directory import is_directory
from cachetree.transport.handshake import Credentials, check_ports, check_worker, credentials_of
from cachetree.transport.keys import write_key_pair
from cachetree.transport.peer import Peer
from cachetree.transport.peers import Peers, check_peer
from cachetree.transport.status import PeerState, PeerStatus, PusherStatus
from cachetree.transport.tracing import serve_spans, untraced
from cachetree.transport.verbs import Source, Status, StatusRequest
from cachetree.transport.worker import Worker

__all__ = [
    "Backoff",
    "Credentials",
    "LogLimiter",
    "Peer",
    "PeerConfig",
    "PeerState",
    "PeerStatus",
    "Peers",
    "PusherStatus",
    "Source",
    "Status",
    "StatusRequest",
    "Worker",
    "WorkerConfig",
    "ask",
    "check_peer",
    "check_ports",
    "check_worker",
    "credentials_of",
    "is_directory",
    "parse_http",
    "serve_spans",
    "untraced",
    "write_key_pair",
]
