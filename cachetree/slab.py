"""Host memory of the tree: one allocation per reservation, cut into runs of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachetree.errors import StaleEntry
from cachetree.family import Family
from cachetree.ids import Span
from cachetree.plan import Kind, Step
from cachetree.staging import Allocate


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
        return cls(
            num_pages=num_pages,
            num_layers=family.num_layers,
            e_layers=tuple(e_layers),
            kv_page_bytes=family.kv_page_bytes,
            e_page_bytes=family.e_page_bytes,
        )

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


class Slab:
    """One allocation. It is given back as a whole when its last live page goes.

    Memory is never used twice: a reader that still has a view when the slab is dropped keeps
    reading the same bytes.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.num_bytes = layout.num_bytes
        self.num_live_pages = layout.num_pages
        self._memory = memoryview(b"")

    def fill(self, allocate: Allocate) -> None:
        """Get the memory; may block, so it is called without the tree's lock."""
        self._memory = allocate(self.num_bytes)

    def view(self, step: Step, pages: Span) -> memoryview:
        where = self.layout.range_of(step, pages)
        return self._memory[where.start : where.stop]

    @property
    def whole(self) -> memoryview:
        return self._memory

    def drop_pages(self, num_pages: int) -> int:
        """Count pages out; returns the bytes given back, 0 while others live."""
        self.num_live_pages -= num_pages
        if self.num_live_pages:
            return 0
        self._memory = memoryview(b"")
        return self.num_bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of pages of one slab."""

    slab: Slab
    pages: Span

    def view(self, step: Step, pages: Span) -> memoryview:
        """The bytes of `pages`, counted from the first page of this segment."""
        start = self.pages.start
        return self.slab.view(step, Span(start + pages.start, start + pages.stop))

    def part(self, pages: Span) -> Segment:
        start = self.pages.start
        return Segment(self.slab, Span(start + pages.start, start + pages.stop))


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
