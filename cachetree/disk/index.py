"""Which entries are on disk: by page, by whom they stand on, and by when they were last used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import Final

from cachetree.disk.record import Record
from cachetree.disk.segment import Place
from cachetree.ids import ModelId, PageHash, Span
from cachetree.tree import Change


class DiskEntry:
    """Consecutive pages of one model, and where they lie. The store's lock guards what changes.

    The first `start` pages of its record are those of other entries, which have more E.
    """

    def __init__(self, record: Record, place: Place, start: int) -> None:
        self.record: Final = record
        self.start = start
        self.parent: DiskEntry | None = None
        """The entry with the page before the first."""
        self.children: set[DiskEntry] = set()
        self.place: Place | None = place
        """None when it has been dropped."""

    @property
    def pages(self) -> tuple[PageHash, ...]:
        return self.record.pages[self.start :]

    @property
    def parent_page(self) -> PageHash | None:
        return self.record.pages[self.start - 1] if self.start else self.record.parent

    def gives_way(self, page: PageHash, e_layers: Collection[int]) -> bool:
        """Whether `page` is its first, and storing it with this E adds some and loses none."""
        return page == self.pages[0] and set(self.record.layout.e_layers) < set(e_layers)

    def num_common(self, pages: Sequence[PageHash]) -> int:
        """How many of `pages`, which begin in it, it has in a row."""
        theirs = self.record.pages[self.record.pages.index(pages[0]) :]
        pairs = zip(theirs, pages, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def change(self, *, added: bool) -> Change:
        return Change(
            added=added,
            model=self.record.model,
            parent=self.parent_page,
            pages=self.pages,
            e_layers=self.record.layout.e_layers,
        )


class DiskIndex:
    """Entries of all models; of each one, an entry is there only with all that it stands on.

    It takes no lock and touches no file.
    """

    def __init__(self) -> None:
        self._entry_of: dict[ModelId, dict[PageHash, DiskEntry]] = {}
        # From the least to the most recently used. A use moves the path up to the root to the
        # end, the root last, so that the first entry has no children.
        self._recency: OrderedDict[DiskEntry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recency)

    def __iter__(self) -> Iterator[DiskEntry]:
        """From the least recently used to the most."""
        return iter(self._recency)

    @property
    def num_pages(self) -> int:
        return sum(len(pages) for pages in self._entry_of.values())

    def oldest(self) -> DiskEntry | None:
        """The least recently used entry; it has no children."""
        return next(iter(self._recency), None)

    def entry_of(self, model: ModelId, page: PageHash) -> DiskEntry | None:
        return self._entry_of.get(model, {}).get(page)

    def has(self, model: ModelId, page: PageHash) -> bool:
        return self.entry_of(model, page) is not None

    def find(self, model: ModelId, pages: Sequence[PageHash]) -> list[tuple[DiskEntry, Span]]:
        """Who has the longest prefix of `pages`, and which of each entry's pages they are."""
        found: list[tuple[DiskEntry, Span]] = []
        at = 0
        while at < len(pages) and (entry := self.entry_of(model, pages[at])) is not None:
            start = entry.record.pages.index(pages[at])
            num = entry.num_common(pages[at:])
            found.append((entry, Span(start, start + num)))
            at += num
        return found

    def wanted(self, model: ModelId, pages: Sequence[PageHash], e_layers: Collection[int]) -> Span:
        """The first run of `pages` that are not here, or to which storing them again adds E."""
        start, at = None, 0
        for entry, span in self.find(model, pages):
            gains = entry.gives_way(pages[at], e_layers)
            if not gains and start is not None:
                return Span(start, at)
            if gains and start is None:
                start = at
            at += len(span)
        return Span(at if start is None else start, len(pages))

    def start_of(self, record: Record) -> int | None:
        """How many of its first pages others have that are as good; None for what cannot be here.

        That is one whose parent is not here, that brings nothing, or a part of which is elsewhere.
        """
        of_model, pages = self._entry_of.get(record.model, {}), record.pages
        has_parent = record.parent is None or record.parent in of_model
        if not has_parent or len(set(pages)) < len(pages):
            return None
        start, at = 0, 0
        for entry, span in self.find(record.model, pages):
            gains = entry.gives_way(pages[at], record.layout.e_layers)
            if not gains and at > start:
                return None
            at += len(span)
            start = start if gains else at
        is_new = of_model.keys().isdisjoint(pages[at:])
        return start if is_new and start < len(pages) else None

    def add(self, record: Record, place: Place, start: int) -> tuple[DiskEntry, list[DiskEntry]]:
        """What `start_of` would have; also those whose last page it took, which are out."""
        entry = DiskEntry(record, place, start)
        of_model = self._entry_of.setdefault(record.model, {})
        page = entry.parent_page
        self._hang(entry, None if page is None else of_model[page])
        replaced: list[DiskEntry] = []
        for old, span in self.find(record.model, entry.pages):
            self._take(old, len(span), entry)
            if not old.pages:
                replaced.append(old)
                self._hang(old, None)
                del self._recency[old]
        of_model.update(dict.fromkeys(entry.pages, entry))
        self.touch(entry)
        return entry, replaced

    def _take(self, old: DiskEntry, num_pages: int, entry: DiskEntry) -> None:
        """The first pages of `old` are those of `entry` from now on, which the rest hangs on."""
        taken = set(old.pages[:num_pages])
        old.start += num_pages
        for child in [child for child in old.children if child.parent_page in taken]:
            self._hang(child, entry)
        self._hang(old, entry)

    def _hang(self, entry: DiskEntry, parent: DiskEntry | None) -> None:
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        entry.parent = parent
        if parent is not None:
            parent.children.add(entry)

    def touch(self, entry: DiskEntry) -> None:
        """Mark the entry and what it stands on as used now."""
        path: DiskEntry | None = entry
        while path is not None:
            self._recency[path] = None
            self._recency.move_to_end(path)
            path = path.parent

    def drop(self, entry: DiskEntry) -> list[DiskEntry]:
        """Take out the entry and all that stands on it, which comes first in the answer."""
        dropped = [entry]
        for each in dropped:  # Grows as it goes.
            dropped.extend(each.children)
        for each in dropped:
            del self._recency[each]
            of_model = self._entry_of[each.record.model]
            for page in each.pages:
                del of_model[page]
            if not of_model:
                del self._entry_of[each.record.model]
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        return dropped[::-1]
