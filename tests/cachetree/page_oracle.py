"""What a tree must hold, as a slow and obvious set: per model, the prefixes that it has.

A page is named by the text up to and including it, so "abc" is the page after "ab". That is its
place, too. In a place that a wrong advert gave it, it is named by the place before that as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from tree_parts import FAMILY, PAGE, E, FakeTime

from cachetree.checkpoint.family import Family
from cachetree.ids import Location, ModelId
from cachetree.tree.eviction import Retention
from cachetree.tree.lease import Lease, Reservation


def prefixes(text: str, start: int) -> list[str]:
    """The pages of `text` from page `start` on."""
    return [text[: i + 1] for i in range(start, len(text))]


def page_at(place: str) -> str:
    """The page that is there."""
    return place.rpartition("|")[2]


@dataclass(eq=False)
class Slab:
    num_pages: int
    e_layers: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        return PAGE + len(self.e_layers) * E

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


@dataclass
class Page:
    slab: Slab
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


@dataclass
class OpenLease:
    handle: Lease
    model: ModelId
    pages: list[str]
    at_s: float
    e_layers: set[int]
    """Of which all of them had E when it was made."""


@dataclass
class Oracle:
    """What is there, by whom it is held, and what may go."""

    family: Family = FAMILY
    budget: int = 16 * PAGE
    clock: FakeTime = field(default_factory=FakeTime)
    retention: Retention = field(default_factory=Retention)
    local: dict[tuple[ModelId, str], Page] = field(default_factory=dict)
    remote: dict[tuple[Location, ModelId, str], tuple[int, ...]] = field(default_factory=dict)
    above: dict[str, str] = field(default_factory=dict)
    """The place before each place. A page that was advertised elsewhere has a place named so."""
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
        num_open = sum(it.slab.num_bytes for it in self.reservations)
        return num_open + self.bytes_of(self.local.keys())

    def held(self) -> set[tuple[ModelId, str]]:
        held = {(it.model, page) for it in self.leases for page in it.pages}
        held |= {(it.model, it.parent) for it in self.reservations}
        return held | self.pinned_pages() | ({self.keep} if self.keep else set())

    def pinned_pages(self) -> set[tuple[ModelId, str]]:
        return set().union(*[it.pages for it in self.pins.values()])

    def bytes_of(self, pages: Collection[tuple[ModelId, str]]) -> int:
        """What stays where all pages but these go."""
        return sum(self.local[page].slab.page_bytes for page in pages)

    def is_taken(self, model: ModelId, page: str, e_layers: Collection[int]) -> bool:
        """Whether storing it with this E adds to what is there, and takes nothing away."""
        there = self.local.get((model, page))
        return there is None or set(there.slab.e_layers) < set(e_layers)

    def skipped(self, model: ModelId, pages: list[str], e_layers: Collection[int]) -> list[str]:
        """The leading pages that need not be stored."""
        return list(takewhile(lambda page: not self.is_taken(model, page, e_layers), pages))

    def is_expired(self, page: Page) -> bool:
        ttl_s = self.retention.ttl_s
        return ttl_s is not None and page.used_at_s <= self.clock.now_s - ttl_s

    def held_bytes(self, also: Collection[tuple[ModelId, str]]) -> int:
        """What is held stays, and all before it; `also` is about to be."""
        ends = [it for it in {*self.held(), *also} if it in self.local]
        pages = {(model, page) for model, text in ends for page in prefixes(text, 0)}
        pages |= {(model, page) for model, text in ends for page in self.entry(model, text)}
        return sum(it.slab.num_bytes for it in self.reservations) + self.bytes_of(pages)

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

    def cover(
        self, parent: str, pages: Sequence[str], own: Mapping[str, str] | None = None
    ) -> list[str]:
        """Have nodes of exactly these; ends before a page that is in another place of `own`, or
        comes twice. Returns their places."""
        known, covered = self.known(), list[str]()
        for i, page in enumerate(pages):
            before = covered[-1] if covered else parent
            at = page if page[:-1] == before else f"{before}|{page}"
            if page in pages[:i] or (own or {}).get(page, at) != at:
                break
            self.above[at] = before
            covered.append(at)
        self.cuts |= {parent, *covered[-1:]}
        self.cuts |= set([at for at in covered if at in known][-1:])
        return covered

    def drop_below(self, location: Location, model: ModelId, page: str) -> None:
        """A remote entry goes, with all that hangs on it."""
        self.cuts.add(self.above[page])
        for key in [key for key in self.remote if key[:2] == (location, model)]:
            end = key[2]
            while end not in (page, ""):
                end = self.above[end]
            if end:
                del self.remote[key]
        self.forget_cuts()

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
