"""Entries on disk: one file each, which outlives the process that wrote it.

    store   tree publishes pages ─► tier, writer's thread ─► store: room in the budget, by unlink
            ─► entry_file: temporary name, payload, header, rename ─► index
            ─► tree: these pages are at DISK

    read    fetch, or a promotion into memory ─► tier, reader's thread, or for peers the promoter's,
            a line at a time, once memory has room for all of it ─► index: which files, which
            of their pages ─► entry_file: one layer's pages, their checksums ─► staging or memory

    restart directory: lock, names, sweep temporary files ─► entry_file: headers ─► index ─► tree

An entry is a span of pages that were stored together, of one model, with all its layers: a file of
megabytes, within which a layer is one range. Where another branch begins in its middle the tree
splits its node; the file stays whole, and what follows it names the page that it comes after. So
nothing is copied, one file may be behind several nodes, and it goes when nothing descends from any
of its pages. Pages that gain E are written again, KV too, to a file that takes their place.

    directory   whose it is: a lock, and names of files that tell the family and the format
    entry_file  one entry as bytes: what lies where, and a checksum of each page
    index       which entry has which page, what stands on it, and which was used last
    store       entries within a budget: write, find, read, evict, recover; and its numbers
    asker       who wants a line in memory, and keeps it there meanwhile
    tier        a tree's entries written behind its back, and read again

The store knows nothing of trees: it tells a listener what comes and goes. It has an index of its
own beside the tree's entries at DISK because these follow the tree's nodes, which every model and
every peer's advert splits or takes out, while a file is used, replaced and deleted whole.
"""

from cachetree.disk.asker import LetGo
from cachetree.disk.directory import Directory, hold, new_file, try_directory
from cachetree.disk.index import DiskEntry
from cachetree.disk.store import DiskStatus, DiskStore
from cachetree.disk.tier import DiskTier

__all__ = [
    "Directory",
    "DiskEntry",
    "DiskStatus",
    "DiskStore",
    "DiskTier",
    "LetGo",
    "hold",
    "new_file",
    "try_directory",
]
