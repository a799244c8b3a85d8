"""Entries on disk: one file each, which outlives the process that wrote it.

    store   tree publishes pages ─► tier, writer's thread ─► store: room in the budget, by unlink
            ─► entry_file: temporary name, payload, header, rename ─► index
            ─► tree: these pages are at DISK

    read    fetch, or a promotion into memory ─► tier, reader's thread, or for peers the promoter's,
            a line at a time, once memory has room for all of it ─► index: which files, which
            of their pages ─► entry_file: one layer's pages, their checksums ─► staging or memory

    restart directory: lock, names, sweep temporary files ─► entry_file: headers ─► index ─► tree

A file has KV, or E of one layer, of pages that were stored together, of one model: some megabytes,
within which a layer is one range. Its name is its key, a hash of model, part, first and last page:
what is published twice is one file, and the listing of the folder is the index. Where another
branch begins in its middle the tree splits its node; the file stays whole, and is the source of
several of the tree's entries at DISK. It goes when no file stands on any of its pages.

    directory   whose it is: a lock, and names of files that tell the family and the format
    entry_file  one entry as bytes: what lies where, and a checksum of each page
    index       what each file stands on, and which was used last; its page a tree knows
    store       files within a budget: write, find, read, evict, recover; and its numbers
    asker       who wants a line in memory, and keeps it there meanwhile
    tier        a tree's entries written behind its back, and read again
"""

from cachetree.disk.asker import LetGo
from cachetree.disk.directory import Directory, lock_file, new_file, try_directory
from cachetree.disk.index import DiskFile
from cachetree.disk.store import DiskStatus, DiskStore
from cachetree.disk.tier import DiskTier

__all__ = [
    "Directory",
    "DiskFile",
    "DiskStatus",
    "DiskStore",
    "DiskTier",
    "LetGo",
    "lock_file",
    "new_file",
    "try_directory",
]
