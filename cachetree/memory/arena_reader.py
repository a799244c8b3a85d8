"""The arena of another process of this host, read in place.

Readers map the file and copy out of it, for three quarters of what `pread` costs. One that is so
late that its lease has ended may read what is there then; the checksum tells that these are not the
bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from cachetree.ids import Span
from cachetree.memory.arena import NONCE_BYTES, Block, address, libc, mapped
from cachetree.memory.copying import copy_in_pieces
from cachetree.memory.pool import ArenaFile

_CHUNK_BYTES: Final = 1 << 20
"""What a reader remembers to have touched."""
_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ, of Linux 5.14."""


class ArenaReader:
    """The arena of another process of this host. Used by one thread."""

    def __init__(self, file: ArenaFile) -> None:
        """Raises OSError where the file is not there, or is not the one."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        self._memory: Block | None = None
        fd = os.open(f"/proc/{file.pid}/fd/{file.fd}", flags)
        try:
            status = os.fstat(fd)
            is_one = (
                stat.S_ISREG(status.st_mode)
                and status.st_size == file.num_bytes
                and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
                and len(file.nonce) == NONCE_BYTES
                and os.pread(fd, NONCE_BYTES, 0) == file.nonce
            )
            if not is_one:
                raise FileNotFoundError("this is not the arena of that worker")
            self._memory = mapped(fd, file.num_bytes, mmap.PROT_READ)
            self._touched = bytearray(-(-file.num_bytes // _CHUNK_BYTES))
        finally:
            os.close(fd)

    def copy_in_pieces(self, into: memoryview, places: Sequence[Span]) -> Iterator[memoryview]:
        """Fill `into` from the places in order, and yield its parts as they are filled.

        Raises OSError where there are no such places.
        """
        memory = self._memory
        at = 0
        for place in places:
            if memory is None or place.stop > memory.nbytes:
                raise OSError(f"the arena has no place {place}")
            run = memory[place.start : place.stop]
            self._touch(run, place)
            yield from copy_in_pieces(into[at : at + run.nbytes], run.data)
            at += run.nbytes

    def close(self) -> None:
        """Idempotent."""
        self._memory = None

    def _touch(self, run: Block, place: Span) -> None:
        """One call for many page faults; where it fails, or comes too rarely, they happen."""
        chunks = slice(place.start // _CHUNK_BYTES, -(-place.stop // _CHUNK_BYTES))
        if not all(self._touched[chunks]):
            self._touched[chunks] = b"\1" * (chunks.stop - chunks.start)
            libc.madvise(address(run) // mmap.PAGESIZE * mmap.PAGESIZE, run.nbytes, _POPULATE_READ)
