"""Who keeps local pages from eviction: leases, open reservations, and prefixes that are pinned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from cachetree.clock import Deadline
from cachetree.errors import PinRefused
from cachetree.ids import KV, ModelId, PageHash
from cachetree.tree.entries import Hold, LocalEntry, LocalKey
from cachetree.tree.eviction import Eviction
from cachetree.tree.lease import Lease, Reservation
from cachetree.tree.trie import PageTrie, depth_of, upwards

PinName = tuple[ModelId | None, PageHash]
"""The model, None for all of them, and the last page of the prefix."""


class Holds:
    """All of them in one tree, and what they keep together. Takes no lock."""

    def __init__(self, trie: PageTrie, eviction: Eviction, max_pinned_bytes: int) -> None:
        self.open: set[Reservation] = set()
        self.leases: set[Lease] = set()
        self.num_pinned_bytes = 0
        """That all pins keep together."""
        self._trie: Final = trie
        self._eviction: Final = eviction
        self._max_pinned_bytes: Final = max_pinned_bytes
        self._pins: dict[PinName, Hold] = {}
        """What stays in memory though nobody reads it, as an operator wants it."""
        self._next_s = inf
        """When the next pin ends."""

    def let_go(self, hold: Hold) -> None:
        """What it kept may go, unless others keep it."""
        for entry in hold.entries:
            entry.holds -= {hold}
            if entry.is_evictable:
                self._eviction.free(entry)
        hold.entries.clear()

    def end(self, lease: Lease) -> None:
        self.leases.discard(lease)
        lease.is_over = True
        self.let_go(lease)

    def end_late(self, now_s: float) -> None:
        """Ends the leases and pins whose time is over."""
        for lease in [it for it in self.leases if it.until_s <= now_s]:
            self.end(lease)
        if now_s >= self._next_s:
            for name in [it for it, pin in self._pins.items() if pin.until_s <= now_s]:
                self.let_go(self._pins.pop(name))
            self.count_pinned()

    @property
    def num_bytes(self) -> int:
        """What open reservations take, and pages that are held or above a held one."""
        return self._bytes_with(self._pins.values())

    def leave(self, num_bytes: int) -> bool:
        """Whether they keep no more than so much."""
        # Pins are many and seldom change: looked at one by one only where their sum is too much.
        return self.num_pinned_bytes + self._bytes_with(()) <= num_bytes or (
            self.num_bytes <= num_bytes
        )

    def pin(
        self, model: ModelId | None, pages: Sequence[PageHash], deadline: Deadline | None
    ) -> dict[ModelId, int]:
        """As `CacheTree.pin`."""
        depths: dict[LocalKey, int] = {}
        # Upwards, and every page compared: whoever asks may have sent what is no prompt.
        for place in upwards(self._trie.last(pages), 0):
            for key in place.node.local:
                if model in (None, key[0]):
                    depths.setdefault(key, depth_of(place))
        if not depths:
            return {}
        hold = Hold(max(depths.values()), deadline.at_s if deadline else inf)
        for key, depth in depths.items():
            end = self._trie.find_local(key, pages[depth - 1])
            assert end is not None
            self._trie.split(end.node, end.stop)  # What follows is not kept.
            hold.add(end.node.local[key])
        name = model, pages[-1]
        others = [pin for it, pin in self._pins.items() if it != name]
        if (num_bytes := _kept_bytes([*others, hold])) > self._max_pinned_bytes:
            self.let_go(hold)
            of_this_bytes = num_bytes - _kept_bytes(others)
            raise PinRefused(
                f"pins would keep {num_bytes} bytes, {of_this_bytes} of them for this "
                f"one, and may keep {self._max_pinned_bytes}; unpin something, or raise "
                "max_pinned_share or the budget"
            )
        self.unpin(model, pages)
        self._pins[name] = hold
        self.count_pinned()
        return {each: depth for (each, part), depth in depths.items() if part == KV}

    def unpin(self, model: ModelId | None, pages: Sequence[PageHash]) -> bool:
        """False where there is no such pin."""
        pin = self._pins.pop((model, pages[-1]), None) if pages else None
        if pin is None:
            return False
        self.let_go(pin)
        self.count_pinned()
        return True

    def count_pinned(self) -> None:
        """Look anew at the memory that pins keep."""
        self.num_pinned_bytes = _kept_bytes(self._pins.values())
        self._next_s = min((pin.until_s for pin in self._pins.values()), default=inf)

    def _bytes_with(self, pinned: Iterable[Hold]) -> int:
        """Of open reservations, leases and these, and all that stands above."""
        new_bytes = sum([it.slab.num_bytes for it in self.open])
        return new_bytes + _kept_bytes((*self.leases, *self.open, *pinned))


def _kept_bytes(holds: Iterable[Hold]) -> int:
    """Of what they hold, and what has to stay above it."""
    found: set[LocalEntry] = set()
    pending = [entry for hold in holds for entry in hold.entries]
    while pending:
        entry = pending.pop()
        if entry not in found:
            found.add(entry)
            pending += entry.parents
    return sum([entry.num_bytes for entry in found])
