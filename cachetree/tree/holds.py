"""Who keeps local pages from eviction: leases, open reservations, and prefixes that are pinned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from cachetree.clock import Deadline
from cachetree.errors import PinRefused
from cachetree.ids import ModelId, PageHash
from cachetree.tree.entries import Hold, LocalEntry
from cachetree.tree.lease import Lease, Reservation
from cachetree.tree.trie import PageTrie, depth_of, upwards

PinName = tuple[ModelId | None, PageHash]
"""The model, None for all of them, and the last page of the prefix."""


class Holds:
    """All of them in one tree, and what they keep together. Takes no lock.

    Whoever ends one lets go of the hold that comes back.
    """

    def __init__(self, trie: PageTrie, max_pinned_bytes: int) -> None:
        self.open: set[Reservation] = set()
        self.leases: set[Lease] = set()
        self.num_pinned_bytes = 0
        """That all pins keep together."""
        self._trie: Final = trie
        self._max_pinned_bytes: Final = max_pinned_bytes
        self._pins: dict[PinName, Hold] = {}
        """What stays in memory though nobody reads it, as an operator wants it."""
        self._next_s = inf
        """When the next pin ends."""

    def end(self, lease: Lease) -> Lease:
        self.leases.discard(lease)
        lease.is_over = True
        return lease

    def keep_for_readers(self, entry: LocalEntry) -> None:
        """Its memory is about to be given back, though it stays: leases keep what they read."""
        for lease in self.leases:
            if lease in entry.holds:
                lease.keep(entry.slab)

    def expired(self, now_s: float) -> list[Hold]:
        """Ends the leases and pins whose time is over."""
        late = [lease for lease in self.leases if lease.until_s <= now_s]
        holds: list[Hold] = [self.end(lease) for lease in late]
        if now_s >= self._next_s:
            over = [name for name, pin in self._pins.items() if pin.until_s <= now_s]
            holds += [self._pins.pop(name) for name in over]
            self.count_pinned()
        return holds

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
    ) -> tuple[dict[ModelId, int], Hold | None]:
        """As `CacheTree.pin`; also the hold of the pin that this one took the place of."""
        depths: dict[ModelId, int] = {}
        # Upwards, and every page compared: whoever asks may have sent what is no prompt.
        for place in upwards(self._trie.last(pages), 0):
            for each in place.node.local:
                if model in (None, each):
                    depths.setdefault(each, depth_of(place))
        if not depths:
            return {}, None
        hold = Hold(max(depths.values()), deadline.at_s if deadline else inf)
        for each, depth in depths.items():
            end = self._trie.find(pages[depth - 1])
            assert end is not None
            self._trie.split(end.node, end.stop)  # What follows is not kept.
            hold.add(end.node.local[each])
        replaced = self.unpin(model, pages)
        others_bytes = self.num_pinned_bytes
        name = model, pages[-1]
        self._pins[name] = hold
        self.count_pinned()
        if (num_bytes := self.num_pinned_bytes) > self._max_pinned_bytes:
            self.unpin(model, pages)
            hold.clear()
            if replaced is not None:
                self._pins[name] = replaced
                self.count_pinned()
            raise PinRefused(
                f"pins would keep {num_bytes} bytes, {num_bytes - others_bytes} of them for this "
                f"one, and may keep {self._max_pinned_bytes}; unpin something, or raise "
                "max_pinned_share or the budget"
            )
        return depths, replaced

    def unpin(self, model: ModelId | None, pages: Sequence[PageHash]) -> Hold | None:
        """Returns what the pin held; None where there is none."""
        hold = self._pins.pop((model, pages[-1]), None) if pages else None
        self.count_pinned()
        return hold

    def count_pinned(self) -> None:
        """Look anew at the memory that pins keep."""
        kept = _kept(self._pins.values())
        self.num_pinned_bytes = sum(entry.num_bytes for entry in kept)
        self._next_s = min((pin.until_s for pin in self._pins.values()), default=inf)

    def _bytes_with(self, pinned: Iterable[Hold]) -> int:
        """Of open reservations, leases and these, and all that stands above."""
        kept = _kept((*self.leases, *self.open, *pinned))
        return sum([it.num_bytes for it in kept]) + sum([it.slab.num_bytes for it in self.open])


def _kept(holds: Iterable[Hold]) -> set[LocalEntry]:
    """What they hold, and what has to stay above it."""
    found: set[LocalEntry] = set()
    for entry in (entry for hold in holds for entry in hold.entries):
        above: LocalEntry | None = entry
        while above is not None and above not in found:
            found.add(above)
            above = above.parent
    return found
