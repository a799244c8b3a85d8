"""Entries on disk: one file each, which outlives the process that wrote it.

    write   the tree adds an entry ─► tier, in the writer thread ─► store: evicts files until the
          budget has room ─► entry_file: temporary name, payload, header, rename ─► index
          ─► tree: lists the pages at `DISK`

    read    a fetch, or a copy into memory ─► tier, in a reader thread; for a peer in another
          thread, which first waits until memory has room for all missing entries of the prompt
          ─► tree: the files of these pages ─► entry_file: one layer's pages, their checksums
          ─► staging or memory

    restart directory: lock, names, deletes temporary files ─► entry_file: headers ─► index ─► tree

A file has KV, or E of one layer, for pages of one model that were stored together. It has some
megabytes; a layer is one range in it. Its name is a hash of model, part, first and last page. So
pages that are published twice are one file, and a listing of the folder finds all entries. If
another branch begins in the middle of a file, the tree splits its node. The file stays whole, and
is the source of several of the tree's entries at `DISK`. A file is deleted only after all files
that continue it.

    directory   a lock, and names of files that show the family and the format
    entry_file  one entry as bytes: the places of its pages, and a checksum of each page
    index       the order of the files: which file continues which, and which was used last
    store       files within a budget: write, find, read, evict, recover; and its numbers
    asker       a caller that needs a prompt's entries in memory until it has read them
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
