"""Which entries are on disk: by page, by what they stand on, and by when they were last used."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Final

from cachetree.disk.entry_file import Record
from cachetree.ids import ModelId, PageHash, Span
from cachetree.tree import Change, Listener


class DiskEntry:
    """A file with consecutive pages of one model. The index's lock guards what changes.

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

    def change(self, *, added: bool) -> Change:
        """Of a moment, also where others take pages from it meanwhile."""
        record = self.record
        whole = Change(
            added=added,
            model=record.model,
            parent=record.parent,
            pages=record.pages,
            e_layers=record.layout.e_layers,
        )
        return whole.part(Span(self.start, len(record.pages)))


class DiskIndex:
    """Entries of all models; of each one, an entry is there only with all that it descends from.

    Thread-safe; it touches no file. The listener hears of every entry that comes, after what it
    descends from, and of every one that goes, before that. It is called under the lock: it must
    not block, raise or call the index.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._entry_of: defaultdict[ModelId, dict[PageHash, DiskEntry]] = defaultdict(dict)
        # From the least to the most recently used. A use moves the path up to the root to the
        # end, the root last: whatever descends from an entry comes before it.
        self._recency: OrderedDict[DiskEntry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recency)

    def __contains__(self, entry: DiskEntry) -> bool:
        return entry in self._recency

    @property
    def num_pages(self) -> int:
        """Waits for nobody."""
        return sum(map(len, tuple(self._entry_of.values())))

    def has(self, model: ModelId, page: PageHash) -> bool:
        """Whether `page` is here, and so all before it; waits for nobody."""
        return page in self._entry_of.get(model, ())

    def entries(self) -> list[DiskEntry]:
        """From the most recently used to the least; each comes after what it descends from."""
        with self._lock:
            return list(reversed(self._recency))

    def find(self, model: ModelId, pages: Sequence[PageHash]) -> list[tuple[DiskEntry, Span]]:
        """Who has the longest prefix of `pages`, and which of each entry's pages they are.

        `pages` may begin anywhere. The entries and what they descend from count as used.
        """
        with self._lock:
            found = self._find(model, pages)
            if found:
                self._use(found[-1][0])
            return found

    def line(self, model: ModelId, page: PageHash) -> list[DiskEntry]:
        """The entries from the root to the one with `page`; they count as used."""
        with self._lock:
            entry = self._entry_of.get(model, {}).get(page)
            return self._use(entry)[::-1] if entry else []

    def wanted(self, new: Change) -> tuple[Span, int | None]:
        """The first run of its pages that are not here, or to which storing them again adds E.

        And how many pages stand before it, which count as used; None where they are not here.
        """
        with self._lock:
            span = _wanted(self._find(new.model, new.pages), new.pages, new.e_layers)
            before = new.pages[span.start - 1] if span.start else new.parent
            depth = self._depth_of(new.model, before)
            if before is not None and depth is not None:
                self._use(self._entry_of[new.model][before])
            return span, depth

    def publish(self, entry: DiskEntry) -> list[DiskEntry]:
        """Take in an entry, as used now; returns what is of no use then.

        That are those whose last page it took, which are out; or it, where its parent is not here,
        it brings nothing, or a part of it is elsewhere.
        """
        with self._lock:
            start = self._start_of(entry.record)
            if start is None:
                return [entry]
            entry.start = start
            replaced = []
            for old, span in self._find(entry.record.model, entry.pages):
                old.start += len(span)
                if old.start == len(old.record.pages):
                    replaced.append(old)
                    del self._recency[old]
            self._entry_of[entry.record.model].update(dict.fromkeys(entry.pages, entry))
            self._use(entry)
            self._listener(entry.change(added=True))
            return replaced

    def drop(self, entry: DiskEntry) -> list[DiskEntry]:
        """Take out an entry, if it is here, and before it all that descends from it."""
        with self._lock:
            if entry not in self:
                return []
            return self._taken_out([*self._below(entry.record.model, entry.pages), entry])

    def drop_coldest(self) -> DiskEntry | None:
        """Take out the least recently used, from which nothing descends."""
        with self._lock:
            coldest = next(iter(self._recency), None)
            return coldest and self._taken_out([coldest])[0]

    def drop_from(self, model: ModelId | None, pages: Sequence[PageHash]) -> list[DiskEntry]:
        """Take out what begins with `pages`, and of them what nothing else descends from.

        Of one model, or of all; everything where `pages` is empty.
        """
        with self._lock:
            models = tuple(self._entry_of) if model is None else (model,)
            if not pages:
                return self._taken_out([it for it in self._recency if it.record.model in models])
            return self._taken_out([it for each in models for it in self._from(each, pages)])

    # With the lock held.

    def _find(self, model: ModelId, pages: Sequence[PageHash]) -> list[tuple[DiskEntry, Span]]:
        found: list[tuple[DiskEntry, Span]] = []
        of_model = self._entry_of.get(model, {})
        at = 0
        while at < len(pages) and (entry := of_model.get(pages[at])) is not None:
            theirs = entry.record.pages
            start = theirs.index(pages[at])
            if at and pages[at - 1] != (theirs[start - 1] if start else entry.record.parent):
                break
            pairs = zip(theirs[start:], pages[at:], strict=False)
            num = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            found.append((entry, Span(start, start + num)))
            at += num
        return found

    def _depth_of(self, model: ModelId, page: PageHash | None) -> int | None:
        """How many pages `page` ends, 0 for the root; None where it is not here."""
        if page is None:
            return 0
        entry = self._entry_of.get(model, {}).get(page)
        return entry.record.num_before + entry.record.pages.index(page) + 1 if entry else None

    def _use(self, entry: DiskEntry) -> list[DiskEntry]:
        """The entry and what it descends from, up to the root, are used now."""
        path, of_model = [entry], self._entry_of[entry.record.model]
        while (page := path[-1].parent_page) is not None:
            path.append(of_model[page])
        for each in path:
            self._recency[each] = None
            self._recency.move_to_end(each)
        return path

    def _start_of(self, record: Record) -> int | None:
        """How many of its first pages others have that are as good; None for what has no place."""
        pages = record.pages
        depth = self._depth_of(record.model, record.parent)
        if depth != record.num_before or len(set(pages)) < len(pages):
            return None
        found = self._find(record.model, pages)
        for entry, span in found:
            if entry.record.num_before + span.start != depth:
                return None
            depth += len(span)
        wanted = _wanted(found, pages, record.layout.e_layers)
        new = pages[depth - record.num_before :]
        is_new = self._entry_of.get(record.model, {}).keys().isdisjoint(new)
        return wanted.start if is_new and wanted and wanted.stop == len(pages) else None

    def _of(self, model: ModelId) -> list[DiskEntry]:
        """Children before parents."""
        return [it for it in self._recency if it.record.model == model]

    def _below(self, model: ModelId, pages: Sequence[PageHash]) -> list[DiskEntry]:
        """All that descends from any of these pages, children before parents."""
        found, above = [], set(pages)
        for entry in reversed(self._of(model)):
            if entry.parent_page in above:
                found.append(entry)
                above.update(entry.pages)
        return found[::-1]

    def _from(self, model: ModelId, pages: Sequence[PageHash]) -> list[DiskEntry]:
        path = self._find(model, pages)
        if sum(len(span) for _, span in path) < len(pages):
            return []
        last, end = path[-1]
        gone = self._below(model, last.record.pages[end.stop - 1 :])
        num_on = Counter(it.parent_page for it in self._of(model))
        num_on.subtract(it.parent_page for it in gone)
        # An entry goes whole or not at all: others may stand in its middle.
        for entry, span in reversed(path):
            goes_on = entry is not last and span.stop < len(entry.record.pages)
            if goes_on or any(num_on[page] for page in entry.pages):
                break
            gone.append(entry)
            num_on[entry.parent_page] -= 1
        return gone

    def _taken_out(self, entries: list[DiskEntry]) -> list[DiskEntry]:
        """These are out now; nothing else descends from them, and children come before parents."""
        for entry in entries:
            del self._recency[entry]
            of_model = self._entry_of[entry.record.model]
            for page in entry.pages:
                del of_model[page]
            self._listener(entry.change(added=False))
        return entries


def _wanted(
    found: Sequence[tuple[DiskEntry, Span]], pages: Sequence[PageHash], e_layers: Collection[int]
) -> Span:
    start, at = None, 0
    for entry, span in found:
        is_first = pages[at] == entry.record.pages[entry.start]
        gains = is_first and set(entry.record.layout.e_layers) < set(e_layers)
        if not gains and start is not None:
            return Span(start, at)
        if gains and start is None:
            start = at
        at += len(span)
    return Span(at if start is None else start, len(pages))
