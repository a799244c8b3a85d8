"""Host memory of the tree: one loan per reservation, cut into runs of pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cachetree.checkpoint import Family
from cachetree.errors import StaleEntry
from cachetree.ids import Kind, Span, Step, entry_steps
from cachetree.memory.pool import NO_MEMORY, Pool
from cachetree.memory.ranges import Ranges

_NOTHING: Final = Ranges()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each page of each layer lies in a slab of `num_pages` pages.

    bytes [0, L * n * kv)         KV, layer by layer, n pages each
    bytes [L * n * kv, num_bytes) E, one after the other in the order of `e_layers`, n pages each
    """

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

    def range_of(self, step: Step, pages: Span) -> Span:
        """The bytes of `pages` of one kind at one layer; raises StaleEntry where there is no E."""
        if step.kind is Kind.KV:
            page_bytes = self.kv_page_bytes
            base = step.layer * self.num_pages * page_bytes
        elif step.layer in self.e_layers:
            page_bytes = self.e_page_bytes
            base = self.num_pages * (
                self.num_layers * self.kv_page_bytes + self.e_layers.index(step.layer) * page_bytes
            )
        else:
            raise StaleEntry(f"these pages are kept without E of layer {step.layer}")
        return Span(base + pages.start * page_bytes, base + pages.stop * page_bytes)

    def ranges_of(self, pages: Span) -> Iterator[Span]:
        """The bytes of `pages` of every kind at every layer."""
        return (self.range_of(step, pages) for step in self.steps)


@lru_cache(maxsize=16)
def _page_bytes(family: Family) -> tuple[int, int]:
    """Of KV and of E at one layer: the same objects for every layout of a family."""
    return family.kv_page_bytes, family.e_page_bytes


class Slab:
    """The memory of one reservation, given back page by page as far as its memory's units allow.

    Bytes that somebody views are never written again: a reader that still has a view when its
    pages are dropped keeps reading the same ones.
    """

    __slots__ = (
        "_checksums",
        "_dropped",
        "_goes_whole",
        "_held",
        "_loan",
        "_memory",
        "_num_kept_pages",
        "layout",
        "num_bytes",
    )

    def __init__(self, layout: Layout, memory: Pool) -> None:
        self.layout = layout
        self.num_bytes = memory.size_of(layout.num_bytes)
        """What it takes now, or will once it is filled."""
        self._checksums: dict[tuple[int, int], int] | None = None
        self._memory = memory
        self._goes_whole = memory.unit_bytes > self.num_bytes
        self._loan = NO_MEMORY
        self._num_kept_pages = layout.num_pages
        self._dropped: Ranges = _NOTHING
        """Pages, if only some of them are needed no more."""
        self._held: Ranges = _NOTHING
        """Bytes of the loan that are not given back, if only some of them are."""

    def fill(self) -> None:
        """Get the memory; may block, so it is called without the tree's lock. Raises NoRoom."""
        self._loan = self._memory.take(self.layout.num_bytes)

    @property
    def checksums(self) -> dict[tuple[int, int], int]:
        """Of parts that were sent, by address and size: pages do not change once they are there."""
        if self._checksums is None:
            self._checksums = {}
        return self._checksums

    def view(self, step: Step, pages: Span) -> memoryview:
        where = self.layout.range_of(step, pages)
        return self._loan[where.start : where.stop]

    @property
    def whole(self) -> memoryview:
        return self._loan

    def drop_pages(self, pages: Span) -> int:
        """These are needed no more; returns the bytes given back."""
        self._num_kept_pages -= len(pages)
        if self._num_kept_pages:
            return 0 if self._goes_whole else self._give_back(self._needless_units(pages))
        is_whole = self._held is _NOTHING
        return self._give_back([Span(0, self.num_bytes)] if is_whole else list(self._held))

    def _needless_units(self, pages: Span) -> list[Span]:
        """What these pages, with others that were dropped, had to themselves."""
        unit = self._memory.unit_bytes
        if self._held is _NOTHING:
            self._dropped, self._held = Ranges(), Ranges(Span(0, self.num_bytes))
        self._dropped.add(pages)
        units: list[Span] = []
        for run in self.layout.ranges_of(self._dropped.around(pages.start)):
            first, last = -(-run.start // unit), run.stop // unit
            units += self._held.take_out(Span(first * unit, max(first, last) * unit))
        return units

    def _give_back(self, parts: Sequence[Span]) -> int:
        if parts and self._loan:
            rest = self._memory.give_back(self._loan, parts)
            self._loan = rest if self._num_kept_pages else NO_MEMORY
        num_bytes = sum(map(len, parts))
        self.num_bytes -= num_bytes
        return num_bytes

    def least_bytes(self, kept: Iterable[Span]) -> int:
        """What dropping all but some runs of pages leaves at most."""
        unit = self._memory.unit_bytes
        if unit > self.num_bytes:
            return self.num_bytes
        runs = Ranges()
        for pages in kept:
            runs.take_out(pages)
            runs.add(pages)
        # A unit across the border of two layers stays with the slab.
        num_bytes = unit * (self.layout.num_layers + len(self.layout.e_layers) + 1)
        for pages in runs:
            for part in self.layout.ranges_of(pages):
                num_bytes += -(-part.stop // unit) * unit - part.start // unit * unit
        return min(num_bytes, self.num_bytes)


def kept_bytes(runs: Iterable[tuple[Slab, Span]]) -> int:
    """What is held at most once all pages but these are dropped."""
    by_slab: dict[Slab, list[Span]] = {}
    for slab, pages in runs:
        by_slab.setdefault(slab, []).append(pages)
    return sum(slab.least_bytes(kept) for slab, kept in by_slab.items())


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of pages of one slab."""

    slab: Slab
    pages: Span
    loan: memoryview | None = None
    """The slab's, if it is kept for this one though the slab gives it back."""

    def view(self, step: Step, pages: Span) -> memoryview:
        """The bytes of `pages`, counted from the first page of this segment."""
        start = self.pages.start
        where = self.slab.layout.range_of(step, Span(start + pages.start, start + pages.stop))
        loan = self.slab.whole if self.loan is None else self.loan
        return loan[where.start : where.stop]

    def kept(self) -> Segment:
        """The same, readable as long as it is there."""
        return Segment(self.slab, self.pages, self.slab.whole)


def join(segments: Sequence[Segment]) -> list[Segment]:
    """The same pages in as few runs as storage allows; pieces of a split node become one again."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last and last.slab is segment.slab and last.pages.stop == segment.pages.start:
            joined[-1] = Segment(last.slab, Span(last.pages.start, segment.pages.stop))
        else:
            joined.append(segment)
    return joined
