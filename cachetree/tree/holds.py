"""Leases, reservations and pins. Each of these holds keeps local pages from eviction.

A lease is for reading existing pages, and a reservation for writing new pages. A pin keeps a prefix
that an operator wants in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Final

from cachetree.clock import Deadline
from cachetree.errors import PinRefused, StaleEntry
from cachetree.ids import KV, ModelId, PageHash, Part, Span, Step, part_of, parts_of, steps_of
from cachetree.memory import Slab
from cachetree.tree.entries import Change, Hold, LocalEntry, LocalKey
from cachetree.tree.eviction import Eviction
from cachetree.tree.trie import PageTrie, depth_of, upwards

PagesOfSlab = tuple[Slab, Span]
"""Consecutive pages of a slab, which is the memory of one reservation."""

PinName = tuple[ModelId | None, PageHash]
"""Key of a pin: its model (None: all models), and the last page of the pinned prefix."""


class Lease(Hold):
    """Keep local pages of one model from eviction while `owner` reads them.

    A lease ends by `release`, or at a sweep of the tree after its deadline. Afterwards `views`
    raises StaleEntry. Views taken before stay readable. Only one thread at a time may use it.
    """

    def __init__(
        self,
        slabs: Mapping[Part, Sequence[PagesOfSlab]],
        num_pages: int,
        stop: int,
        owner: str,
        deadline: Deadline,
        end: Callable[[Lease], None],
    ) -> None:
        super().__init__(stop, deadline.at_s)
        self.owner: Final = owner
        self.num_pages: Final = num_pages
        self._slabs = {part: _joined(of_part) for part, of_part in slabs.items()}
        self._end = end
        self.is_over = False
        """Whether the lease has ended. The tree sets it."""

    def views(self, step: Step, pages: Span | None = None) -> list[memoryview]:
        """Return the memory of one transfer step (KV or E of a layer), one view for each run. A
        page takes `family.page_bytes(step.kind)`. Pages count from the lease's first; None: all
        pages.

        Raises ValueError for a part that was not leased.
        """
        return [view for _, view in self.runs(step, pages)]

    def runs(self, step: Step, pages: Span | None = None) -> list[tuple[Slab, memoryview]]:
        """Return the same as `views`, each view with its slab."""
        wanted = pages or Span(0, self.num_pages)
        if wanted.stop > self.num_pages:
            raise ValueError(f"{wanted} exceeds the {self.num_pages} leased pages")
        if (slabs := self._slabs.get(part_of(step))) is None:
            raise ValueError(f"the lease of {self.owner} does not include {step}")
        runs: list[tuple[Slab, memoryview]] = []
        for number, span in parts_of((len(pages) for _, pages in slabs), wanted):
            slab, all_pages = slabs[number]
            span = Span(all_pages.start + span.start, all_pages.start + span.stop)
            runs += [(slab, view) for view in slab.views(step, span)]
        if self.is_over:  # Checked last, because the lease may end meanwhile.
            raise StaleEntry(f"the lease of {self.owner} has ended")
        return runs

    def release(self) -> None:
        """End the lease. A second call does nothing."""
        self._end(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation(Hold):
    """Room for KV or E of new pages of one model. `match` sees the pages from `commit` on.

    The owner fills the views of every transfer step, then calls `commit`. `release`, or leaving the
    context without a commit, gives the room back. While the reservation is open, the pages before
    the new ones stay in the tree. Only one thread at a time may use it.
    """

    def __init__(
        self,
        change: Change,
        skipped: int,
        slab: Slab,
        stop: int,
        end: Callable[[Reservation, bool], None],
    ) -> None:
        super().__init__(stop)
        self.change: Final = change
        """Addition that `commit` publishes, except pages that other reservations publish first."""
        self.pages: Final = change.pages
        """New pages, for which there is room. Empty if the model has all pages already."""
        self.skipped: Final = skipped
        """Number of leading pages that the model had already."""
        self.slab: Final = slab
        self.steps: Final = steps_of(change.part, slab.layout.num_steps) if self.pages else ()
        """Transfer steps to fill; empty if no page is new."""
        self._end = end
        self._is_open = True

    def views(self, step: Step) -> list[memoryview]:
        """Return the writable memory for one layer's KV, or one layer's E. It has `len(pages) *
        family.page_bytes(step.kind)` bytes, usually in one contiguous view. Each view has whole
        pages."""
        self._require_open()
        return self.slab.views(step, Span(0, len(self.pages)))

    def commit(self) -> None:
        """Publish the pages. Pages that another reservation has published meanwhile are dropped."""
        self._require_open()
        self._is_open = False
        self._end(self, True)

    def release(self) -> None:
        """Give the room back. Does nothing after `commit`, or after a first `release`."""
        if self._is_open:
            self._is_open = False
            self._end(self, False)

    def _require_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("this reservation has been committed or released")

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Holds:
    """All leases, reservations and pins of one tree. The caller holds the tree's lock."""

    def __init__(self, trie: PageTrie, eviction: Eviction, max_pinned_bytes: int) -> None:
        self.open: set[Reservation] = set()
        self.leases: set[Lease] = set()
        self.num_pinned_bytes = 0
        """Bytes that all pins keep together."""
        self._trie: Final = trie
        self._eviction: Final = eviction
        self._max_pinned_bytes: Final = max_pinned_bytes
        self._pins: dict[PinName, Hold] = {}
        """Pins of an operator: prefixes that stay in memory even if no request reads them."""
        self._next_s = inf
        """Time at which the next pin ends."""

    def let_go(self, hold: Hold) -> None:
        """End a hold: its entries may be evicted, unless other holds keep them."""
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
        """End the leases and pins that are past their deadline."""
        for lease in [it for it in self.leases if it.until_s <= now_s]:
            self.end(lease)
        if now_s >= self._next_s:
            for name in [it for it, pin in self._pins.items() if pin.until_s <= now_s]:
                self.let_go(self._pins.pop(name))
            self.count_pinned()

    @property
    def num_bytes(self) -> int:
        """Bytes that cannot be evicted: open reservations, held pages, and all pages above them."""
        return self._bytes_with(self._pins.values())

    def leave(self, num_bytes: int) -> bool:
        """Return whether leases, reservations and pins together keep at most `num_bytes`."""
        # Pins are many and seldom change. `num_pinned_bytes` may count bytes that other holds keep,
        # too. So count again, pin by pin, only if the quick sum is too much.
        return self.num_pinned_bytes + self._bytes_with(()) <= num_bytes or (
            self.num_bytes <= num_bytes
        )

    def pin(
        self, model: ModelId | None, pages: Sequence[PageHash], deadline: Deadline | None
    ) -> dict[ModelId, int]:
        """Keep local pages of the prefix `pages` in memory, for one model or (None) for all models.
        Return how many pages of each model are pinned. Raises PinRefused if pins keep too much."""
        depths: dict[LocalKey, int] = {}
        # Compare every page: the pages that an operator sends may not be a prompt.
        for place in upwards(self._trie.compared_prefix(pages), 0):
            for key in place.node.local:
                if model in (None, key[0]):
                    depths.setdefault(key, depth_of(place))
        if not depths:
            return {}
        hold = Hold(max(depths.values()), deadline.at_s if deadline else inf)
        for key, depth in depths.items():
            end = self._trie.find_local(key, pages[depth - 1])
            assert end is not None
            self._trie.split(end.node, end.stop)  # Pages behind the prefix are not kept.
            hold.add(end.node.local[key])
        name = model, pages[-1]
        others = [pin for it, pin in self._pins.items() if it != name]
        if (num_bytes := _kept_bytes([*others, hold])) > self._max_pinned_bytes:
            self.let_go(hold)
            of_this_bytes = num_bytes - _kept_bytes(others)
            raise PinRefused(
                f"all pins would keep {num_bytes} bytes, {of_this_bytes} of them for this pin, and "
                f"may keep {self._max_pinned_bytes}; unpin something, or raise max_pinned_share or "
                "the budget"
            )
        self.unpin(model, pages)
        self._pins[name] = hold
        self.count_pinned()
        return {each: depth for (each, part), depth in depths.items() if part == KV}

    def unpin(self, model: ModelId | None, pages: Sequence[PageHash]) -> bool:
        """Remove a pin. Return False if it does not exist."""
        pin = self._pins.pop((model, pages[-1]), None) if pages else None
        if pin is None:
            return False
        self.let_go(pin)
        self.count_pinned()
        return True

    def count_pinned(self) -> None:
        """Recompute the bytes that pins keep."""
        self.num_pinned_bytes = _kept_bytes(self._pins.values())
        self._next_s = min((pin.until_s for pin in self._pins.values()), default=inf)

    def _bytes_with(self, pinned: Iterable[Hold]) -> int:
        """Return the bytes that open reservations, leases and these pins keep."""
        new_bytes = sum([it.slab.num_bytes for it in self.open])
        return new_bytes + _kept_bytes((*self.leases, *self.open, *pinned))


def _joined(parts: Sequence[PagesOfSlab]) -> list[PagesOfSlab]:
    """Join runs of pages that are neighbours in one slab, as after a split of their node."""
    joined: list[PagesOfSlab] = []
    for slab, pages in parts:
        if joined and joined[-1][0] is slab and joined[-1][1].stop == pages.start:
            pages = Span(joined.pop()[1].start, pages.stop)
        joined.append((slab, pages))
    return joined


def _kept_bytes(holds: Iterable[Hold]) -> int:
    """Return the bytes of all held entries, and of the entries above them, which also stay."""
    kept_entries: set[LocalEntry] = set()
    pending = [entry for hold in holds for entry in hold.entries]
    while pending:
        entry = pending.pop()
        if entry not in kept_entries:
            kept_entries.add(entry)
            pending += entry.parents
    return sum([entry.num_bytes for entry in kept_entries])
