"""Moves pages between servers over ZMQ: a worker serves a tree, a peer fetches from a worker."""

from cachetree.transport.admin import ask, ask_status
from cachetree.transport.config import PeerConfig, WorkerConfig
from cachetree.transport.handshake import (
    Credentials,
    check_peer,
    check_ports,
    check_worker,
    credentials_of,
)
from cachetree.transport.keys import write_key_pair
from cachetree.transport.peer import Peer
from cachetree.transport.push import Pusher, PusherStatus
from cachetree.transport.status import PeerState, PeerStatus
from cachetree.transport.verbs import Source, Status
from cachetree.transport.worker import Worker

__all__ = [
    "Credentials",
    "Peer",
    "PeerConfig",
    "PeerState",
    "PeerStatus",
    "Pusher",
    "PusherStatus",
    "Source",
    "Status",
    "Worker",
    "WorkerConfig",
    "ask",
    "ask_status",
    "check_peer",
    "check_ports",
    "check_worker",
    "credentials_of",
    "write_key_pair",
]
