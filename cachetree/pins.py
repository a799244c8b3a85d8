"""What stays in memory though nobody reads it: prefixes that an operator has pinned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import Final

from cachetree.clock import Deadline
from cachetree.entries import Hold
from cachetree.errors import PinRefused
from cachetree.ids import ModelId, PageHash
from cachetree.slab import Slab
from cachetree.trie import PageTrie, depth_of

PinName = tuple[ModelId | None, PageHash]
"""The model, None for all of them, and the last page of the prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One pinned prefix."""

    hold: Hold
    slabs: Set[Slab]
    """All memory that it keeps."""
    deadline: Deadline | None
    """None: until it is taken away."""


class Pins:
    """All pins of a tree, and the bytes that they keep together. Takes no lock."""

    def __init__(self, trie: PageTrie, max_bytes: int) -> None:
        self.num_bytes = 0
        self.slabs: Set[Slab] = frozenset()
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
        slabs = {
            slab for each, place in places.items() for slab in place.node.local[each].slabs_above()
        }
        name = model, pages[-1]
        self._check(name, slabs)
        depths = {each: depth_of(place) for each, place in places.items()}
        hold = Hold(max(depths.values()))
        for each, depth in depths.items():
            end = self._trie.find(pages[depth - 1])
            assert end is not None
            self._trie.split(end.node, end.stop)  # What follows is not kept.
            hold.add(end.node.local[each])
        replaced = self.unpin(model, pages)
        self._pins[name] = Pin(hold=hold, slabs=slabs, deadline=deadline)
        self._count()
        return depths, replaced

    def unpin(self, model: ModelId | None, pages: Sequence[PageHash]) -> Hold | None:
        """Returns what the pin held; None where there is none."""
        pin = self._pins.pop((model, pages[-1]), None) if pages else None
        self._count()
        return pin.hold if pin else None

    def expired(self, now_s: float) -> list[Hold]:
        """Removes the pins whose time is over."""
        if now_s < self._next_s:
            return []
        over = [name for name, pin in self._pins.items() if _at(pin) <= now_s]
        holds = [self._pins.pop(name).hold for name in over]
        self._count()
        return holds

    def _check(self, name: PinName, slabs: Set[Slab]) -> None:
        """Raise PinRefused where a pin of this name must not keep `slabs`."""
        others = {slab for key, pin in self._pins.items() if key != name for slab in pin.slabs}
        num_bytes = _bytes_of(others | slabs)
        if num_bytes > self._max_bytes:
            raise PinRefused(
                f"pins would keep {num_bytes} bytes, {num_bytes - _bytes_of(others)} of them for "
                f"this one, and may keep {self._max_bytes}; unpin something, or raise "
                "max_pinned_share or the budget"
            )

    def _count(self) -> None:
        self.slabs = {slab for pin in self._pins.values() for slab in pin.slabs}
        self.num_bytes = _bytes_of(self.slabs)
        self._next_s = min(map(_at, self._pins.values()), default=inf)


def _at(pin: Pin) -> float:
    return pin.deadline.at_s if pin.deadline else inf


def _bytes_of(slabs: Iterable[Slab]) -> int:
    return sum(slab.num_bytes for slab in slabs)
