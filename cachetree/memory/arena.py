"""Host memory in a file without a name, from which other processes of the host may copy.

The file is many times as long as the budget, and sparse: places in it are plentiful, so that
fragments of them do no harm; physical memory is what is short. What is given back stays warm for
the next loan (page faults of new memory cost more than filling it) as far as the budget allows,
and holes are punched into the rest.

    [0, 1 page)   a random nonce, by which a reader knows the file
    [1 page, ..)  loans     counted as held until they are given back and nobody views them
                  warm      free, with memory
                  cold      free, without

Seals keep everybody from shortening it under its readers and its owner. There is none against
writing: the kernel refuses to punch holes with it. Readers map the file and copy out of it, for
three quarters of what `pread` costs. One that is so late that its lease has ended may read a hole,
which the kernel fills with a page of zeros; the checksum then tells that these are not the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cachetree.ids import Span
from cachetree.memory.copying import copy_in_pieces
from cachetree.memory.pool import PAGEABLE, ArenaFile, NoRoom, PlainPool, Pool
from cachetree.memory.ranges import Ranges
from cachetree.memory.staging import Allocate, pageable

NONCE_BYTES: Final = 16
_TIMES: Final = 16
"""How many times as long as its budget the file is."""
_MAX_WARM: Final = 64
"""Runs of warm bytes kept; of more, the shortest go cold."""
_LEAST_BYTES: Final = 1 << 20
"""Of a smaller budget, whole pages of the system for each loan would take too much."""

_Block = NDArray[np.uint8]


class Arena:
    """Lends memory within a budget. Raises OSError where the system gives no such file.

    Physical memory never exceeds the budget, rounded up to whole pages, and one page. `take` finds
    no room also while what was given back is still viewed, or where no run of free places is long
    enough, which takes sixteen times the budget in small pieces.
    """

    unit_bytes: Final = mmap.PAGESIZE

    def __init__(self, budget_bytes: int) -> None:
        self._limit_bytes = self.size_of(budget_bytes)
        num_bytes = self.unit_bytes + _TIMES * self._limit_bytes
        self._fd = os.memfd_create("cachetree", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, num_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        self._all = _mapped(self._fd, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self._base = _address(self._all)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._all[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        self.file: Final = ArenaFile(pid=os.getpid(), fd=self._fd, num_bytes=num_bytes, nonce=nonce)
        self._free = Ranges(Span(self.unit_bytes, num_bytes))
        self._warm = Ranges()
        self._held_bytes = 0
        # Filled by finalizers, which may run in any thread at any place and so take no lock.
        self._returned: deque[tuple[Sequence[Span], _Block]] = deque()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes lent, or given back and still viewed."""
        with self._lock:
            self._collect()
            return self._held_bytes

    @property
    def physical_bytes(self) -> int:
        """Memory that the file has, the first page with it."""
        return os.fstat(self._fd).st_blocks * 512

    def size_of(self, num_bytes: int) -> int:
        return -(-num_bytes // self.unit_bytes) * self.unit_bytes

    def take(self, num_bytes: int) -> memoryview:
        size = self.size_of(num_bytes)
        with self._lock:
            self._collect()
            if not self._close.alive or self._held_bytes + size > self._limit_bytes:
                raise NoRoom(f"{size} bytes beside {self._held_bytes} of {self._limit_bytes}")
            start = self._place_for(size)
            where = Span(start, start + size)
            self._free.take_out(where)
            self._warm.take_out(where)
            self._held_bytes += size
            self._cool()
        return self._all[start : start + num_bytes].data

    def give_back(self, loan: memoryview, parts: Sequence[Span]) -> memoryview:
        old = loan.obj
        assert isinstance(old, np.ndarray)
        start = _address(old) - self._base
        # Views of the old loan keep the new one too, so that what is given back later waits for
        # them as well.
        new = self._all[start : start + loan.nbytes]
        places = [Span(start + part.start, start + part.stop) for part in parts]
        finalizer: weakref.finalize[Any, Any] = weakref.finalize(
            old, self._returned.append, (places, new)
        )
        finalizer.atexit = False
        return new.data

    def place_of(self, view: memoryview) -> int | None:
        """Where in the file these bytes are; None for others."""
        place = _address(np.frombuffer(view, np.uint8)) - self._base
        return place if 0 <= place < self.file.num_bytes else None

    def close(self) -> None:
        """Lend no more and let nobody else read; what is lent stays as long as it is viewed."""
        with self._lock:
            self._close()

    # Everything below is called with the lock held.

    def _collect(self) -> None:
        while self._returned:
            for place in self._returned.popleft()[0]:
                self._held_bytes -= len(place)
                self._free.add(place)
                self._warm.add(place)

    def _place_for(self, size: int) -> int:
        """Where most of it is warm, and else the first place where it fits; raises NoRoom."""
        best: tuple[int, int, int] | None = None
        for warm in self._warm:
            free = self._free.around(warm.start)
            if len(free) >= size:
                start = min(warm.start, free.stop - size)
                num_warm = len(warm.intersection(Span(start, start + size)))
                best = max(best or (0, 0, 0), (num_warm, -len(warm), start))
        if best is not None:
            return best[2]
        for free in self._free:
            if len(free) >= size:
                return free.start
        raise NoRoom(f"no run of {size} bytes is free")

    def _cool(self) -> None:
        """Punch holes into free memory, the shortest runs first, until the rest may stay."""
        num_excess = self._held_bytes + self._warm.num_bytes - self._limit_bytes
        if num_excess <= 0 and len(self._warm) <= _MAX_WARM:
            return
        runs = sorted(self._warm, key=len)
        for num_left, run in zip(range(len(runs), 0, -1), runs, strict=True):
            if num_excess <= 0 and num_left <= _MAX_WARM:
                return
            is_whole = num_left > _MAX_WARM or num_excess >= len(run)
            hole = run if is_whole else Span(run.stop - num_excess, run.stop)
            if _libc.fallocate(self._fd, _PUNCH_HOLE, hole.start, len(hole)):
                raise OSError(ctypes.get_errno(), "no hole can be punched into the arena")
            self._warm.take_out(hole)
            num_excess -= len(hole)


class ArenaReader:
    """The arena of another process of this host. Used by one thread."""

    def __init__(self, file: ArenaFile) -> None:
        """Raises OSError where the file is not there, or is not the one."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        self._memory: _Block | None = None
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
            self._memory = _mapped(fd, file.num_bytes, mmap.PROT_READ)
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

    def _touch(self, run: _Block, place: Span) -> None:
        """One call for many page faults; where it fails, or comes too rarely, they happen."""
        chunks = slice(place.start // _CHUNK_BYTES, -(-place.stop // _CHUNK_BYTES))
        if not all(self._touched[chunks]):
            self._touched[chunks] = b"\1" * (chunks.stop - chunks.start)
            _libc.madvise(_address(run) // _PAGE * _PAGE, run.nbytes, _POPULATE_READ)


def pool_of(budget_bytes: int, allocate: Allocate = pageable) -> Pool:
    """An arena; plain allocations for little, where there is none, or the engine has its own."""
    if allocate is not pageable:
        return PlainPool(allocate)
    if sys.platform == "linux" and budget_bytes >= _LEAST_BYTES:
        with contextlib.suppress(OSError, ValueError, OverflowError):
            return Arena(budget_bytes)
    return PAGEABLE


def _mapped(fd: int, num_bytes: int, access: int) -> _Block:
    """The whole file as long as anything refers to it. `mmap.mmap` would keep a descriptor too."""
    address = _libc.mmap(None, num_bytes, access, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{num_bytes} bytes of address space cannot be had")
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, num_bytes).atexit = False
    return np.ctypeslib.as_array(memory)


def _libc_with_types() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    number, long, size, pointer = ctypes.c_int, ctypes.c_long, ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, number, number, number, long)
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    if sys.platform == "linux":
        libc.fallocate.argtypes = (number, number, long, long)
    return libc


_libc: Final = _libc_with_types()


_PAGE: Final = mmap.PAGESIZE
_CHUNK_BYTES: Final = 1 << 20
"""What a reader remembers to have touched."""
_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ, of Linux 5.14."""
_PUNCH_HOLE: Final = 2 | 1
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE."""


def _address(block: NDArray[Any]) -> int:
    return int(block.__array_interface__["data"][0])
