"""Where the pages of the tree lie: what every kind of host memory can do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from cachetree.ids import Span
from cachetree.memory.staging import Allocate, pageable

NO_MEMORY: Final = memoryview(b"")


class ArenaFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What another process of the same host needs to read from a memory."""

    pid: int
    fd: int
    num_bytes: int
    nonce: bytes
    """What its first bytes are."""


class NoRoom(MemoryError):
    """Memory within the budget cannot be had now."""


class Pool(Protocol):
    """Where slabs lie. Thread-safe."""

    @property
    def unit_bytes(self) -> int:
        """The least that can be given back on its own, in place as in size."""

    def size_of(self, num_bytes: int) -> int:
        """What a loan of that many bytes takes."""

    def take(self, num_bytes: int) -> memoryview:
        """A loan of writable bytes; raises NoRoom. It may block."""

    def give_back(self, loan: memoryview, parts: Sequence[Span]) -> memoryview:
        """Those whole units of `loan` are needed no more; returns the loan of the rest.

        Whoever still views any part of the old loan keeps reading the same bytes.
        """

    def close(self) -> None:
        """Lend no more; what is lent stays as long as it is viewed. Idempotent."""

    @property
    def file(self) -> ArenaFile | None:
        """From where others may read it; None where they cannot."""

    def place_of(self, view: memoryview) -> int | None:
        """Where in `file` these bytes are; None where they are not in it."""


class PlainPool:
    """Allocations that live and go as a whole; the engine's on CUDA are page-locked."""

    unit_bytes: Final = sys.maxsize
    file: Final = None

    def __init__(self, allocate: Allocate = pageable) -> None:
        self._allocate = allocate

    def size_of(self, num_bytes: int) -> int:
        return num_bytes

    def take(self, num_bytes: int) -> memoryview:
        return self._allocate(num_bytes)

    def give_back(self, loan: memoryview, parts: Sequence[Span]) -> memoryview:
        """`parts` are always everything."""
        return NO_MEMORY

    def close(self) -> None:
        """Nothing is kept here."""

    def place_of(self, view: memoryview) -> int | None:
        return None


PAGEABLE: Final = PlainPool()
