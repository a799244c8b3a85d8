"""Handles on the tree's storage: a lease reads pages that exist, a reservation writes new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from cachetree.clock import Deadline
from cachetree.errors import StaleEntry
from cachetree.ids import Part, Span, Step, part_of, parts_of, steps_of
from cachetree.memory import Slab
from cachetree.tree.entries import Change, Hold

PagesOfSlab = tuple[Slab, Span]
"""Consecutive ones."""


class Lease(Hold):
    """Keeps pages of one local model from eviction while `owner` reads them.

    It ends by `release`, or when the tree sweeps it after its deadline; from then on `views` raises
    StaleEntry. Views taken before stay readable. Safe to use from one thread at a time.
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
        """Set by the tree."""

    def views(self, step: Step, pages: Span | None = None) -> list[memoryview]:
        """KV or E of `pages` (counted from the lease's first; all by default), a view of each run:
        `family.page_bytes(step.kind)` for each page.

        Raises ValueError for a part that was not leased.
        """
        return [view for _, view in self.runs(step, pages)]

    def runs(self, step: Step, pages: Span | None = None) -> list[tuple[Slab, memoryview]]:
        """`views`, each with the slab that it lies in."""
        wanted = pages or Span(0, self.num_pages)
        if wanted.stop > self.num_pages:
            raise ValueError(f"{wanted} exceeds the {self.num_pages} leased pages")
        if (slabs := self._slabs.get(part_of(step))) is None:
            raise ValueError(f"the lease of {self.owner} is not of {step}")
        found: list[tuple[Slab, memoryview]] = []
        for number, span in parts_of((len(pages) for _, pages in slabs), wanted):
            slab, all_pages = slabs[number]
            span = Span(all_pages.start + span.start, all_pages.start + span.stop)
            found += [(slab, view) for view in slab.views(step, span)]
        if self.is_over:  # Last: until then others may have got what it kept.
            raise StaleEntry(f"the lease of {self.owner} has ended")
        return found

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        self._end(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation(Hold):
    """Room for KV or E of new pages of one model, invisible to `match` until `commit`.

    The owner fills the views of every step, then calls `commit`; `release` gives the room back.
    Leaving the context without a commit releases. While it is open what it will hang on stays in
    the tree. Safe to use from one thread at a time.
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
        """What a commit publishes, unless others do so before."""
        self.pages: Final = change.pages
        """The pages that are really new; empty where the model has all of them."""
        self.skipped: Final = skipped
        """How many leading pages the model already had."""
        self.slab: Final = slab
        self.steps: Final = steps_of(change.part, slab.layout.num_steps) if self.pages else ()
        """What is to be filled; nothing where no page is new."""
        self._end = end
        self._is_open = True

    def views(self, step: Step) -> list[memoryview]:
        """Writable: `len(pages) * family.page_bytes(step.kind)` bytes, mostly in one run, each of
        which has whole pages."""
        self._require_open()
        return self.slab.views(step, Span(0, len(self.pages)))

    def commit(self) -> None:
        """Publish the pages. Those that another reservation published meanwhile are dropped."""
        self._require_open()
        self._is_open = False
        self._end(self, True)

    def release(self) -> None:
        """Give the room back; does nothing after `commit` or a first `release`."""
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


def _joined(parts: Sequence[PagesOfSlab]) -> list[PagesOfSlab]:
    """The same pages in as few parts as may be; those of a split node become one again."""
    found: list[PagesOfSlab] = []
    for slab, pages in parts:
        if found and found[-1][0] is slab and found[-1][1].stop == pages.start:
            pages = Span(found.pop()[1].start, pages.stop)
        found.append((slab, pages))
    return found
