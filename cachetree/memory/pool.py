"""What lends host memory, and what it lends: bytes in runs, each part of a loan in its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from cachetree.ids import Span, parts_of

_NO_MEMORY: Final = memoryview(b"")


class ArenaFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What another process of the same host needs to read from a memory."""

    pid: int
    fd: int
    num_bytes: int
    nonce: bytes
    """What its first bytes are."""


class NoRoom(MemoryError):
    """Memory within the budget cannot be had now."""


class Blocks(NamedTuple):
    """One part of a loan: `num` blocks of `size` bytes. No block is torn apart."""

    num: int
    size: int


class Loan:
    """Bytes of a pool. Whoever has a view of them keeps them from being lent again."""

    __slots__ = ("memory", "runs")

    def __init__(
        self, memory: memoryview = _NO_MEMORY, runs: Sequence[Sequence[Span]] = ()
    ) -> None:
        self.memory = memory
        """All of the pool's memory, as this loan sees it."""
        self.runs: Final = runs
        """Of each part, where it lies there; in one run mostly."""

    def places(self, part: int, span: Span) -> list[Span]:
        """Where these bytes of a part lie."""
        runs = self.runs[part]
        return [
            Span(runs[number].start + it.start, runs[number].start + it.stop)
            for number, it in parts_of(map(len, runs), span)
        ]


class Pool(Protocol):
    """Where slabs lie. Thread-safe."""

    def take(self, parts: Sequence[Blocks]) -> Loan:
        """Writable bytes for each part; raises NoRoom."""

    def give_back(self, loan: Loan, places: Sequence[Span]) -> None:
        """These bytes of the loan are needed no more. They are lent again once nobody has a view
        that was taken of the loan before."""

    def close(self) -> None:
        """Lend no more; what is lent stays as long as it is viewed. Idempotent."""

    @property
    def file(self) -> ArenaFile | None:
        """From where others may read it; None where they cannot."""

    def place_of(self, view: memoryview) -> int | None:
        """Where in `file` these bytes are; None where they are not in it."""
