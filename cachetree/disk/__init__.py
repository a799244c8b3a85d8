"""Entries on disk: one file each, which outlives the process that wrote it.

    store   tree publishes pages ─► tier, writer's thread ─► store: room in the budget, by unlink
          ─► entry_file: temporary name, payload, header, rename ─► index
          ─► tree: these pages are at DISK

    read    fetch, or a copy into memory ─► tier, reader's thread; for peers another thread, which
          reads a line (a prompt's entries from the root on) once memory has room for it
          ─► index: which files, which of their pages ─► entry_file: one layer's pages, their
          checksums ─► staging or memory

    restart directory: lock, names, sweep temporary files ─► entry_file: headers ─► index ─► tree

A file has KV, or E of one layer, for pages of one model that were stored together. It has some
megabytes; a layer is one range in it. Its name is its key, a hash of model, part, first and last
page. So pages published twice are one file, and the listing of the folder is the index. If another
branch begins in the middle of a file, the tree splits its node. The file stays whole, and is the
source of several of the tree's entries at DISK. A file that another file continues is not deleted.

    directory   a lock, and names of files that show the family and the format
    entry_file  one entry as bytes: the places of its pages, and a checksum of each page
    index       the order of the files: which file continues which, and which was used last
    store       files within a budget: write, find, read, evict, recover; and its numbers
    asker       a caller that wants a line in memory, and keeps it there until the caller is done
    tier        writes a tree's entries in the background, and reads them again
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
