"""What a tree must hold, as a slow and obvious set: per model, the prefixes that it has.

A page is named by the text up to and including it, so "abc" is the page after "ab".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tree_parts import FAMILY, PAGE, FakeTime

from cachetree.eviction import Retention
from cachetree.family import Family
from cachetree.ids import Location, ModelId
from cachetree.lease import Lease, Reservation


def prefixes(text: str, start: int) -> list[str]:
    """The pages of `text` from page `start` on."""
    return [text[: i + 1] for i in range(start, len(text))]


@dataclass
class Slab:
    num_bytes: int
    num_live: int


@dataclass
class Page:
    slab: Slab
    e_layers: tuple[int, ...]
    used: int
    used_at_s: float = 0.0


@dataclass
class OpenPin:
    pages: set[tuple[ModelId, str]]
    at_s: float


@dataclass
class OpenReservation:
    handle: Reservation
    model: ModelId
    parent: str
    pages: list[str]
    slab: Slab
    e_layers: tuple[int, ...]


@dataclass
class OpenLease:
    handle: Lease
    model: ModelId
    pages: list[str]
    at_s: float


@dataclass
class Oracle:
    """What is there, by whom it is held, and what may go."""

    family: Family = FAMILY
    budget: int = 16 * PAGE
    clock: FakeTime = field(default_factory=FakeTime)
    retention: Retention = field(default_factory=Retention)
    local: dict[tuple[ModelId, str], Page] = field(default_factory=dict)
    remote: dict[tuple[Location, ModelId, str], tuple[int, ...]] = field(default_factory=dict)
    cuts: set[str] = field(default_factory=set)
    """Pages after which a node ends."""
    reservations: list[OpenReservation] = field(default_factory=list)
    leases: list[OpenLease] = field(default_factory=list)
    pins: dict[tuple[ModelId | None, str], OpenPin] = field(default_factory=dict)
    num_uses: int = 0
    keep: tuple[ModelId, str] | None = None
    """The page that the reservation being made hangs on."""
    is_sweeping: bool = False

    @property
    def num_bytes(self) -> int:
        slabs = {id(page.slab): page.slab for page in self.local.values()}
        slabs |= {id(it.slab): it.slab for it in self.reservations}
        return sum(slab.num_bytes for slab in slabs.values())

    def held(self) -> set[tuple[ModelId, str]]:
        held = {(it.model, page) for it in self.leases for page in it.pages}
        held |= {(it.model, it.parent) for it in self.reservations}
        return held | self.pinned_pages() | ({self.keep} if self.keep else set())

    def pinned_pages(self) -> set[tuple[ModelId, str]]:
        return set().union(*[it.pages for it in self.pins.values()])

    def bytes_of(self, pages: Collection[tuple[ModelId, str]]) -> int:
        """Of all memory that has one of them."""
        slabs = {id(self.local[page].slab): self.local[page].slab for page in pages}
        return sum(slab.num_bytes for slab in slabs.values())

    def is_expired(self, page: Page) -> bool:
        ttl_s = self.retention.ttl_s
        return ttl_s is not None and page.used_at_s <= self.clock.now_s - ttl_s

    def pinned_slabs(self, also: Collection[tuple[ModelId, str]]) -> list[Slab]:
        slabs = {id(it.slab): it.slab for it in self.reservations}
        for model, text in {*self.held(), *also}:
            for page in prefixes(text, 0):
                if (model, page) in self.local:
                    slab = self.local[model, page].slab
                    slabs[id(slab)] = slab
        return list(slabs.values())

    def entry(self, model: ModelId, page: str) -> list[str]:
        """All pages of the node that holds `page`."""
        pages = [page]
        while len(pages[0]) > 1 and pages[0][:-1] not in self.cuts:
            pages.insert(0, pages[0][:-1])
        while pages[-1] not in self.cuts:
            below = [p for m, p in self.local if m == model and p[:-1] == pages[-1]]
            assert len(below) == 1
            pages += below
        return pages

    def is_evictable(self, model: ModelId, page: str) -> bool:
        pages = self.entry(model, page)
        is_leaf = not any(m == model and p[:-1] == pages[-1] for m, p in self.local)
        return is_leaf and not self.held() & {(model, p) for p in pages}

    def touch(self, model: ModelId, text: str) -> None:
        for page in {*prefixes(text, 0), *self.entry(model, text)}:
            self.local[model, page].used = self.num_uses
            self.local[model, page].used_at_s = self.clock.now_s

    def cover(self, pages: list[str]) -> None:
        known = self.known()
        self.cuts |= {pages[0][:-1], pages[-1]}
        self.cuts |= set([page for page in pages if page in known][-1:])

    def known(self) -> set[str]:
        return {page for _, page in self.local} | {page for _, _, page in self.remote}

    def forget_cuts(self) -> None:
        self.cuts &= self.known()


def leading_e(have: list[tuple[int, ...]]) -> dict[int, int]:
    """Per layer, how many of the first pages have E there."""
    counts = {}
    for layer in range(FAMILY.num_layers):
        lacking = [i for i, e_layers in enumerate(have) if layer not in e_layers]
        counts[layer] = lacking[0] if lacking else len(have)
    return {layer: count for layer, count in counts.items() if count}
