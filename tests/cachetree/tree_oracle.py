"""The tree beside a slow, obvious oracle: per model, the set of the prefixes that it has.

A page is named by the text up to and including it, so "abc" is the page after "ab"; its token is
the letter, and capitals are the same tokens of another tenant. Models have names, and a name may
be loaded anew as another model. Every operation runs on the tree and on the oracle, and afterwards
the two must agree on what is there, on every byte held, and on which entry had to go: exactly under
LRU, and under every other policy that it was one that may.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import pytest
from page_oracle import (
    OpenLease,
    OpenPin,
    OpenReservation,
    Oracle,
    Page,
    Slab,
    leading_e,
    page_at,
    prefixes,
)
from tree_parts import FAMILY, KV0, content

from cachetree.clock import Deadline
from cachetree.errors import PinRefused, StaleEntry
from cachetree.ids import LOCAL, Kind, Location, ModelId, PageHash, Span, entry_steps
from cachetree.memory import Blocks, Loan, scatter
from cachetree.tree.entries import Change
from cachetree.tree.hashing import page_hashes
from cachetree.tree.tree import CacheTree

NAMES = ("base", "adapter")
LOCATIONS = (Location("tcp://far:1"), Location("tcp://farther:1"))
LIAR = Location("tcp://liar:1")
"""Advertises pages where they cannot be; what is said of it in a match is not looked at."""
E_CHOICES: tuple[tuple[int, ...], ...] = ((), (1,), (0, 2), (0, 1, 2))
ALPHABETS = ("abc", "ABC")
"""One per tenant."""
SALTS = (b"", b"salt of the second tenant".ljust(32))


@functools.cache
def path(text: str) -> list[PageHash]:
    """The hashes of the pages of `text`; one letter each."""
    tenant = int(text[:1].isupper())
    return page_hashes([ALPHABETS[tenant].index(it) for it in text], 1, SALTS[tenant])


class Memory:
    """Tears every part into its blocks, and lends them in reverse order.

    What is given back is written over as soon as nobody views the loan that it was a part of.
    """

    file = None

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, parts: Sequence[Blocks]) -> Loan:
        num_bytes = at = sum(part.num * part.size for part in parts)
        self.num_bytes += num_bytes
        runs = []
        for num, size in parts:
            runs.append([Span(at - (i + 1) * size, at - i * size) for i in range(num)])
            at -= num * size
        return Loan(np.zeros(num_bytes, np.uint8)[:].data, runs)

    def give_back(self, loan: Loan, places: Sequence[Span]) -> None:
        old = loan.memory.obj
        assert isinstance(old, np.ndarray)
        self.num_bytes -= sum(map(len, places))
        new = old.base[:]
        loan.memory = new.data
        # Who views the old one keeps the new one, so that what is given back later waits, too.
        weakref.finalize(old, self.write_over, new, places).atexit = False

    def write_over(self, there: np.ndarray[Any, Any], parts: Sequence[Span]) -> None:
        for part in parts:
            there[part.start : part.stop] = 0xEE

    def place_of(self, view: memoryview) -> int | None:
        return None

    def close(self) -> None:
        pass


@dataclass
class Mirror(Oracle):
    """The tree and the oracle side by side."""

    loaded: dict[str, ModelId] = field(default_factory=dict)
    num_operations: int = 0
    num_evictions: int = 0
    wanted_bytes: int | None = None
    """What a reservation asks for now; None while everything may go."""

    def __post_init__(self) -> None:
        self.memory = Memory()
        self.num_pinned_bytes = 0
        self.tree = CacheTree(
            self.family,
            host_bytes=self.budget,
            clock=self.clock,
            memory=self.memory,
            retention=self.retention,
        )
        for name in NAMES:
            self.load(name)
        self.text_of: dict[PageHash, str] = {}
        _, self.unsubscribe = self.tree.subscribe(self.on_change)

    # Operations.

    def load(self, name: str) -> None:
        """Load a model, or another one under the same name: what the first had is not its own."""
        self.num_operations += 1
        self.loaded[name] = ModelId(f"{name}, loaded as number {self.num_operations}")

    def reserve(self, model: ModelId, text: str, start: int, e_layers: tuple[int, ...]) -> None:
        self.num_operations += 1
        self.sweep()
        pages, parent = prefixes(text, start), text[:start]
        present = self.skipped(model, pages, e_layers)
        new = pages[len(present) :]
        slab = Slab(len(new), e_layers)
        num_bytes = slab.num_bytes
        before = new[0][:-1] if new else ""
        held_bytes = self.held_bytes([(model, before)] if new else [])
        is_orphan = bool(parent) and (model, parent) not in self.local
        self.wanted_bytes = num_bytes
        must_fit = not new or self.num_bytes + num_bytes <= self.budget
        must_fit |= held_bytes + num_bytes <= self.budget
        self.keep = (model, before)
        handle = self.tree.reserve(model, self.hash(parent), self.hashes(text)[start:], e_layers)
        self.keep = None
        assert (handle is not None) == (must_fit and not is_orphan)
        if handle is None:
            return
        assert handle.skipped == len(present)
        assert list(handle.pages) == self.hashes(text)[start + len(present) :]
        if not new:
            handle.commit()
            return
        for step in handle.steps:
            scatter(handle.views(step), memoryview(content(model, handle.pages, step)))
        self.reservations.append(OpenReservation(handle, model, before, new, slab))

    def commit(self, index: int) -> None:
        self.num_operations += 1
        it = self.reservations.pop(index)
        rest = it.pages[len(self.skipped(it.model, it.pages, it.slab.e_layers)) :]
        if rest:
            self.cover(rest[0][:-1], rest)
        kept = [page for page in rest if self.is_taken(it.model, page, it.slab.e_layers)]
        is_gain = any((it.model, page) in self.local for page in kept)
        for page in kept:
            self.local[it.model, page] = Page(it.slab, 0)
        if kept:
            self.num_uses += 1
            self.touch(it.model, kept[-1])
        if is_gain:
            self.num_pinned_bytes = self.bytes_of(self.pinned_pages())
        self.added: list[Change] = []
        it.handle.commit()
        assert [page for change in self.added for page in change.pages] == [
            self.hashes(page)[-1] for page in kept
        ]
        for change in self.added:
            assert change.parent == self.hash(self.text_of[change.pages[0]][:-1])
            assert change.e_layers == it.slab.e_layers

    def release(self, index: int) -> None:
        self.num_operations += 1
        self.reservations.pop(index).handle.release()

    def lease(self, model: ModelId, text: str, start: int, seconds: float) -> None:
        self.num_operations += 1
        pages = prefixes(text, start)
        at_s = self.clock.now_s + seconds
        handle = self.tree.lease(model, self.hashes(text)[start:], "oracle", Deadline(at_s))
        assert (handle is not None) == all((model, page) in self.local for page in pages)
        if handle is not None:
            e_layers = set.intersection(
                *[set(self.local[model, page].slab.e_layers) for page in pages]
            )
            self.leases.append(OpenLease(handle, model, pages, at_s, e_layers))
            self.check_content(self.leases[-1])
            self.num_uses += 1
            self.touch(model, text)

    def end_lease(self, index: int) -> None:
        self.num_operations += 1
        it = self.leases.pop(index)
        self.check_content(it)
        it.handle.release()
        with pytest.raises(StaleEntry):
            it.handle.views(KV0)

    def advance(self, seconds: float) -> None:
        self.num_operations += 1
        self.clock.now_s += seconds
        self.sweep()

    def pin(self, model: ModelId | None, text: str, seconds: float | None) -> None:
        self.num_operations += 1
        self.sweep()
        depths = {
            each: num
            for each in ({it for it, _ in self.local} if model is None else {model})
            if (num := sum((each, page) in self.local for page in prefixes(text, 0)))
        }
        self.cuts |= {text[:num] for num in depths.values()}  # Also of a pin that is refused.
        pages = {(each, page) for each, num in depths.items() for page in prefixes(text[:num], 0)}
        at_s = inf if seconds is None else self.clock.now_s + seconds
        others = [it for key, it in self.pins.items() if key != (model, text)]
        wanted = self.bytes_of(set().union(pages, *[it.pages for it in others]))
        deadline = None if seconds is None else Deadline(at_s)
        if pages and wanted > int(self.retention.max_pinned_share * self.budget):
            with pytest.raises(PinRefused, match=f"would keep {wanted} bytes"):
                self.tree.pin(model, self.hashes(text), deadline)
            return
        assert self.tree.pin(model, self.hashes(text), deadline) == depths
        if pages:
            self.pins[model, text] = OpenPin(pages, at_s)
            self.num_pinned_bytes = self.bytes_of(self.pinned_pages())

    def unpin(self, model: ModelId | None, text: str) -> None:
        self.num_operations += 1
        is_pinned = self.pins.pop((model, text), None) is not None
        assert self.tree.unpin(model, self.hashes(text)) == is_pinned
        self.num_pinned_bytes = self.bytes_of(self.pinned_pages())

    def sweep(self) -> None:
        """What has to go does, and nothing else."""
        self.leases = [it for it in self.leases if it.at_s > self.clock.now_s]
        pins = {key: it for key, it in self.pins.items() if it.at_s > self.clock.now_s}
        if len(pins) < len(self.pins):
            self.pins = pins
            self.num_pinned_bytes = self.bytes_of(self.pinned_pages())
        self.is_sweeping = True
        self.tree.sweep()
        self.is_sweeping = False
        assert not any(
            self.is_expired(page) and self.is_evictable(*key) for key, page in self.local.items()
        )

    def clear(self) -> None:
        self.num_operations += 1
        self.sweep()
        self.wanted_bytes = None
        self.tree.evict()
        assert all(not self.is_evictable(model, page) for model, page in self.local)

    def add_remote(
        self,
        location: Location,
        model: ModelId,
        text: str,
        start: int,
        e_layers: tuple[int, ...],
    ) -> None:
        self.num_operations += 1
        self.tree.remote.add(
            location, model, self.hash(text[:start]), self.hashes(text)[start:], e_layers
        )
        if start == 0 or (location, model, text[:start]) in self.remote:
            for page in self.cover(text[:start], prefixes(text, start)):
                self.remote[location, model, page] = e_layers

    def lie(self, model: ModelId, parent: str, pages: Sequence[str]) -> None:
        """Advertise pages in any order after a page that was advertised, or at the root."""
        self.num_operations += 1
        hashes = [self.hashes(page)[-1] for page in pages]
        parent_page = page_at(parent)
        self.tree.remote.add(LIAR, model, self.hash(parent_page), hashes, ())
        if not parent or (LIAR, model, parent) in self.remote:
            own = {page_at(at): at for of, whose, at in self.remote if (of, whose) == (LIAR, model)}
            for at in self.cover(parent, pages, own):
                self.remote[LIAR, model, at] = ()

    def drop_remote(self, location: Location, model: ModelId, text: str, start: int) -> None:
        self.num_operations += 1
        self.tree.remote.drop(location, model, self.hashes(text)[start:])
        for page in prefixes(text, start):
            if (location, model, page) in self.remote:
                self.drop_below(location, model, page)
                break

    def forget(self, location: Location) -> None:
        self.num_operations += 1
        self.tree.remote.forget(location)
        self.remote = {key: e for key, e in self.remote.items() if key[0] != location}
        self.forget_cuts()

    def match(self, text: str) -> None:
        self.num_operations += 1
        self.num_uses += 1  # one use of all models: their order among each other is free
        found = {
            (m.location, m.model): (m.num_pages, dict(m.e_pages))
            for m in self.tree.match(self.hashes(text))
            if m.location != LIAR
        }
        expected: dict[tuple[Location, ModelId], tuple[int, dict[int, int]]] = {}
        for model in {model for model, _ in self.local} | {model for _, model, _ in self.remote}:
            pages = [self.local.get((model, page)) for page in prefixes(text, 0)]
            have = [page.slab.e_layers for page in pages if page is not None]
            if have:
                expected[LOCAL, model] = (len(have), leading_e(have))
                self.touch(model, text[: len(have)])
            for location in LOCATIONS:
                advertised = [self.remote.get((location, model, p)) for p in prefixes(text, 0)]
                have = [e_layers for e_layers in advertised if e_layers is not None]
                if have:
                    expected[location, model] = (len(have), leading_e(have))
        assert found == expected

    # What must hold after each of them.

    def check(self) -> None:
        assert self.memory.num_bytes == self.tree.num_bytes == self.num_bytes <= self.budget
        assert self.tree.num_pages == len(self.local)
        assert self.tree.num_pinned_bytes == self.num_pinned_bytes
        assert self.tree.pages_by_model() == Counter(model for model, _ in self.local)
        noted = Counter(location for location, _, _ in self.remote)
        assert all(self.tree.remote.num_pages[it] == noted[it] for it in (*LOCATIONS, LIAR))

    def check_content(self, it: OpenLease) -> None:
        hashes = self.hashes(it.pages[-1])[-len(it.pages) :]
        for step in entry_steps(FAMILY.num_layers, range(FAMILY.num_layers)):
            if step.kind is Kind.KV or step.layer in it.e_layers:
                assert b"".join(it.handle.views(step)) == content(it.model, hashes, step)
            else:
                with pytest.raises(StaleEntry):
                    it.handle.views(step)

    def on_change(self, change: Change) -> None:
        """Additions are checked by `commit`; a removal must be the entry that had to go."""
        if change.added:
            self.added.append(change)
            return
        self.num_evictions += 1
        model, pages = change.model, [self.text_of[page] for page in change.pages]
        assert change.parent == self.hash(pages[0][:-1])
        assert pages == self.entry(model, pages[0])
        assert self.is_evictable(model, pages[-1])
        if self.is_sweeping:
            assert self.is_expired(self.local[model, pages[0]])
        elif self.wanted_bytes is not None:
            assert self.num_bytes + self.wanted_bytes > self.budget
            candidates = [p.used for (m, t), p in self.local.items() if self.is_evictable(m, t)]
            assert self.local[model, pages[0]].used == min(candidates)
        for page in pages:
            del self.local[model, page]
        self.forget_cuts()

    def hashes(self, text: str) -> list[PageHash]:
        pages = path(text)
        self.text_of.update(zip(pages, prefixes(text, 0), strict=True))
        return pages

    def hash(self, text: str) -> PageHash | None:
        return self.hashes(text)[-1] if text else None
