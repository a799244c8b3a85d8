"""Entries on disk: append-only segment files that outlive the process that wrote them.

    directory     whose it is: a manifest with the family, a lock
    record        one entry as bytes, and which bytes each checksum covers
    segment       one file: append, bury, scan, read
    index         which entry has which page, who stands on whom, who was used last
    store         all of them within a budget

It knows nothing of trees: `DiskStore` tells a listener what comes and goes.
"""

from cachetree.disk.config import DiskConfig, DiskStatus
from cachetree.disk.index import DiskEntry
from cachetree.disk.store import DiskStore

__all__ = ["DiskConfig", "DiskEntry", "DiskStatus", "DiskStore"]
