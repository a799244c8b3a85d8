"""Which entries are on disk: by page, and by when they were last used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import Final

from cachetree.disk.entry_file import Record
from cachetree.ids import ModelId, PageHash, Span
from cachetree.tree import Change


class DiskEntry:
    """A file with consecutive pages of one model. The store's lock guards what changes.

    The first `start` of its pages are those of other entries, which have more E.
    """

    def __init__(self, record: Record, number: int, num_bytes: int) -> None:
        self.record: Final = record
        self.number: Final = number
        """Of its file; later entries have higher ones."""
        self.num_bytes: Final = num_bytes
        """Of its file."""
        self.start = 0

    @property
    def pages(self) -> tuple[PageHash, ...]:
        return self.record.pages[self.start :]

    @property
    def parent_page(self) -> PageHash | None:
        return self.record.pages[self.start - 1] if self.start else self.record.parent

    def gives_way(self, page: PageHash, e_layers: Collection[int]) -> bool:
        """Whether `page` is its first, and storing it with this E adds some and loses none."""
        is_first = page == self.record.pages[self.start]
        return is_first and set(self.record.layout.e_layers) < set(e_layers)

    def change(self, *, added: bool) -> Change:
        return Change(
            added=added,
            model=self.record.model,
            parent=self.parent_page,
            pages=self.pages,
            e_layers=self.record.layout.e_layers,
        )


class DiskIndex:
    """Entries of all models; of each one, an entry is there only with all that it descends from.

    It takes no lock and touches no file.
    """

    def __init__(self) -> None:
        self._entry_of: dict[ModelId, dict[PageHash, DiskEntry]] = {}
        # From the least to the most recently used. A use moves the path up to the root to the
        # end, the root last: whatever descends from an entry comes before it.
        self._recency: OrderedDict[DiskEntry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recency)

    def __iter__(self) -> Iterator[DiskEntry]:
        """From the least recently used to the most; the first has nothing that descends from it."""
        return iter(self._recency)

    def __reversed__(self) -> Iterator[DiskEntry]:
        return reversed(self._recency)

    def __contains__(self, entry: DiskEntry) -> bool:
        return self.entry_of(entry.record.model, entry.record.pages[-1]) is entry

    @property
    def num_pages(self) -> int:
        return sum(len(pages) for pages in self._entry_of.values())

    @property
    def models(self) -> set[ModelId]:
        return {model for model, pages in self._entry_of.items() if pages}

    def entry_of(self, model: ModelId, page: PageHash | None) -> DiskEntry | None:
        return None if page is None else self._entry_of.get(model, {}).get(page)

    def depth_of(self, model: ModelId, page: PageHash | None) -> int | None:
        """How many pages `page` ends, 0 for the root; None where it is not here."""
        if page is None:
            return 0
        entry = self.entry_of(model, page)
        return entry.record.num_before + entry.record.pages.index(page) + 1 if entry else None

    def roots(self, model: ModelId) -> list[DiskEntry]:
        return [it for it in self if it.record.model == model and it.parent_page is None]

    def find(self, model: ModelId, pages: Sequence[PageHash]) -> list[tuple[DiskEntry, Span]]:
        """Who has the longest prefix of `pages`, and which of each entry's pages they are."""
        found: list[tuple[DiskEntry, Span]] = []
        at = 0
        while at < len(pages) and (entry := self.entry_of(model, pages[at])) is not None:
            theirs = entry.record.pages
            start = theirs.index(pages[at])
            pairs = zip(theirs[start:], pages[at:], strict=False)
            num = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            found.append((entry, Span(start, start + num)))
            at += num
        return found

    def path_to(self, entry: DiskEntry | None) -> list[DiskEntry]:
        """The entry and what it descends from, up to the root."""
        path: list[DiskEntry] = []
        while entry is not None:
            path.append(entry)
            entry = self.entry_of(entry.record.model, entry.parent_page)
        return path

    def above(self, entry: DiskEntry) -> list[DiskEntry]:
        """What descends from it, parents before children; looks at every entry."""
        pages = set(entry.pages)
        found: list[DiskEntry] = []
        for each in reversed(self._recency):
            if each.record.model == entry.record.model and each.parent_page in pages:
                found.append(each)
                pages.update(each.pages)
        return found

    def wanted(self, model: ModelId, pages: Sequence[PageHash], e_layers: Collection[int]) -> Span:
        """The first run of `pages` that are not here, or to which storing them again adds E."""
        return _wanted(self.find(model, pages), pages, e_layers)

    def start_of(self, record: Record) -> int | None:
        """How many of its first pages others have that are as good; None for what cannot be here.

        That is one whose parent is not here, that brings nothing, or a part of which is elsewhere.
        """
        pages = record.pages
        depth = self.depth_of(record.model, record.parent)
        if depth != record.num_before or len(set(pages)) < len(pages):
            return None
        found = self.find(record.model, pages)
        for entry, span in found:
            if entry.record.num_before + span.start != depth:
                return None
            depth += len(span)
        wanted = _wanted(found, pages, record.layout.e_layers)
        new = pages[depth - record.num_before :]
        is_new = self._entry_of.get(record.model, {}).keys().isdisjoint(new)
        return wanted.start if is_new and wanted and wanted.stop == len(pages) else None

    def add(self, entry: DiskEntry, start: int) -> list[DiskEntry]:
        """What `start_of` would have, to be touched; returns those whose last page it took.

        They are out.
        """
        entry.start = start
        replaced: list[DiskEntry] = []
        of_model = self._entry_of.setdefault(entry.record.model, {})
        for old, span in self.find(entry.record.model, entry.pages):
            old.start += len(span)
            if old.start == len(old.record.pages):
                replaced.append(old)
                self._recency.pop(old, None)
        of_model.update(dict.fromkeys(entry.pages, entry))
        return replaced

    def touch(self, entry: DiskEntry) -> None:
        """Mark the entry and what it descends from as used now."""
        for each in self.path_to(entry):
            self._recency[each] = None
            self._recency.move_to_end(each)

    def drop(self, entry: DiskEntry) -> None:
        """Take out an entry that nothing descends from."""
        del self._recency[entry]
        of_model = self._entry_of[entry.record.model]
        for page in entry.pages:
            del of_model[page]


def _wanted(
    found: Sequence[tuple[DiskEntry, Span]], pages: Sequence[PageHash], e_layers: Collection[int]
) -> Span:
    start, at = None, 0
    for entry, span in found:
        gains = entry.gives_way(pages[at], e_layers)
        if not gains and start is not None:
            return Span(start, at)
        if gains and start is None:
            start = at
        at += len(span)
    return Span(at if start is None else start, len(pages))
