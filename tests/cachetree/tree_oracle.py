"""The tree beside a slow, obvious oracle: per model and part, the set of the prefixes it has.

A page is named by the text up to and including it, so "abc" is the page after "ab". Its token is
the letter; capitals are the same tokens of another tenant. Models have names, and a name may be
loaded anew as another model. Every operation runs on the tree and on the oracle. Afterwards the two
must agree on the pages, on every held byte, and on the evicted entry. Under LRU that is one certain
entry; other policies may choose among several.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import pytest
from page_oracle import (
    Key,
    OpenLease,
    OpenPin,
    OpenReservation,
    Oracle,
    Page,
    page_at,
    page_bytes,
    prefixes,
)
from tree_parts import FAMILY, content

from cachetree.clock import Deadline
from cachetree.errors import PinRefused, StaleEntry
from cachetree.ids import KV, LOCAL, Location, ModelId, PageHash, Part, Span, steps_of
from cachetree.memory import Blocks, Loan, scatter
from cachetree.tree.entries import Change
from cachetree.tree.hashing import page_hashes
from cachetree.tree.tree import CacheTree

NAMES = ("base", "adapter")
LOCATIONS = (Location("tcp://far:1"), Location("tcp://farther:1"))
LIAR = Location("tcp://liar:1")
"""A location that advertises pages at wrong places. What a match says about it is not checked."""
PARTS = (KV, KV, Part(0), Part(2))
ALPHABETS = ("abc", "ABC")
"""Letters of prompts, one alphabet for each tenant."""
SALTS = (b"", b"salt of the second tenant".ljust(32))


@functools.cache
def path(text: str) -> list[PageHash]:
    """Return the hashes of the pages of `text`. Each letter is a page."""
    tenant = int(text[:1].isupper())
    return page_hashes([ALPHABETS[tenant].index(it) for it in text], 1, SALTS[tenant])


class Memory:
    """Memory that splits every part into its blocks, and lends them in reverse order.

    Returned blocks are overwritten as soon as no view of their loan is left.
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

    def write_over(self, memory: np.ndarray[Any, Any], parts: Sequence[Span]) -> None:
        for part in parts:
            memory[part.start : part.stop] = 0xEE

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
    """Bytes that the present reservation asks for. None while everything may be evicted."""

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
        """Load a model under a name. If the name is loaded again, it is another model, which does
        not own the first one's pages."""
        self.num_operations += 1
        self.loaded[name] = ModelId(f"{name}, loaded as number {self.num_operations}")

    def reserve(self, key: Key, text: str, start: int) -> None:
        self.num_operations += 1
        self.sweep()
        model, part = key
        parent, pages = text[:start], prefixes(text, start)
        pages = self.present((model, KV), pages) if part != KV else pages
        present = self.present(key, pages)
        new = pages[len(present) :]
        ground = {(key, new[0][:-1])} if new else set()
        if new and part != KV:
            ground.add(((model, KV), new[-1]))
        num_bytes = len(new) * page_bytes(key)
        held_bytes = self.held_bytes(ground)
        is_orphan = bool(parent) and (key, parent) not in self.local
        self.wanted_bytes = num_bytes
        must_fit = not new or self.num_bytes + num_bytes <= self.budget
        must_fit |= held_bytes + num_bytes <= self.budget
        self.keep = ground
        handle = self.tree.reserve(model, self.hash(parent), self.hashes(text)[start:], part)
        self.keep = set()
        assert (handle is not None) == (must_fit and not is_orphan)
        if handle is None:
            return
        assert handle.skipped == len(present)
        assert list(handle.pages) == [self.hash(page) for page in new]
        if not new:
            handle.commit()
            return
        for step in handle.steps:
            scatter(handle.views(step), memoryview(content(model, handle.pages, step)))
        self.reservations.append(OpenReservation(handle, key, new, ground))

    def commit(self, index: int) -> None:
        self.num_operations += 1
        reservation = self.reservations.pop(index)
        rest = reservation.pages[len(self.present(reservation.key, reservation.pages)) :]
        if rest:
            self.cover(rest[0][:-1], rest)
            self.local.update({(reservation.key, page): Page(0) for page in rest})
            self.num_uses += 1
            self.touch(reservation.key, rest[-1])
        self.added: list[Change] = []
        reservation.handle.commit()
        assert [page for change in self.added for page in change.pages] == [
            self.hash(page) for page in rest
        ]
        for change in self.added:
            assert change.parent == self.hash(self.text_of[change.pages[0]][:-1])
            assert (change.model, change.part) == reservation.key

    def release(self, index: int) -> None:
        self.num_operations += 1
        self.reservations.pop(index).handle.release()

    def lease(self, model, parts, text, start, seconds):
        self.num_operations += 1
        pages, keys = prefixes(text, start), [(model, part) for part in parts]
        at_s = self.clock.now_s + seconds
        hashes = self.hashes(text)[start:]
        handle = self.tree.lease(model, hashes, "oracle", Deadline(at_s), parts)
        assert (handle is not None) == all(
            (key, page) in self.local for key in keys for page in pages
        )
        if handle is not None:
            self.leases.append(OpenLease(handle, keys, pages, at_s))
            self.check_content(self.leases[-1])
            self.num_uses += 1
            for key in keys:
                self.touch(key, text)

    def end_lease(self, index: int) -> None:
        self.num_operations += 1
        lease = self.leases.pop(index)
        self.check_content(lease)
        lease.handle.release()
        with pytest.raises(StaleEntry):
            lease.handle.views(steps_of(lease.keys[0][1], FAMILY.num_layers)[0])

    def advance(self, seconds: float) -> None:
        self.num_operations += 1
        self.clock.now_s += seconds
        self.sweep()

    def pin(self, model: ModelId | None, text: str, seconds: float | None) -> None:
        self.num_operations += 1
        self.sweep()
        depths = {
            key: num
            for key in {it for it, _ in self.local if model in (None, it[0])}
            if (num := len(self.present(key, prefixes(text, 0))))
        }
        self.cuts |= {text[:num] for num in depths.values()}  # Also of a pin that is refused.
        pages = {(key, page) for key, num in depths.items() for page in prefixes(text[:num], 0)}
        at_s = inf if seconds is None else self.clock.now_s + seconds
        others = [it for key, it in self.pins.items() if key != (model, text)]
        wanted = self.bytes_of(set().union(pages, *[it.pages for it in others]))
        deadline = None if seconds is None else Deadline(at_s)
        if pages and wanted > int(self.retention.max_pinned_share * self.budget):
            with pytest.raises(PinRefused, match=f"would keep {wanted} bytes"):
                self.tree.pin(model, self.hashes(text), deadline)
            return
        assert self.tree.pin(model, self.hashes(text), deadline) == {
            each: num for (each, part), num in depths.items() if part == KV
        }
        if pages:
            self.pins[model, text] = OpenPin(pages, at_s)
            self.num_pinned_bytes = self.bytes_of(self.pinned_pages())

    def unpin(self, model: ModelId | None, text: str) -> None:
        self.num_operations += 1
        is_pinned = self.pins.pop((model, text), None) is not None
        assert self.tree.unpin(model, self.hashes(text)) == is_pinned
        self.num_pinned_bytes = self.bytes_of(self.pinned_pages())

    def sweep(self) -> None:
        """Sweep. Asserts that exactly the expired pages leave."""
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

    def add_remote(self, location: Location, key: Key, text: str, start: int) -> None:
        self.num_operations += 1
        model, part = key
        parent, pages = self.hash(text[:start]), self.hashes(text)[start:]
        self.tree.remote.add(location, model, parent, pages, part)
        if start == 0 or (location, key, text[:start]) in self.remote:
            covered = self.cover(text[:start], prefixes(text, start))
            self.remote |= {(location, key, page) for page in covered}

    def lie(self, key: Key, parent: str, pages: Sequence[str]) -> None:
        """Advertise pages in any order after a page that was advertised, or at the root."""
        self.num_operations += 1
        hashes = [self.hashes(page)[-1] for page in pages]
        model, part = key
        self.tree.remote.add(LIAR, model, self.hash(page_at(parent)), hashes, part)
        if not parent or (LIAR, key, parent) in self.remote:
            own = {page_at(at): at for of, whose, at in self.remote if (of, whose) == (LIAR, key)}
            self.remote |= {(LIAR, key, at) for at in self.cover(parent, pages, own)}

    def drop_remote(self, location: Location, key: Key, text: str, start: int) -> None:
        self.num_operations += 1
        model, part = key
        self.tree.remote.drop(location, model, self.hashes(text)[start:], part)
        for page in prefixes(text, start):
            if (location, key, page) in self.remote:
                self.drop_below(location, key, page)
                break

    def forget(self, location: Location) -> None:
        self.num_operations += 1
        self.tree.remote.forget(location)
        self.remote = {it for it in self.remote if it[0] != location}
        self.forget_cuts()

    def match(self, text: str) -> None:
        self.num_operations += 1
        self.num_uses += 1  # one use of all models: their order among each other is free
        matches = {
            (m.location, m.model): (m.num_pages, dict(m.e_pages))
            for m in self.tree.match(self.hashes(text))
            if m.location != LIAR
        }
        pages = prefixes(text, 0)
        reaches: defaultdict[tuple[Location, ModelId], dict[Part, int]] = defaultdict(dict)
        for key in {key for key, _ in self.local}:
            if num := len(self.present(key, pages)):
                reaches[LOCAL, key[0]][key[1]] = num
                self.touch(key, text[:num])
        for location, key in {it[:2] for it in self.remote if it[0] != LIAR}:
            if num := sum((location, key, page) in self.remote for page in pages):
                reaches[location, key[0]][key[1]] = num
        expected = {
            at: (num, {part: min(num, each) for part, each in by_part.items() if part != KV})
            for at, by_part in reaches.items()
            if (num := by_part.get(KV))
        }
        assert matches == expected

    # What must hold after each of them.

    def check(self) -> None:
        assert self.memory.num_bytes == self.tree.num_bytes == self.num_bytes <= self.budget
        models = Counter(model for (model, part), _ in self.local if part == KV)
        assert self.tree.num_pages == models.total()
        assert self.tree.num_pinned_bytes == self.num_pinned_bytes
        assert self.tree.pages_by_model() == models
        noted = Counter(location for location, _, _ in self.remote)
        assert all(self.tree.remote.num_pages[it] == noted[it] for it in (*LOCATIONS, LIAR))

    def check_content(self, lease: OpenLease) -> None:
        hashes = [self.hash(page) for page in lease.pages]
        for model, part in lease.keys:
            for step in steps_of(part, FAMILY.num_layers):
                assert b"".join(lease.handle.views(step)) == content(model, hashes, step)

    def on_change(self, change: Change) -> None:
        """Check a removal: it must be the entry that had to be evicted. `commit` checks
        additions."""
        if change.added:
            self.added.append(change)
            return
        self.num_evictions += 1
        key, pages = (change.model, change.part), [self.text_of[page] for page in change.pages]
        assert change.parent == self.hash(pages[0][:-1])
        assert pages == self.entry(key, pages[0])
        assert self.is_evictable(key, pages[-1])
        if self.is_sweeping:
            assert self.is_expired(self.local[key, pages[0]])
        elif self.wanted_bytes is not None:
            assert self.num_bytes + self.wanted_bytes > self.budget
            candidates = [p.used for it, p in self.local.items() if self.is_evictable(*it)]
            assert self.local[key, pages[0]].used == min(candidates)
        for page in pages:
            del self.local[key, page]
        self.forget_cuts()

    def hashes(self, text: str) -> list[PageHash]:
        pages = path(text)
        self.text_of.update(zip(pages, prefixes(text, 0), strict=True))
        return pages

    def hash(self, text: str) -> PageHash | None:
        return self.hashes(text)[-1] if text else None
