"""Entries of one family on disk, within a budget, found again after a restart."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Final

from cachetree.checkpoint import Family
from cachetree.disk import segment as segments
from cachetree.disk.config import DiskConfig, DiskCounts, DiskStatus
from cachetree.disk.directory import Directory
from cachetree.disk.index import DiskEntry, DiskIndex
from cachetree.disk.record import Record, largest_fitting, most_bytes
from cachetree.disk.recovery import recover
from cachetree.disk.segment import SEGMENT_HEADER_BYTES, Place, Segment, Views
from cachetree.disk.space import Space
from cachetree.errors import ConfigError, StaleEntry
from cachetree.ids import ModelId, PageHash, Span, Step
from cachetree.memory import Layout
from cachetree.tree import Change

log = logging.getLogger(__name__)

Listener = Callable[[Change], None]

_PARTS_PER_SEGMENT: Final = 4
"""Larger entries are cut, so that eviction and copies stay fine-grained."""
_MAX_WAIT_S: Final = 1.0
"""For readers of files that are to go, before a write is given up."""
_SAYS_NOTHING_OF_THE_ENTRY: Final = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),  # Of a copy that cannot be written.
)


class DiskStore:
    """What was written, until it is evicted or found damaged.

    Thread-safe: reads run beside each other and beside the one write under way; writes, which also
    evict, wait for each other and block on the disk. Files, the write under way included, never
    exceed the budget. Opening reads every record's header, not its payload.

    Eviction takes the least recently used entry that no other stands on, and marks it in its file.
    Room comes back by whole files: one that is at least half dead is deleted after what lives in
    it has been copied to the newest. So recency decides what goes, no more bytes are copied than
    are freed, and one file's bytes are kept free for that copy.
    """

    def __init__(
        self, family: Family, config: DiskConfig, listener: Listener = lambda change: None
    ) -> None:
        """Raises ConfigError for a directory that is another's, and for a budget too small.

        `listener` hears of every entry that is there or comes, after what it stands on, and of
        every one that goes, before that. It is called under the store's lock: it must not block,
        raise or call the store.
        """
        page_bytes = most_bytes(ModelId("0" * 32), Layout.of(family, 1, ()))
        if config.max_segment_bytes < SEGMENT_HEADER_BYTES + page_bytes:
            raise ConfigError(
                f"disk num_bytes is {config.num_bytes} and segment_bytes {config.segment_bytes}; "
                f"a page of this family takes {page_bytes}, so the first must be at least "
                f"{9 * page_bytes} and the second {2 * page_bytes}"
            )
        self.family: Final = family
        self.config: Final = config
        self._listener = listener
        self._directory = Directory(Path(config.path), family)
        self._space = Space(self._directory, config)
        self._index = DiskIndex()
        self._counts = DiskCounts()
        # `_writing` comes before `_changed`, which guards index, files and counts and is never
        # held while the disk is waited for.
        self._writing = threading.Lock()
        self._changed = self._space.changed
        self._is_open = True
        self._is_failing = False
        try:
            self._recover()
        except OSError as exc:
            self._directory.close()
            raise ConfigError(f"disk path is {config.path!r}: {exc}; remove it") from exc

    # Reading.

    def find(self, model: ModelId, pages: Sequence[PageHash]) -> list[tuple[DiskEntry, Span]]:
        """The entries that hold the longest prefix of `pages`, and which of their pages it is.

        `pages` may begin anywhere. The entries and what they stand on count as used.
        """
        with self._changed:
            found = self._index.find(model, pages)
            if found:
                self._index.touch(found[-1][0])
            return found

    def has(self, model: ModelId, page: PageHash) -> bool:
        """Whether `page` is here, and so all before it."""
        with self._changed:
            return self._index.has(model, page)

    def line(self, model: ModelId, page: PageHash) -> list[DiskEntry]:
        """The entries from the root to the one with `page`; they count as used."""
        with self._changed:
            entry = self._index.entry_of(model, page)
            if entry is not None:
                self._index.touch(entry)
            line: list[DiskEntry] = []
            while entry is not None:
                line.append(entry)
                entry = entry.parent
            return line[::-1]

    def entries(self) -> list[DiskEntry]:
        """From the most recently used to the least; each comes after what it stands on."""
        with self._changed:
            return list(self._index)[::-1]

    def read(self, entry: DiskEntry, step: Step, pages: Span, into: memoryview) -> None:
        """Fill `into` with these pages of an entry (counted from its first); blocks on the disk.

        Raises StaleEntry where the entry is gone, has no such E, or turns out damaged, which drops
        it and all that stands on it; what is in `into` then must not be used.
        """
        record = entry.record
        if pages.stop > len(record.pages):
            raise ValueError(f"{pages} exceeds the {len(record.pages)} pages of the entry")
        wanted = record.layout.range_of(step, pages)
        if into.nbytes != len(wanted):
            raise ValueError(f"{len(wanted)} bytes do not go into {into.nbytes}")
        with self._changed:
            place = entry.place
            if place is None or not self._is_open:
                raise StaleEntry(f"pages of model {record.model} are no longer on disk")
            place.segment.num_readers += 1
        with self._space.pinned(place.segment):
            try:
                segments.read_pages(place, record, step, pages, into.cast("B"))
            except OSError as exc:
                if exc.errno not in _SAYS_NOTHING_OF_THE_ENTRY:
                    self._drop_damaged(entry, place, exc)
                raise StaleEntry(f"{place.segment.path} cannot be read: {exc}") from exc
        with self._changed:
            self._counts.num_read_bytes += into.nbytes

    # Writing.

    def write(
        self,
        model: ModelId,
        parent: PageHash | None,
        pages: Sequence[PageHash],
        e_layers: Collection[int],
        views: Views,
    ) -> bool:
        """Write consecutive pages after `parent` (None is the root); blocks on the disk.

        Pages that are there already are skipped, but for those that gain E: from the first page of
        an entry on, with E where it has it and at more layers. False where `parent` is not on disk
        (such pages could never match), where the budget has no room, or where the disk is full or
        fails.
        `views` gives the bytes of all of `pages`; what it raises is passed on, and nothing of the
        part under way is kept.
        """
        layers = tuple(sorted(set(e_layers)))
        limit_bytes = self.config.max_segment_bytes // _PARTS_PER_SEGMENT
        with self._writing:
            start = 0
            while True:
                with self._changed:
                    wanted = self._index.wanted(model, pages[start:], layers)
                if not wanted:
                    return True
                start, limit = start + wanted.start, start + wanted.stop
                layout = Layout.of(self.family, limit - start, layers)
                layout = largest_fitting(model, layout, limit_bytes)
                stop = start + layout.num_pages
                part = Record(
                    model=model,
                    parent=pages[start - 1] if start else parent,
                    pages=tuple(pages[start:stop]),
                    layout=layout,
                    checksums=b"",
                )
                if not self._append(part, segments.part_of(views, len(pages), Span(start, stop))):
                    return False
                start = stop

    def remove(self, model: ModelId, page: PageHash) -> bool:
        """Drop the entry that has `page` and all that stands on it; False where there is none."""
        with self._writing, self._changed:
            entry = self._index.entry_of(model, page)
            dropped = self._drop(entry) if entry else []
        self._bury(dropped)
        return bool(dropped)

    def evict(self, model: ModelId | None, pages: Sequence[PageHash]) -> None:
        """Drop what begins with `pages`, and of them what nothing else stands on.

        Of one model, or of all; everything where `pages` is empty.
        """
        with self._changed:
            roots = [it for it in self._index if it.parent is None]
            models = {it.record.model for it in roots} if model is None else {model}
            found = [self._index.find(each, pages) for each in models]
        if not pages:
            for root in roots:
                if root.record.model in models:
                    self.remove(root.record.model, root.pages[0])
        above = set(pages[:-1])
        for path in found:
            if pages and sum(len(span) for _, span in path) == len(pages):
                # An entry goes whole or not at all: others may stand in its middle.
                for child in tuple(path[-1][0].children):
                    if child.parent_page not in above:
                        self.remove(child.record.model, child.pages[0])
                for entry, span in reversed(path):
                    goes_on = entry is not path[-1][0] and span.stop < len(entry.record.pages)
                    if entry.children or goes_on:
                        break
                    self.remove(entry.record.model, entry.pages[0])

    def status(self) -> DiskStatus:
        with self._changed:
            there = self._space.segments.values()
            return DiskStatus(
                num_bytes=self._space.num_bytes,
                budget_bytes=self.config.num_bytes,
                num_live_bytes=sum(segment.num_live_bytes for segment in there),
                num_entries=len(self._index),
                num_pages=self._index.num_pages,
                num_segments=len(there),
                is_failing=self._is_failing,
                counts=copy(self._counts),
            )

    def close(self) -> None:
        """Let another process have the directory. Reads then miss, writes fail. Idempotent."""
        with self._writing:
            with self._changed:
                self._is_open = False
            self._space.seal()
            self._directory.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Everything below but `_drop_damaged` and `_drop` is called with `_writing` held.

    def _recover(self) -> None:
        found = recover(self._directory, self.family)
        self._counts.num_torn_tails = found.num_torn
        self._counts.num_damaged_entries = found.num_damaged
        useless: list[Place] = []
        with self._changed:
            for segment in found.segments:
                self._space.adopt(segment)
            for record, place in found.records:
                useless += self._publish(record, place)
        self._bury(useless)
        self._make_room(0)

    def _append(self, part: Record, views: Views) -> bool:
        num_bytes = most_bytes(part.model, part.layout)
        with self._changed:
            if not self._is_open or self._index.start_of(part) is None:
                return False
        is_too_large = num_bytes + SEGMENT_HEADER_BYTES > self.config.max_segment_bytes
        if is_too_large or not self._make_room(num_bytes + SEGMENT_HEADER_BYTES):
            with self._changed:
                self._counts.num_failed_writes += 1
            return False
        try:
            record, place = self._space.append(num_bytes, lambda to: to.append(part, views))
        except OSError as exc:
            with self._changed:
                self._counts.num_failed_writes += 1
            self._note_failure(exc)
            return False
        if self._is_failing:
            log.info("%s can be written again", self.config.path)
        self._is_failing = False
        with self._changed:
            self._counts.num_written_entries += 1
            self._counts.num_written_bytes += place.num_bytes
            # A reader may have found the parent damaged meanwhile.
            useless = self._publish(record, place)
        self._bury(useless)
        return place not in useless

    def _note_failure(self, error: OSError) -> None:
        if not self._is_failing:
            log.warning("%s cannot be written, so nothing is kept: %s", self.config.path, error)
        self._is_failing = True

    def _publish(self, record: Record, place: Place) -> list[Place]:
        """Returns what is of no use now: it, or what it takes the place of."""
        start = self._index.start_of(record)
        if start is None:
            return [place]
        entry, replaced = self._index.add(record, place, start)
        place.segment.num_live_bytes += place.num_bytes
        self._listener(entry.change(added=True))
        return [gone for old in replaced if (gone := self._retire(old)) is not None]

    def _retire(self, entry: DiskEntry) -> Place | None:
        place, entry.place = entry.place, None
        if place is not None:
            place.segment.num_live_bytes -= place.num_bytes
        return place

    def _make_room(self, num_bytes: int) -> bool:
        """Evict and delete until there is room; False where there will not be any in time."""
        while True:
            with self._changed:
                if self._space.has_room(num_bytes):
                    return True
                if self._space.will_have_room(num_bytes):
                    return self._changed.wait_for(
                        lambda: self._space.has_room(num_bytes), _MAX_WAIT_S
                    )
                segment = self._space.deadest()
                is_dead = segment is not None and not segment.num_live_bytes
                is_worth = segment is not None and self._space.is_worth_emptying(segment)
            if segment is None:
                return False
            if is_dead or is_worth:
                if not self._empty(segment):
                    return False
                self._space.delete(segment)
            else:
                self._evict_oldest()

    def _evict_oldest(self) -> None:
        with self._changed:
            entry = self._index.oldest()
            dropped = self._drop(entry) if entry else []
            self._counts.num_evicted_entries += len(dropped)
        self._bury(dropped)

    def _empty(self, segment: Segment) -> bool:
        """Copy what lives in a file to the newest one, what is damaged goes; False where it stays.

        Then something is short, such as descriptors or the disk itself.
        """
        with self._changed:
            entries = [it for it in self._index if it.place and it.place.segment is segment]
        return all(self._move(entry) for entry in entries)

    def _move(self, entry: DiskEntry) -> bool:
        place = entry.place
        if place is None:
            return True
        try:
            to = self._space.append(
                place.num_bytes, lambda newest: newest.copy(entry.record, place)
            )
        except OSError as exc:
            if exc.errno in _SAYS_NOTHING_OF_THE_ENTRY:
                self._note_failure(exc)
                return False
            self._drop_damaged(entry, place, exc)
            return True
        with self._changed:
            self._counts.num_moved_bytes += to.num_bytes
            is_wanted = entry.place is not None
            if is_wanted:
                place.segment.num_live_bytes -= place.num_bytes
                to.segment.num_live_bytes += to.num_bytes
                entry.place = to
        if not is_wanted:
            self._bury([to])
        return True

    def _drop_damaged(self, entry: DiskEntry, place: Place, error: OSError) -> None:
        with self._changed:
            dropped = self._drop(entry) if entry.place else []
            self._counts.num_damaged_entries += len(dropped)
        if dropped:
            log.warning(
                "%s, entry at byte %d: %s; dropped with the %d that stand on it",
                place.segment.path,
                place.start,
                error,
                len(dropped) - 1,
            )
        self._bury(dropped)

    def _drop(self, entry: DiskEntry) -> list[Place]:
        """With the lock held: take out the entry and all that stands on it."""
        places: list[Place] = []
        for each in self._index.drop(entry):
            place = self._retire(each)
            if place is not None:
                places.append(place)
            self._listener(each.change(added=False))
        return places

    def _bury(self, places: Sequence[Place]) -> None:
        """Keep a restart from finding them. A file that has gone needs no mark."""
        for place in places:
            with contextlib.suppress(OSError):
                segments.bury(place)
