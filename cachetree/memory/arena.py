"""Host memory in a file without a name: made once, registered with the device once, lent in runs.

    [0, 1 page)     a random nonce, by which another process of the host recognises the file
    [1 page, ..)    loans and free runs

The file is as long as its budget, so nothing is allocated later. Seals prevent any process from
changing its size. A loan takes one run if a free run is long enough, otherwise several. Small
blocks (see `Blocks`) first fill free runs that are too short for a large block, so that large
blocks find room, too.

Readers in other processes of the host map the file and copy from it, which takes three quarters of
the time of `pread`. A reader that reads after its lease has ended may get newer bytes; their
checksum is then wrong.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cachetree.errors import ConfigError
from cachetree.ids import Span
from cachetree.memory.copying import copy_in_pieces
from cachetree.memory.slab import ArenaFile, Blocks, Loan, NoRoom, Torn

NONCE_BYTES: Final = 16
_CHUNK_BYTES: Final = 1 << 20
"""Size in bytes of a chunk. A reader remembers for each chunk whether the kernel has mapped it."""
_POPULATE_READ: Final = 22
"""Value of MADV_POPULATE_READ, which Linux has from 5.14 on."""

Block = NDArray[np.uint8]
Run = tuple[int, int]
"""Start and end of a run of bytes, half-open."""

Register = Callable[[memoryview], Callable[[], None]]
"""Function that registers memory with a device, and returns a function that ends the registration.
The memory is never moved or resized. Raises ConfigError."""


def unregistered(memory: memoryview) -> Callable[[], None]:
    """Register nothing. Used without a device."""
    return lambda: None


class Arena:
    """Host memory of `num_bytes` that is allocated at once, and lent piece by piece. Thread-safe;
    nothing blocks.

    The system provides each memory page when it is first lent, or all pages if `register` touches
    them. Raises ConfigError if the system has not enough memory, or if `register` raises it.
    """

    def __init__(self, num_bytes: int, register: Register = unregistered) -> None:
        size = mmap.PAGESIZE + num_bytes
        try:
            fd = os.memfd_create("cachetree", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            close = weakref.finalize(self, os.close, fd)
            os.ftruncate(fd, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            self._all = mapped(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, OverflowError) as exc:
            raise ConfigError(f"{num_bytes} bytes of memory cannot be allocated: {exc}") from exc
        self._base = address(self._all)
        self._all[:NONCE_BYTES] = np.frombuffer(nonce := secrets.token_bytes(NONCE_BYTES), np.uint8)
        self.file: Final = ArenaFile(pid=os.getpid(), fd=fd, num_bytes=size, nonce=nonce)
        self._num_bytes = num_bytes
        self._free: list[Run] = [(mmap.PAGESIZE, size)]
        """Free runs, ascending; no two are adjacent."""
        # Finalizers append here. They may run at any place in any thread, so they take no lock.
        self._returned: deque[tuple[Sequence[Span], Block]] = deque()
        self._lock = threading.Lock()
        # Memory stays registered as long as any object refers to it.
        self._ends = (close, weakref.finalize(self, register(self._all.data)))

    @property
    def lent_bytes(self) -> int:
        """Number of bytes that are lent, or that were given back and still have a view."""
        with self._lock:
            self._collect()
            return self._num_bytes - _num_bytes(self._free)

    def take(self, parts: Sequence[Blocks]) -> Loan:
        """Lend memory for each of `parts`. Memory that was given back, but still has a view, is not
        lent."""
        with self._lock:
            self._collect()
            if not self._ends[0].alive:
                raise NoRoom("the memory is closed")
            runs, self._free = _runs_for(parts, self._free)
        return Loan(self._all[:].data, runs)

    def give_back(self, loan: Loan, places: Sequence[Span]) -> None:
        old, new = loan.memory.obj, self._all[:]
        loan.memory = new.data
        # Old views keep the new memory object alive, so bytes returned later also wait for them.
        finalizer: weakref.finalize[Any, Any] = weakref.finalize(
            old, self._returned.append, (places, new)
        )
        finalizer.atexit = False

    def place_of(self, view: memoryview) -> int | None:
        place = address(np.frombuffer(view, np.uint8)) - self._base
        return place if 0 <= place < self.file.num_bytes else None

    def close(self) -> None:
        """Stop lending, let no further process open the file, and end the registration. Lent bytes
        stay as long as they are viewed."""
        with self._lock:
            for end in self._ends:
                end()

    def _collect(self) -> None:
        """Make bytes free that were given back and have no view. Called with the lock held."""
        returned: list[Run] = []
        while self._returned:
            returned += [(it.start, it.stop) for it in self._returned.popleft()[0]]
        if returned:
            self._free = joined(self._free + returned)


class ArenaReader:
    """The arena of another process of this host. Used by one thread."""

    def __init__(self, file: ArenaFile) -> None:
        """Raises OSError if the file does not exist, or has another nonce."""
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
        """Copy spans of the file into `into`, in order. Yield each piece of `into` once filled.

        Raises OSError if the file is shorter than a span.
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
        """Unmap the file. Idempotent."""
        self._memory = None

    def _touch(self, run: Block, place: Span) -> None:
        """Let the kernel map many pages in one call. If the call fails, pages are mapped one by one
        as they are read."""
        chunks = slice(place.start // _CHUNK_BYTES, -(-place.stop // _CHUNK_BYTES))
        if not all(self._touched[chunks]):
            self._touched[chunks] = b"\1" * (chunks.stop - chunks.start)
            libc.madvise(address(run) // mmap.PAGESIZE * mmap.PAGESIZE, run.nbytes, _POPULATE_READ)


def joined(runs: list[Run]) -> list[Run]:
    """Sort runs, and join adjacent runs."""
    merged: list[Run] = []
    for start, stop in sorted(runs):
        if merged and merged[-1][1] == start:
            start, _ = merged.pop()
        if start < stop:
            merged.append((start, stop))
    return merged


def _num_bytes(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _runs_for(parts: Sequence[Blocks], free: Sequence[Run]) -> tuple[list[list[Span]], list[Run]]:
    """Return the runs for each part, and the runs that stay free. Take the shortest free run that
    all parts fit into, or else the longest runs. Raises NoRoom, or Torn."""
    num_bytes = sum(part.num * part.size for part in parts)
    if num_bytes > _num_bytes(free):
        raise NoRoom(f"{num_bytes} bytes do not fit; {_num_bytes(free)} are free")
    by_size = sorted(free, key=lambda run: run[1] - run[0])
    first = next((at for at, (a, b) in enumerate(by_size) if b - a >= num_bytes), None)
    holes = by_size[::-1] if first is None else [by_size.pop(first)]
    others = [] if first is None else by_size
    runs: list[list[Span]] = [[] for _ in parts]
    # Large blocks first; small ones fit into the rest of a hole.
    sizes = sorted({part.size for part in parts}, reverse=True)
    for size in sizes:
        if size < sizes[0]:  # Small blocks first use holes that fit no large block.
            holes.sort(key=lambda run: run[1] - run[0] >= sizes[0])
        at = 0
        for number, part in enumerate(parts):
            num = part.num if part.size == size else 0
            while num:
                if at == len(holes):
                    raise Torn(num * size)
                start, stop = holes[at]
                num_here = min(num, (stop - start) // size)
                if num_here:
                    runs[number].append(Span(start, start + num_here * size))
                    holes[at] = (start + num_here * size, stop)
                    num -= num_here
                at += num > 0
    return runs, sorted([it for it in (*others, *holes) if it[0] < it[1]])


def mapped(fd: int, num_bytes: int, access: int) -> Block:
    """Map the whole file into memory, as long as anything refers to the result. Unlike `mmap.mmap`,
    this keeps no second descriptor of the file."""
    start = libc.mmap(None, num_bytes, access, mmap.MAP_SHARED, fd, 0)
    if start == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{num_bytes} bytes of address space cannot be mapped")
    memory = (ctypes.c_uint8 * num_bytes).from_address(start)
    weakref.finalize(memory, libc.munmap, start, num_bytes).atexit = False
    return np.ctypeslib.as_array(memory)


def address(block: NDArray[Any]) -> int:
    return int(block.__array_interface__["data"][0])


def _libc_with_types() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    number, long, size, pointer = ctypes.c_int, ctypes.c_long, ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, number, number, number, long)
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    return libc


libc: Final = _libc_with_types()
