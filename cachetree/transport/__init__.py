"""Moves pages between servers over ZMQ: a worker serves a tree, a peer fetches from a worker."""

from cachetree.transport.config import PeerConfig, WorkerConfig
from cachetree.transport.peer import Peer
from cachetree.transport.peer_status import PeerState, PeerStatus
from cachetree.transport.probe import ask_status
from cachetree.transport.wire import Status
from cachetree.transport.worker import Worker

__all__ = [
    "Peer",
    "PeerConfig",
    "PeerState",
    "PeerStatus",
    "Status",
    "Worker",
    "WorkerConfig",
    "ask_status",
]
