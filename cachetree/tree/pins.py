"""What stays in memory though nobody reads it: prefixes that an operator has pinned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import Final

from cachetree.clock import Deadline
from cachetree.errors import PinRefused
from cachetree.ids import ModelId, PageHash, Span
from cachetree.memory import Slab, kept_bytes
from cachetree.tree.entries import Hold
from cachetree.tree.trie import PageTrie, Place, depth_of

SlabPages = tuple[Slab, Span]
PinName = tuple[ModelId | None, PageHash]
"""The model, None for all of them, and the last page of the prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One pinned prefix."""

    hold: Hold
    deadline: Deadline | None
    """None: until it is taken away."""

    @property
    def runs(self) -> set[SlabPages]:
        """All memory that it keeps."""
        return {run for entry in self.hold.entries for run in entry.runs_above()}


class Pins:
    """All pins of a tree, and the bytes that they keep together. Takes no lock."""

    def __init__(self, trie: PageTrie, max_bytes: int) -> None:
        self.num_bytes = 0
        self.runs: Set[SlabPages] = frozenset()
        self._trie = trie
        self._max_bytes: Final = max_bytes
        self._pins: dict[PinName, Pin] = {}
        self._next_s = inf

    def pin(
        self, model: ModelId | None, pages: Sequence[PageHash], deadline: Deadline | None
    ) -> tuple[dict[ModelId, int], Hold | None]:
        """As `CacheTree.pin`; also the hold of the pin that this one took the place of."""
        top = self._trie.root.children.get(pages[0]) if pages else None
        models = [] if top is None else list(top.local) if model is None else [model]
        found = {each: self._trie.last_local(each, None, pages) for each in models}
        places = {each: place for each, place in found.items() if place is not None}
        if not places:
            return {}, None
        runs = {run for each, place in places.items() for run in _runs_of(each, place)}
        name = model, pages[-1]
        self._check(name, runs)
        depths = {each: depth_of(place) for each, place in places.items()}
        hold = Hold(max(depths.values()))
        for each, depth in depths.items():
            end = self._trie.find(pages[depth - 1])
            assert end is not None
            self._trie.split(end.node, end.stop)  # What follows is not kept.
            hold.add(end.node.local[each])
        replaced = self.unpin(model, pages)
        self._pins[name] = Pin(hold=hold, deadline=deadline)
        self.count()
        return depths, replaced

    def unpin(self, model: ModelId | None, pages: Sequence[PageHash]) -> Hold | None:
        """Returns what the pin held; None where there is none."""
        pin = self._pins.pop((model, pages[-1]), None) if pages else None
        self.count()
        return pin.hold if pin else None

    def expired(self, now_s: float) -> list[Hold]:
        """Removes the pins whose time is over."""
        if now_s < self._next_s:
            return []
        over = [name for name, pin in self._pins.items() if _at(pin) <= now_s]
        holds = [self._pins.pop(name).hold for name in over]
        self.count()
        return holds

    def _check(self, name: PinName, runs: Set[SlabPages]) -> None:
        """Raise PinRefused where a pin of this name must not keep `runs`."""
        others = {run for key, pin in self._pins.items() if key != name for run in pin.runs}
        num_bytes = kept_bytes(others | runs)
        if num_bytes > self._max_bytes:
            raise PinRefused(
                f"pins would keep {num_bytes} bytes, {num_bytes - kept_bytes(others)} of them for "
                f"this one, and may keep {self._max_bytes}; unpin something, or raise "
                "max_pinned_share or the budget"
            )

    def count(self) -> None:
        """Look anew at the memory that they keep."""
        self.runs = {run for pin in self._pins.values() for run in pin.runs}
        self.num_bytes = kept_bytes(self.runs)
        self._next_s = min(map(_at, self._pins.values()), default=inf)


def _at(pin: Pin) -> float:
    return pin.deadline.at_s if pin.deadline else inf


def _runs_of(model: ModelId, place: Place) -> Iterator[SlabPages]:
    """The memory of the pages from the root to the end of `place`."""
    entry = place.node.local[model]
    yield entry.slab, Span(entry.first, entry.first + place.stop)
    if entry.parent is not None:
        yield from entry.parent.runs_above()
