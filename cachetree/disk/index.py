"""Which entries are on disk: by page, by whom they stand on, and by when they were last used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from cachetree.disk.record import Record
from cachetree.disk.segment import Place
from cachetree.entries import Change
from cachetree.ids import ModelId, PageHash, Span


class DiskEntry:
    """Consecutive pages of one model, and where they lie. The store's lock guards what changes."""

    def __init__(self, record: Record, place: Place, parent: DiskEntry | None) -> None:
        self.record: Final = record
        self.parent: Final = parent
        """The entry with the page before the first."""
        self.children: set[DiskEntry] = set()
        self.place: Place | None = place
        """None when it has been dropped."""

    def change(self, *, added: bool) -> Change:
        record = self.record
        return Change(
            added=added,
            model=record.model,
            parent=record.parent,
            pages=record.pages,
            e_layers=record.layout.e_layers,
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
        while at < len(pages):
            entry = self.entry_of(model, pages[at])
            if entry is None:
                break
            theirs = entry.record.pages
            start = stop = theirs.index(pages[at])
            while stop < len(theirs) and at < len(pages) and theirs[stop] == pages[at]:
                stop += 1
                at += 1
            found.append((entry, Span(start, stop)))
        return found

    def accepts(self, model: ModelId, parent: PageHash | None, pages: Sequence[PageHash]) -> bool:
        """Whether `parent` is here, None being the root, and each of `pages` is new."""
        of_model = self._entry_of.get(model, {})
        is_new = of_model.keys().isdisjoint(pages) and len(set(pages)) == len(pages)
        return is_new and (parent is None or parent in of_model)

    def add(self, record: Record, place: Place) -> DiskEntry:
        """Only what `accepts` would take."""
        page = record.parent
        parent = None if page is None else self.entry_of(record.model, page)
        of_model = self._entry_of.setdefault(record.model, {})
        entry = DiskEntry(record, place, parent)
        of_model.update(dict.fromkeys(record.pages, entry))
        if parent is not None:
            parent.children.add(entry)
        self.touch(entry)
        return entry

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
            for page in each.record.pages:
                del of_model[page]
            if not of_model:
                del self._entry_of[each.record.model]
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        return dropped[::-1]
