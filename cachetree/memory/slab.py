"""Interface of pools that lend host memory, and `Slab`: the memory of one reservation of a tree,
which is given back page by page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import msgspec

from cachetree.checkpoint import Family
from cachetree.ids import KV, Kind, Part, Span, Step, parts_of

_NO_MEMORY: Final = memoryview(b"")


class ArenaFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Address of an arena: all that another process of the same host needs to read it."""

    pid: int
    fd: int
    num_bytes: int
    nonce: bytes
    """Random bytes at the beginning of the file, which identify it."""


class NoRoom(MemoryError):
    """Raised if the budget has not enough free memory now."""


class Torn(NoRoom):
    """Raised if enough bytes are free, but no free run is long enough for a block. `num_bytes` more
    have to become free."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes do not fit; the free memory is fragmented")
        self.num_bytes: Final = num_bytes


class Blocks(NamedTuple):
    """One part of a demand for memory: `num` blocks of `size` bytes. Each block is contiguous."""

    num: int
    size: int


class Loan:
    """Memory that a pool has lent. The pool does not lend it again as long as a view of it
    exists."""

    __slots__ = ("memory", "runs")

    def __init__(
        self, memory: memoryview = _NO_MEMORY, runs: Sequence[Sequence[Span]] = ()
    ) -> None:
        self.memory = memory
        """View of the pool's whole memory."""
        self.runs: Final = runs
        """Runs of `memory` for each part of the demand, usually one run."""

    def places(self, part: int, span: Span) -> list[Span]:
        """Return the spans of `memory` in which the bytes `span` of one part are."""
        runs = self.runs[part]
        return [
            Span(runs[number].start + it.start, runs[number].start + it.stop)
            for number, it in parts_of(map(len, runs), span)
        ]


class Pool(Protocol):
    """Interface of memory that is lent to slabs and stagings. Thread-safe."""

    def take(self, parts: Sequence[Blocks]) -> Loan:
        """Lend writable bytes for each of `parts`. Raises NoRoom if too few bytes are free, and
        Torn if the free memory is fragmented."""

    def give_back(self, loan: Loan, places: Sequence[Span]) -> None:
        """Take back these spans of a loan. They are lent again once no view exists that was taken
        of the loan before this call."""

    def close(self) -> None:
        """Stop lending. Lent bytes stay as long as they are viewed. Idempotent."""

    @property
    def file(self) -> ArenaFile | None:
        """File from which other processes may read the memory; None if they cannot."""

    def place_of(self, view: memoryview) -> int | None:
        """Return the offset of these bytes in `file`. None if the file does not have them."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of an entry of `num_pages` pages in memory. Its transfer steps are one after the
    other, and have equal sizes."""

    num_pages: int
    num_steps: int
    step_bytes: int
    """Bytes of one page of one transfer step."""

    @classmethod
    def of(cls, family: Family, num_pages: int, part: Part) -> Layout:
        kv_page_bytes, e_page_bytes = _page_bytes(family)
        if part == KV:
            num_steps, step_bytes = family.num_layers, kv_page_bytes
        else:
            num_steps, step_bytes = 1, e_page_bytes
        return cls(num_pages=num_pages, num_steps=num_steps, step_bytes=step_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_steps * self.step_bytes

    @property
    def blocks(self) -> list[Blocks]:
        """The memory that the entry needs: for each transfer step, a block for each page."""
        return [Blocks(self.num_pages, self.step_bytes)] * self.num_steps


def index_of(step: Step) -> int:
    """Return the index of a transfer step among all steps of its entry."""
    return step.layer if step.kind is Kind.KV else 0


@lru_cache(maxsize=16)
def _page_bytes(family: Family) -> tuple[int, int]:
    """Return the bytes of one page of KV and of E at one layer. Cached, because it is called
    often."""
    return family.kv_page_bytes, family.e_page_bytes


class Slab:
    """The memory of one reservation, which is given back page by page.

    The pool does not lend bytes that still have a view. So a reader with a view of dropped pages
    continues to read the same bytes.
    """

    __slots__ = ("_checksums", "_loan", "_pool", "layout", "num_bytes")

    def __init__(self, layout: Layout, pool: Pool) -> None:
        self.layout = layout
        self.num_bytes = layout.num_bytes
        """Bytes that the slab takes, or will take after `fill`."""
        self._checksums: dict[tuple[int, int], int] | None = None
        self._pool = pool
        self._loan = Loan()

    def fill(self) -> None:
        """Take the memory from the pool. May block, so do not hold the tree's lock. Raises NoRoom,
        or Torn."""
        self._loan = self._pool.take(self.layout.blocks)

    @property
    def checksums(self) -> dict[tuple[int, int], int]:
        """Checksums of runs of bytes that were sent to peers. Keys are address and size. They stay
        valid, because complete pages do not change."""
        if self._checksums is None:
            self._checksums = {}
        return self._checksums

    def views(self, step: Step, pages: Span) -> list[memoryview]:
        """Return views of one transfer step of these pages, in order. Each contiguous run of memory
        has one view."""
        size, whole = self.layout.step_bytes, self._loan.memory
        places = self._loan.places(index_of(step), Span(pages.start * size, pages.stop * size))
        return [whole[it.start : it.stop] for it in places]

    def drop_pages(self, pages: Span) -> int:
        """Give the memory of these pages back to the pool. Return the number of bytes freed."""
        if self._loan.runs:
            size, places = self.layout.step_bytes, list[Span]()
            span = Span(pages.start * size, pages.stop * size)
            for index in range(self.layout.num_steps):
                places += self._loan.places(index, span)
            self._pool.give_back(self._loan, places)
        num_bytes = len(pages) * self.layout.page_bytes
        self.num_bytes -= num_bytes
        return num_bytes
