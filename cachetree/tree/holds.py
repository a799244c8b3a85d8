"""Who keeps local pages from eviction: leases, open reservations and pins."""

from __future__ import annotations

from cachetree.ids import Span
from cachetree.memory import Slab, kept_bytes
from cachetree.tree.entries import Hold, LocalEntry
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
        """What open reservations take, and pages that are held or above a held one, at most."""
        return kept_bytes(self._held_runs() | self.pins.runs)

    def leave(self, num_bytes: int) -> bool:
        """Whether they keep no more than so much."""
        # Pins are many and seldom change: looked at one by one only where their sum is too much.
        most = self.pins.num_bytes + kept_bytes(self._held_runs())
        return most <= num_bytes or self.num_bytes <= num_bytes

    def _held_runs(self) -> set[tuple[Slab, Span]]:
        """Of open reservations and leases, and all that stands above."""
        runs = {(it.slab, Span(0, len(it.pages))) for it in self.open}
        for hold in [it.hold for it in self.leases] + [it.hold for it in self.open]:
            for entry in hold.entries:
                runs.update(entry.runs_above())
        return runs
