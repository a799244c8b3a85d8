"""Host memory of the tree: one loan per reservation, of which pages are given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cachetree.checkpoint import Family
from cachetree.errors import StaleEntry
from cachetree.ids import Kind, Span, Step, entry_steps
from cachetree.memory.pool import Blocks, Loan, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What an entry of `num_pages` pages has: KV of every layer, then E of each of `e_layers`."""

    num_pages: int
    num_layers: int
    e_layers: tuple[int, ...]
    kv_page_bytes: int
    e_page_bytes: int

    @classmethod
    def of(cls, family: Family, num_pages: int, e_layers: Sequence[int]) -> Layout:
        kv_page_bytes, e_page_bytes = _page_bytes(family)
        return cls(
            num_pages=num_pages,
            num_layers=family.num_layers,
            e_layers=tuple(e_layers),
            kv_page_bytes=kv_page_bytes,
            e_page_bytes=e_page_bytes,
        )

    @property
    def steps(self) -> tuple[Step, ...]:
        """What lies in it, in this order."""
        return entry_steps(self.num_layers, self.e_layers)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.kv_page_bytes + len(self.e_layers) * self.e_page_bytes

    @property
    def parts(self) -> list[Blocks]:
        """A block for each page of each step."""
        kv, e = (Blocks(self.num_pages, it) for it in (self.kv_page_bytes, self.e_page_bytes))
        return [kv] * self.num_layers + [e] * len(self.e_layers)

    def part_of(self, step: Step) -> int:
        """Which of the parts it is; raises StaleEntry where there is no E of that layer."""
        if step.kind is Kind.KV:
            return step.layer
        if step.layer not in self.e_layers:
            raise StaleEntry(f"these pages are kept without E of layer {step.layer}")
        return self.num_layers + self.e_layers.index(step.layer)

    def bytes_of(self, step: Step, num_pages: int) -> int:
        """Of so many pages; raises StaleEntry as `part_of` does."""
        return num_pages * (
            self.kv_page_bytes if self.part_of(step) < self.num_layers else self.e_page_bytes
        )


@lru_cache(maxsize=16)
def _page_bytes(family: Family) -> tuple[int, int]:
    """Of KV and of E at one layer: the same objects for every layout of a family."""
    return family.kv_page_bytes, family.e_page_bytes


class Slab:
    """The memory of one reservation, given back page by page.

    Bytes that somebody views are never written again: a reader that still has a view when its
    pages are dropped keeps reading the same ones.
    """

    __slots__ = ("_checksums", "_loan", "_pool", "layout", "num_bytes")

    def __init__(self, layout: Layout, pool: Pool) -> None:
        self.layout = layout
        self.num_bytes = layout.num_bytes
        """What it takes now, or will once it is filled."""
        self._checksums: dict[tuple[int, int], int] | None = None
        self._pool = pool
        self._loan = Loan()

    def fill(self) -> None:
        """Get the memory; may block, so it is called without the tree's lock. Raises NoRoom."""
        self._loan = self._pool.take(self.layout.parts)

    @property
    def checksums(self) -> dict[tuple[int, int], int]:
        """Of parts that were sent, by address and size: pages do not change once they are there."""
        if self._checksums is None:
            self._checksums = {}
        return self._checksums

    @property
    def memory(self) -> memoryview:
        """Whoever keeps it keeps all that is there now."""
        return self._loan.memory

    def views(self, step: Step, pages: Span, memory: memoryview | None = None) -> list[memoryview]:
        """The bytes of these pages, in as many runs as they lie in; of `memory` if it was kept."""
        size = self.layout.bytes_of(step, 1)
        span = Span(pages.start * size, pages.stop * size)
        places = self._loan.places(self.layout.part_of(step), span)
        whole = self._loan.memory if memory is None else memory
        return [whole[it.start : it.stop] for it in places]

    def drop_pages(self, pages: Span) -> int:
        """These are needed no more; returns the bytes given back."""
        if self._loan.runs:
            places: list[Span] = []
            for part, (_, size) in enumerate(self.layout.parts):
                span = Span(pages.start * size, pages.stop * size)
                places += self._loan.places(part, span)
            self._pool.give_back(self._loan, places)
        num_bytes = len(pages) * self.layout.page_bytes
        self.num_bytes -= num_bytes
        return num_bytes
