"""Memory of finished fetches, kept for the next: touching new memory costs more than filling it."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cachetree.memory.staging import Allocate

_Block = NDArray[np.uint8]

_MIN_BLOCK_BYTES: Final = 64 << 10


class StagingPool:
    """Lends blocks; a block comes back when nothing refers to any part of it any more.

    Nobody returns a block by hand, so that none is lent anew while a late writer or reader still
    holds a view of it. Thread-safe.
    """

    def __init__(self, allocate: Allocate, limit_bytes: int) -> None:
        self._allocate = allocate
        self._limit_bytes = limit_bytes
        # Reentrant: garbage collection may give a block back while another is being taken.
        self._lock = threading.RLock()
        self._free: list[_Block] = []
        self._lent_bytes = 0

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(block.nbytes for block in self._free)

    def allocate(self, num_bytes: int) -> memoryview:
        """That many writable bytes, with whatever they held before."""
        block = self._take(num_bytes)
        if block is None:
            block = np.frombuffer(self._allocate(_block_bytes(num_bytes)), dtype=np.uint8)
        loan = block[:num_bytes]
        with self._lock:
            self._lent_bytes += block.nbytes
        finalizer: weakref.finalize[Any, Any] = weakref.finalize(loan, self._give_back, block)
        finalizer.atexit = False
        return loan.data

    def _take(self, num_bytes: int) -> _Block | None:
        """A free block that fits without wasting half; else make room for a new one."""
        with self._lock:
            fitting = [block for block in self._free if num_bytes <= block.nbytes <= 2 * num_bytes]
            if fitting:
                best = min(fitting, key=lambda block: block.nbytes)
                self._drop(best)
                return best
            while self._free and self._held_bytes + _block_bytes(num_bytes) > self._limit_bytes:
                self._drop(self._free[0])
        return None

    @property
    def _held_bytes(self) -> int:
        return self._lent_bytes + sum(block.nbytes for block in self._free)

    def _drop(self, block: _Block) -> None:
        self._free = [each for each in self._free if each is not block]

    def _give_back(self, block: _Block) -> None:
        with self._lock:
            self._lent_bytes -= block.nbytes
            if self._held_bytes + block.nbytes <= self._limit_bytes:
                self._free.append(block)


def _block_bytes(num_bytes: int) -> int:
    """Rounded up by at most an eighth, so that prompts of similar length share blocks."""
    unit = max(_MIN_BLOCK_BYTES, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // unit) * unit
