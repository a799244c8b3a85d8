"""Entries on disk: append-only segment files that outlive the process that wrote them.

    directory     whose it is: a manifest with the family, a lock
    record        one entry as bytes, and which bytes each checksum covers
    segment       one file: append, bury, scan, read
    index         which entry has which page, who stands on whom, who was used last
    recovery      what the files hold when a store is opened
    space         the files within a budget
    store         entries in them: write, find, read, evict
    tier          a tree's entries written behind its back, and read again

The store knows nothing of trees: it tells a listener what comes and goes.
"""

from cachetree.disk.config import DiskConfig, DiskStatus
from cachetree.disk.index import DiskEntry
from cachetree.disk.store import DiskStore
from cachetree.disk.tier import DiskTier

__all__ = ["DiskConfig", "DiskEntry", "DiskStatus", "DiskStore", "DiskTier"]
