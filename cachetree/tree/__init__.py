"""The prefix tree: which model has the KV and E of which pages, and where; what leaves first."""

from cachetree.tree.entries import Change
from cachetree.tree.eviction import Retention
from cachetree.tree.hashing import join_hashes, page_digests, page_hashes, split_hashes
from cachetree.tree.holds import Lease, Reservation
from cachetree.tree.listeners import Listener
from cachetree.tree.tree import CacheTree

__all__ = [
    "CacheTree",
    "Change",
    "Lease",
    "Listener",
    "Reservation",
    "Retention",
    "join_hashes",
    "page_digests",
    "page_hashes",
    "split_hashes",
]
