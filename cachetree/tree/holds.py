"""Who keeps local pages from eviction: leases, open reservations and pins."""

from __future__ import annotations

from cachetree.tree.entries import Hold, LocalEntry, with_all_above
from cachetree.tree.lease import Lease, Reservation
from cachetree.tree.pins import Pins
from cachetree.tree.trie import PageTrie


class Holds:
    """All of them in one tree, and what they keep together. Takes no lock.

    Whoever ends one lets go of the hold that comes back.
    """

    def __init__(self, trie: PageTrie, max_pinned_bytes: int) -> None:
        self.pins = Pins(trie, max_pinned_bytes)
        self.open: set[Reservation] = set()
        self.leases: set[Lease] = set()

    def end(self, lease: Lease) -> Hold:
        self.leases.discard(lease)
        lease.is_over = True
        return lease.hold

    def keep_for_readers(self, entry: LocalEntry) -> None:
        """Its memory is about to be given back, though it stays: leases keep what they read."""
        for lease in self.leases:
            if lease.hold in entry.holds:
                lease.keep(entry.slab)

    def expired(self, now_s: float) -> list[Hold]:
        """Ends the leases and pins whose time is over."""
        over = [lease for lease in self.leases if lease.deadline.at_s <= now_s]
        return [self.end(lease) for lease in over] + self.pins.expired(now_s)

    @property
    def num_bytes(self) -> int:
        """What open reservations take, and pages that are held or above a held one."""
        return self._bytes_with(self.pins.holds)

    def leave(self, num_bytes: int) -> bool:
        """Whether they keep no more than so much."""
        # Pins are many and seldom change: looked at one by one only where their sum is too much.
        return (
            self.pins.num_bytes + self._bytes_with([]) <= num_bytes or self.num_bytes <= num_bytes
        )

    def _bytes_with(self, pinned: list[Hold]) -> int:
        """Of open reservations, leases and these, and all that stands above."""
        holds = [*(it.hold for it in self.leases), *(it.hold for it in self.open), *pinned]
        kept = with_all_above(entry for hold in holds for entry in hold.entries)
        return sum([it.num_bytes for it in kept]) + sum([it.slab.num_bytes for it in self.open])
