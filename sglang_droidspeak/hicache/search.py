"""What of a prompt is in the backend: asked in a thread, when the prompt is first seen.

A store that a cluster shares advertises nothing. Of each model that may send, one question per
batch of pages finds how many are there without a gap; answers become entries of the tree, so that
a prompt that grows is asked about only where it is new. What was absent is not asked for again
for some seconds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachetree import Clock, Deadline, Kind, ModelId, PageHash, Search, Step, Turns
from cachetree.planning import Match
from cachetree.tree import CacheTree
from sglang_droidspeak.hicache.lane import Lane
from sglang_droidspeak.hicache.objects import HICACHE

WAIT_S: Final = 0.1
"""Longest that a request waits for an answer; what comes later serves the next one."""
ABSENT_S: Final = 10.0
"""How long a page that was not there is taken to stay away."""
MAX_WAITING: Final = 64
MAX_ABSENT: Final = 1 << 16

_Question = tuple[Sequence[PageHash], Search]


class AbsentPages:
    """Pages that were not there, and until when that is believed. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: OrderedDict[tuple[ModelId, PageHash], float] = OrderedDict()

    def add(self, model: ModelId, page: PageHash, seconds: float = ABSENT_S) -> None:
        with self._lock:
            self._until_s.pop((model, page), None)
            self._until_s[model, page] = self._clock() + seconds
            if len(self._until_s) > MAX_ABSENT:
                self._until_s.popitem(last=False)

    def has(self, model: ModelId, page: PageHash) -> bool:
        return self._until_s.get((model, page), 0.0) > self._clock()


@dataclass(eq=False)
class Searcher:
    """Answers searches one after another, in a thread of its own."""

    _tree: CacheTree
    _senders: Mapping[ModelId, Collection[int]]
    """Whom to ask for, and the layers whose E is wanted of each."""
    _lane: Lane
    """Nothing moves through it."""

    def __post_init__(self) -> None:
        self.absent: Final = AbsentPages(self._lane.clock)
        self.turns: Final[Turns[_Question]] = Turns("hicache-search", self._answer_all)

    def search(self, pages: Sequence[PageHash]) -> Search:
        search = Search(Deadline.after(WAIT_S, self._lane.clock))
        is_futile = self._lane.breaker.is_open or self.turns.num_waiting >= MAX_WAITING
        if is_futile or not self._unknown(pages):
            search.end()
        else:
            self.turns.put((pages, search))
        return search

    def _unknown(self, pages: Sequence[PageHash]) -> list[Match]:
        """What the tree shows of those models of which there may be more."""
        there = {it.model: it for it in self._tree.match(pages) if it.location == HICACHE}
        shown = (
            there.get(it) or Match(model=it, location=HICACHE, num_pages=0, e_pages={})
            for it in self._senders
        )
        return [
            it
            for it in shown
            if it.num_pages < len(pages) and not self.absent.has(it.model, pages[it.num_pages])
        ]

    # In the thread.

    def _answer_all(self, questions: Iterator[_Question]) -> None:
        breaker = self._lane.breaker
        for pages, search in questions:
            try:
                if not search.is_over and not breaker.is_open:
                    self._answer(pages)
                    if search.is_over:
                        breaker.fail(f"an answer took longer than {WAIT_S:g} s")
                    else:
                        breaker.succeed()
            except Exception as exc:  # noqa: BLE001  # The breaker counts it, and says so.
                breaker.fail(repr(exc))
            finally:
                search.end()

    def _answer(self, pages: Sequence[PageHash]) -> None:
        for known in self._unknown(pages):
            model, start = known.model, known.num_pages
            new = pages[start:]
            num_new = len(new)
            for marker in self._lane.objects.markers:
                num_new = self._lane.num_leading(model, new[:num_new], marker)
            if num_new < len(new):
                self.absent.add(model, new[num_new])
            # E serves only where it reaches from the prompt's first page on.
            reaches = {
                layer: self._lane.num_leading(model, new[:num_new], Step(Kind.E, layer))
                for layer in self._senders[model]
                if known.e_pages.get(layer, 0) == start
            }
            begin = 0
            for stop in sorted({*reaches.values(), num_new} - {0}):
                parent = pages[start + begin - 1] if start + begin else None
                layers = [layer for layer, reach in reaches.items() if reach >= stop]
                self._tree.add_remote(HICACHE, model, parent, new[begin:stop], layers)
                begin = stop
