"""The content that a tree must have, as a slow and obvious set of prefixes per model and part.

A page is named by the text up to and including it: "abc" is the page after "ab". The name is also
its place. If a wrong advert puts a page elsewhere, its place also names the place before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from tree_parts import FAMILY, PAGE, E, FakeTime

from cachetree.checkpoint.family import Family
from cachetree.ids import KV, Location, ModelId, Part
from cachetree.tree.eviction import Retention
from cachetree.tree.holds import Lease, Reservation

Key = tuple[ModelId, Part]
Named = tuple[Key, str]
"""A page of one model and part."""


def prefixes(text: str, start: int) -> list[str]:
    """Return the pages of `text` from page `start` on."""
    return [text[: i + 1] for i in range(start, len(text))]


def page_at(place: str) -> str:
    """Name of the page at a place."""
    return place.rpartition("|")[2]


def page_bytes(key: Key) -> int:
    return PAGE if key[1] == KV else E


@dataclass
class Page:
    used: int
    used_at_s: float = 0.0


@dataclass
class OpenPin:
    pages: set[Named]
    at_s: float


@dataclass
class OpenReservation:
    handle: Reservation
    key: Key
    pages: list[str]
    ground: set[Named]
    """Pages that must stay until the reservation ends: all pages before it, and their KV."""

    @property
    def num_bytes(self) -> int:
        return len(self.pages) * page_bytes(self.key)


@dataclass
class OpenLease:
    handle: Lease
    keys: list[Key]
    pages: list[str]
    at_s: float


@dataclass
class Oracle:
    """Pages that the tree has, the holders of each, and the pages that may be evicted."""

    family: Family = FAMILY
    budget: int = 16 * PAGE
    clock: FakeTime = field(default_factory=FakeTime)
    retention: Retention = field(default_factory=Retention)
    local: dict[Named, Page] = field(default_factory=dict)
    remote: set[tuple[Location, Key, str]] = field(default_factory=set)
    above: dict[str, str] = field(default_factory=dict)
    """The place before each place. A page that was advertised elsewhere has a place named so."""
    cuts: set[str] = field(default_factory=set)
    """Pages after which a node ends."""
    reservations: list[OpenReservation] = field(default_factory=list)
    leases: list[OpenLease] = field(default_factory=list)
    pins: dict[tuple[ModelId | None, str], OpenPin] = field(default_factory=dict)
    num_uses: int = 0
    keep: set[Named] = field(default_factory=set)
    """Pages that must stay for the reservation that is being made."""
    is_sweeping: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(it.num_bytes for it in self.reservations) + self.bytes_of(self.local)

    def held(self) -> set[Named]:
        held = {(key, page) for it in self.leases for key in it.keys for page in it.pages}
        return held.union(self.pinned_pages(), self.keep, *[it.ground for it in self.reservations])

    def pinned_pages(self) -> set[Named]:
        return set().union(*[it.pages for it in self.pins.values()])

    def bytes_of(self, pages: Iterable[Named]) -> int:
        return sum(page_bytes(key) for key, _ in pages)

    def present(self, key: Key, pages: Iterable[str]) -> list[str]:
        """Return the leading pages that the model has."""
        return list(takewhile(lambda page: (key, page) in self.local, pages))

    def is_expired(self, page: Page) -> bool:
        ttl_s = self.retention.ttl_s
        return ttl_s is not None and page.used_at_s <= self.clock.now_s - ttl_s

    def with_ground(self, key: Key, text: str) -> set[Named]:
        """Return all pages of one key up to the end of a page's node, with the KV that they
        need."""
        pages = {*prefixes(text, 0), *self.entry(key, text)}
        return {(each, page) for each in (key, (key[0], KV)) for page in pages}

    def held_bytes(self, also: Collection[Named]) -> int:
        """Bytes that cannot be evicted: pages that are held or are about to be (`also`), and all
        pages before them."""
        ends = [it for it in {*self.held(), *also} if it in self.local]
        pages = set().union(*[self.with_ground(*it) for it in ends])
        return sum(it.num_bytes for it in self.reservations) + self.bytes_of(pages)

    def entry(self, key: Key, page: str) -> list[str]:
        """Return all pages of the node that holds `page`."""
        pages = [page]
        while len(pages[0]) > 1 and pages[0][:-1] not in self.cuts:
            pages.insert(0, pages[0][:-1])
        while pages[-1] not in self.cuts:
            below = [p for each, p in self.local if each == key and p[:-1] == pages[-1]]
            assert len(below) == 1
            pages += below
        return pages

    def is_evictable(self, key: Key, page: str) -> bool:
        """Whether nothing is below the page and, for KV, no E is at the same pages."""
        pages = self.entry(key, page)
        has_more = any(
            p[:-1] == pages[-1] if each == key else key == (each[0], KV) and p == page
            for each, p in self.local
        )
        return not has_more and not self.held() & {(key, p) for p in pages}

    def touch(self, key: Key, text: str) -> None:
        for each in self.with_ground(key, text):
            self.local[each] = Page(self.num_uses, self.clock.now_s)

    def cover(self, parent, pages, own=None):
        """Make nodes of these pages and return their places. Stop at a page that is at another
        place in `own`, or that comes twice."""
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

    def drop_below(self, location: Location, key: Key, page: str) -> None:
        """Remove a remote entry, with all entries below it."""
        self.cuts.add(self.above[page])
        for each in [it for it in self.remote if it[:2] == (location, key)]:
            end = each[2]
            while end not in (page, ""):
                end = self.above[end]
            if end:
                self.remote.remove(each)
        self.forget_cuts()

    def known(self) -> set[str]:
        return {page for _, page in self.local} | {page for _, _, page in self.remote}

    def forget_cuts(self) -> None:
        self.cuts &= self.known()
