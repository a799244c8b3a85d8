"""Where a page is: a hash table of 8 bytes a slot, filled and emptied a run of pages at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from cachetree.ids import PageHash
from cachetree.tree.hashing import join_hashes
from cachetree.tree.runs import NO_PAGES, P, Run

_Words = NDArray[np.uint64]

_SLOT_BITS = 3
_BUCKET_SLOTS = 1 << _SLOT_BITS
_MEAN_SLOTS_USED = 3
"""Above this the table doubles; below, two pages in a thousand or fewer find their bucket full."""
_FIRST_BUCKET_BITS = 6
_TAG_SHIFT = np.uint64(32)
_TAG_MASK = np.uint64((2**32 - 1) << 32)


class PageIndex(Generic[P]):
    """Finds the run that holds a page. Takes no lock.

    word    = the first 8 bytes of a page's hash, which is as good as random as it is
    slot    = the word's top 32 bits | id of the run that has the page (0: free)
    bucket  = 8 slots, addressed by the top bits of the word
    spilled = the pages whose bucket was full

    A slot says only which run may hold the page; the run's own hashes decide, so that a collision
    is never a hit. All work is numpy's, some 10 µs for the pages of a prompt: a Python object for
    every page would cost several times that, and more than all the rest of the tree in memory.
    """

    def __init__(self) -> None:
        self._bucket_bits = _FIRST_BUCKET_BITS
        self._shift = np.uint64(64 - self._bucket_bits)
        self._slots: _Words = np.zeros((1 << self._bucket_bits, _BUCKET_SLOTS), np.uint64)
        self._runs: list[Run[P] | None] = [None]
        self._free_ids: list[int] = []
        self._spilled: dict[PageHash, Run[P]] = {}
        self._num_pages = 0

    def find(self, page: PageHash) -> tuple[P, int] | None:
        """The node that holds `page`, and which page of the node's run it is."""
        for run in self._runs_of(page):
            index = run.index_of(page)
            node = run.node_at(index)
            if node is not None:
                return node, index
        return None

    def find_at(self, page: PageHash, depth: int) -> P | None:
        """The node that holds `page` after `depth` others; None where it is elsewhere, too."""
        for run in self._runs_of(page):
            node = run.node_with(page, depth)
            if node is not None:
                return node
        return None

    def add(self, pages: Sequence[PageHash]) -> Run[P] | None:
        """Index a new run of `pages`, up to the first that is here already or comes twice."""
        hashes = join_hashes(pages)
        while self._num_pages + len(pages) > _MEAN_SLOTS_USED << self._bucket_bits:
            self._double()
        words = _words(hashes)
        tags = (words >> _TAG_SHIFT).astype(np.uint32)
        ordered = np.sort(tags)
        has_twins = bool((ordered[1:] == ordered[:-1]).any())
        slots = self._slots.take(self._buckets(words), axis=0)
        if has_twins or not self._spilled.keys().isdisjoint(pages):
            suspects = list(range(len(pages)))
        else:
            same = (slots.view("<u4")[:, 1::2] == tags[:, None]).ravel().nonzero()[0]
            suspects = sorted({place >> _SLOT_BITS for place in same.tolist()})
        num_new = self._num_new(pages, suspects)
        if num_new < len(pages):
            return self.add(pages[:num_new]) if num_new else None
        run = self._new_run(hashes)
        # Twins would share a slot, and the first to go would take it.
        run.spilled = frozenset(pages) if has_twins else self._put(run, words, slots)
        self._spilled |= dict.fromkeys(run.spilled, run)
        self._num_pages += len(pages)
        return run

    def remove(self, parts: Sequence[tuple[Run[P], int, int]]) -> None:
        """Forget pages `[start, stop)` of each run, and runs with their last page."""
        words = _words(b"".join([run.hashes_of(start, stop) for run, start, stop in parts]))
        sizes = [stop - start for _, start, stop in parts]
        ids = np.array([run.id for run, _, _ in parts], np.uint64).repeat(sizes)
        buckets, values = self._buckets(words), words & _TAG_MASK | ids
        slots = self._slots.take(buckets, axis=0)
        places = (buckets << _SLOT_BITS) + (slots == values[:, None]).argmax(axis=1)
        flat = self._slots.reshape(-1)
        if any(run.spilled for run, _, _ in parts):  # Not all of them are in the table.
            places = places[flat[places] == values]
        flat[places] = 0
        self._num_pages -= len(words)
        for run, start, stop in parts:
            for page in [it for it in run.spilled if start <= run.index_of(it) < stop]:
                run.spilled -= {page}
                del self._spilled[page]
            run.num_indexed_pages -= stop - start
            if not run.num_indexed_pages:
                self._runs[run.id] = None
                self._free_ids.append(run.id)

    def _runs_of(self, page: PageHash) -> list[Run[P]]:
        """Those that may hold it."""
        word, tag = int.from_bytes(page[:8], "little"), page[4:8]
        bucket = self._slots[word >> 64 - self._bucket_bits].tobytes()
        found: list[Run[P]] = []
        at = bucket.find(tag)
        while at >= 0:
            if at & 7 == 4:
                run = self._runs[int.from_bytes(bucket[at - 4 : at], "little")]
                if run is not None:  # A free slot looks like a tag of zeros.
                    found.append(run)
            at = bucket.find(tag, at + 1)
        spilled = self._spilled.get(page)
        if spilled is not None:
            found.append(spilled)
        return found

    def _new_run(self, hashes: bytes) -> Run[P]:
        if not self._free_ids:
            self._free_ids.append(len(self._runs))
            self._runs.append(None)
        run: Run[P] = Run(hashes, self._free_ids.pop())
        self._runs[run.id] = run
        return run

    def _num_new(self, pages: Sequence[PageHash], suspects: Sequence[int]) -> int:
        """How many of the first of `pages` are new, if all but `suspects` are."""
        seen: set[PageHash] = set()
        for index in suspects:
            if pages[index] in seen or self.find(pages[index]):
                return index
            seen.add(pages[index])
        return len(pages)

    def _buckets(self, words: _Words) -> NDArray[np.int64]:
        return (words >> self._shift).view(np.int64)

    def _put(self, run: Run[P], words: _Words, slots: _Words) -> frozenset[PageHash]:
        """Write the run's slots, given what its buckets hold; returns pages that found no room."""
        flat = self._slots.reshape(-1)
        buckets, values = self._buckets(words), words & _TAG_MASK | np.uint64(run.id)
        waiting = np.arange(len(words))
        full: list[int] = []
        while True:
            places = (buckets << _SLOT_BITS) + (slots == 0).argmax(axis=1)
            has_room = flat[places] == 0  # Of a full bucket `argmax` gives the first slot.
            if not has_room.all():
                full += waiting[~has_room].tolist()
                waiting, buckets = waiting[has_room], buckets[has_room]
                values, places = values[has_room], places[has_room]
            flat[places] = values
            # Of several pages that took one slot the last has it; the others look again.
            lost = (flat[places] != values).nonzero()[0]
            if not len(lost):
                return frozenset([run.page(index) for index in full]) if full else NO_PAGES
            waiting, buckets, values = waiting[lost], buckets[lost], values[lost]
            slots = self._slots.take(buckets, axis=0)

    def _double(self) -> None:
        """Each bucket becomes two; the next bit of the tag says which of them a slot goes to."""
        self._bucket_bits += 1
        self._shift = np.uint64(64 - self._bucket_bits)
        old = self._slots
        goes_up = (old >> self._shift & np.uint64(1)).astype(bool)
        halves = (np.where(goes_up, np.uint64(0), old), np.where(goes_up, old, np.uint64(0)))
        self._slots = np.stack(halves, axis=1).reshape(-1, _BUCKET_SLOTS)


def _words(hashes: bytes) -> _Words:
    """One per page."""
    return np.frombuffer(hashes, "<u8")[::2]
