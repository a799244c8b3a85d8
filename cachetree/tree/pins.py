"""What stays in memory though nobody reads it: prefixes that an operator has pinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from cachetree.clock import Deadline
from cachetree.errors import PinRefused
from cachetree.ids import ModelId, PageHash
from cachetree.tree.entries import Hold, with_all_above
from cachetree.tree.trie import PageTrie, Place, depth_of

PinName = tuple[ModelId | None, PageHash]
"""The model, None for all of them, and the last page of the prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One pinned prefix."""

    hold: Hold
    deadline: Deadline | None
    """None: until it is taken away."""


class Pins:
    """All pins of a tree, and the bytes that they keep together. Takes no lock."""

    def __init__(self, trie: PageTrie, max_bytes: int) -> None:
        self.num_bytes = 0
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
        name = model, pages[-1]
        self._check(name, places)
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

    @property
    def holds(self) -> list[Hold]:
        return [pin.hold for pin in self._pins.values()]

    def _check(self, name: PinName, places: Mapping[ModelId, Place]) -> None:
        """Raise PinRefused where a pin of this name must not keep what is until `places`."""
        holds = [pin.hold for key, pin in self._pins.items() if key != name]
        others = with_all_above(entry for hold in holds for entry in hold.entries)
        new_bytes = 0
        for model, place in places.items():
            last = place.node.local[model]
            if last not in others:
                new_bytes += place.stop * last.slab.layout.page_bytes
                above = with_all_above([last.parent] if last.parent else []) - others
                new_bytes += sum(entry.num_bytes for entry in above)
        num_bytes = new_bytes + sum(entry.num_bytes for entry in others)
        if num_bytes > self._max_bytes:
            raise PinRefused(
                f"pins would keep {num_bytes} bytes, {new_bytes} of them for this one, and may "
                f"keep {self._max_bytes}; unpin something, or raise max_pinned_share or the budget"
            )

    def count(self) -> None:
        """Look anew at the memory that they keep."""
        kept = with_all_above(entry for hold in self.holds for entry in hold.entries)
        self.num_bytes = sum(entry.num_bytes for entry in kept)
        self._next_s = min(map(_at, self._pins.values()), default=inf)


def _at(pin: Pin) -> float:
    return pin.deadline.at_s if pin.deadline else inf
