"""Entries of one family on disk, within a budget, found again after a restart."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Final

import msgspec

from cachetree.checkpoint import Family
from cachetree.disk import entry_file as files
from cachetree.disk.directory import MEND, Directory, new_file
from cachetree.disk.entry_file import Record, Views
from cachetree.disk.index import DiskEntry, DiskIndex
from cachetree.errors import ConfigError, StaleEntry
from cachetree.ids import ModelId, PageHash, Span, Step
from cachetree.memory import Layout
from cachetree.tree import Change, Listener

log = logging.getLogger(__name__)

_FILES_PER_BUDGET: Final = 8
"""At least, so that little goes at once."""
_SAYS_NOTHING_OF_THE_ENTRY: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES)


class DiskCounts(msgspec.Struct, kw_only=True):
    """What happened since a store was opened; under its lock."""

    num_written_entries: int = 0
    num_written_bytes: int = 0
    num_failed_writes: int = 0
    """The disk was full or failed, or the budget had no room."""
    num_read_bytes: int = 0
    num_damaged_entries: int = 0
    """Found damaged or unreadable, when it was opened or read; with what stood on them."""
    num_torn_writes: int = 0
    """Files that a process had begun when it died."""
    num_evicted_entries: int = 0


class DiskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A disk store in numbers."""

    num_bytes: int
    """Of all files now, the write under way included."""
    budget_bytes: int
    num_entries: int
    num_pages: int
    counts: DiskCounts
    num_late_entries: int = 0
    """Gone from memory before they could be written."""
    is_failing: bool = False
    """The last write failed, or the one under way hangs."""
    is_paused: bool = False
    """A read hangs, and nothing more is read until it returns."""
    is_warm: bool = False
    """What was used last has been read into free memory, as far as it goes."""


class DiskStore:
    """What was written, until it is evicted or found damaged.

    Thread-safe: reads run beside each other and beside the one write under way; writes, which also
    evict, wait for each other and block on the disk. Files, the write under way included, never
    exceed the budget. Opening reads every entry's header, not its payload.

    Eviction deletes the least recently used entry that no other descends from. A read that has
    opened its file ends with the right bytes; the device has them back when it ends.
    """

    def __init__(self, family: Family, path: Path, budget_bytes: int, listener: Listener) -> None:
        """Raises ConfigError for a directory that is another's, and for a budget too small.

        `listener` is the index's: it hears of every entry that is there, comes or goes.
        """
        page_bytes = files.page_bytes_of(Layout.of(family, 1, ()))
        if budget_bytes < _FILES_PER_BUDGET * page_bytes:
            raise ConfigError(
                f"disk_bytes is {budget_bytes}; a page of this family takes {page_bytes} on disk, "
                f"so give at least {_FILES_PER_BUDGET * page_bytes}"
            )
        self.family: Final = family
        self.path: Final = path
        self._budget_bytes: Final = budget_bytes
        self._max_file_bytes: Final = min(files.MAX_FILE_BYTES, budget_bytes // _FILES_PER_BUDGET)
        self.index: Final = DiskIndex(listener)
        """What is here."""
        self._directory = Directory(path, family)
        self._counts = DiskCounts()
        self._num_bytes = self._directory.num_bytes
        self._newest = 0
        # Neither the index's lock nor `_lock`, which guards the numbers, is held while the disk is
        # waited for.
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._is_open = True
        self._is_failing = False
        try:
            self._directory.tighten()
            self._recover()
        except OSError as exc:
            self._directory.close()
            raise ConfigError(f"disk path is {str(path)!r}: {exc}; {MEND}") from exc

    # Reading.

    def read(self, entry: DiskEntry, step: Step, pages: Span, into: memoryview) -> None:
        """Fill `into` with these pages of an entry (counted from its first); blocks on the disk.

        Raises StaleEntry where the entry is gone, has no such E, or turns out damaged, which drops
        it and all that descends from it; what is in `into` then must not be used.
        """
        record = entry.record
        if pages.stop > len(record.pages):
            raise ValueError(f"{pages} exceeds the {len(record.pages)} pages of the entry")
        num_bytes = record.layout.bytes_of(step, len(pages))
        if into.nbytes != num_bytes:
            raise ValueError(f"{num_bytes} bytes do not go into {into.nbytes}")
        if entry not in self.index or not self._is_open:
            raise StaleEntry(f"pages of model {record.model} are no longer on disk")
        path = self._directory.path_of(entry.number)
        try:
            files.read_pages(path, record, step, pages, into.cast("B"))
        except OSError as exc:
            if exc.errno not in _SAYS_NOTHING_OF_THE_ENTRY:
                self._drop_damaged(entry, exc)
            raise StaleEntry(f"{path} cannot be read: {exc}") from exc
        with self._lock:
            self._counts.num_read_bytes += into.nbytes

    # Writing.

    def num_fitting(self, change: Change) -> int:
        """How many of its pages go into one file."""
        page_bytes = files.page_bytes_of(Layout.of(self.family, 1, change.e_layers))
        return max(1, self._max_file_bytes // page_bytes)

    def write(self, change: Change, views: Views) -> bool:
        """Write pages that came into a tree, whose bytes `views` gives; blocks on the disk.

        Pages that are there already are skipped, but for those that gain E: from the first page of
        an entry on, with E where it has it and at more layers. False where their parent is not on
        disk (such pages could never match), where the budget has no room, or where the disk is full
        or fails. What `views` raises is passed on, and nothing of the part under way is kept.
        """
        start, num_pages = 0, len(change.pages)
        with self._writing:
            while self._is_open:
                wanted, num_before = self.index.wanted(change.part(Span(start, num_pages)))
                start, limit = start + wanted.start, start + wanted.stop
                if start == limit:
                    return True
                if num_before is None:
                    return False
                span = Span(start, min(limit, start + self.num_fitting(change)))
                part = change.part(span)
                record = Record(
                    family=self.family.digest,
                    model=part.model,
                    num_before=num_before,
                    parent=part.parent,
                    pages=part.pages,
                    layout=Layout.of(self.family, len(span), part.e_layers),
                )
                entry = self._written(record, views, span)
                if entry is None:
                    with self._lock:
                        self._counts.num_failed_writes += 1
                    return False
                # A reader may have found the parent damaged meanwhile.
                self._delete(self.index.publish(entry))
                if entry not in self.index:
                    return False
                start = span.stop
        return False

    def evict(self, model: ModelId | None, pages: Sequence[PageHash]) -> int:
        """Drop what begins with `pages`, and of them what nothing else descends from.

        Of one model, or of all; everything where `pages` is empty. Returns the bytes of their
        files.
        """
        with self._writing:
            dropped = self.index.drop_from(model, pages)
            self._delete(dropped)
        return sum(entry.num_bytes for entry in dropped)

    def status(self) -> DiskStatus:
        with self._lock:
            return DiskStatus(
                num_bytes=self._num_bytes,
                budget_bytes=self._budget_bytes,
                num_entries=len(self.index),
                num_pages=self.index.num_pages,
                is_failing=self._is_failing,
                counts=copy(self._counts),
            )

    def close(self) -> None:
        """Let another process have the directory. Reads then miss, writes fail. Idempotent."""
        with self._writing:
            self._is_open = False
            self._directory.close()

    # Everything below but `_drop_damaged` and what it calls is called with `_writing` held.

    def _recover(self) -> None:
        """Find what is there; what died while it was written, and what is damaged, goes."""
        self._counts.num_torn_writes = self._directory.sweep()
        there = self._directory.entries()
        found = [it for number, path in there if (it := self._found(number, path))]
        self._num_bytes += sum(entry.num_bytes for entry in found)
        self._newest = max((number for number, _ in there), default=0)
        useless: list[DiskEntry] = []
        # Parents before what descends from them, which may have been written before.
        for entry in sorted(found, key=lambda it: it.record.num_before):
            parent = entry.record.parent
            is_orphan = parent is not None and not self.index.has(entry.record.model, parent)
            self._counts.num_damaged_entries += is_orphan
            useless += self.index.publish(entry)
        for entry in found:
            if entry in self.index:
                self.index.line(entry.record.model, entry.pages[-1])
        self._delete(useless)
        self._make_room(0)

    def _found(self, number: int, path: str) -> DiskEntry | None:
        """What a file holds; one that is damaged is deleted."""
        why = "no whole entry"
        try:
            if found := files.read_record(path, self.family):
                return DiskEntry(found[0], number, found[1])
        except OSError as exc:
            if exc.errno in _SAYS_NOTHING_OF_THE_ENTRY:
                raise
            why = str(exc)
        log.warning("%s is damaged and deleted: %s", path, why)
        self._counts.num_damaged_entries += 1
        Path(path).unlink()
        return None

    def _written(self, part: Record, views: Views, pages: Span) -> DiskEntry | None:
        """None where the budget has no room, or the disk is full or fails."""
        num_bytes = files.size_of(part)
        number = self._newest + 1
        path = self._directory.path_of(number)
        taken = 0
        try:
            # Nothing is evicted where not even an empty file can be had.
            with new_file(path) as file:
                self._make_room(num_bytes)
                taken = num_bytes
                files.write_record(file, part, views, pages)
        except OSError as exc:
            if not self._is_failing:
                log.warning("%s cannot be written, so nothing is kept: %s", self.path, exc)
            self._is_failing = True
            return None
        else:
            taken = 0  # It stays.
        finally:
            with self._lock:
                self._num_bytes -= taken
        if self._is_failing:
            log.info("%s can be written again", self.path)
        self._is_failing = False
        self._newest = number
        with self._lock:
            self._counts.num_written_entries += 1
            self._counts.num_written_bytes += num_bytes
        return DiskEntry(part, number, num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Evict until there is room, and count it as taken; raises OSError where there is none."""
        if num_bytes > self._budget_bytes:
            raise OSError(f"an entry of {num_bytes:,} bytes is more than the disk's budget")
        while True:
            with self._lock:
                if self._num_bytes + num_bytes <= self._budget_bytes:
                    self._num_bytes += num_bytes
                    return
            coldest = self.index.drop_coldest()
            if coldest is not None:
                with self._lock:
                    self._counts.num_evicted_entries += 1
            if coldest is None or not self._delete([coldest]):
                raise OSError("files that are to make room cannot be deleted")

    def _delete(self, dropped: Sequence[DiskEntry]) -> bool:
        """Delete their files; False where one cannot be, whose bytes stay counted."""
        is_done = True
        for entry in dropped:
            path = self._directory.path_of(entry.number)
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                log.warning("%s cannot be deleted: %s", path, exc)
                is_done = False
                continue
            with self._lock:
                self._num_bytes -= entry.num_bytes
        return is_done

    def _drop_damaged(self, entry: DiskEntry, error: OSError) -> None:
        dropped = self.index.drop(entry)
        if dropped:
            log.warning(
                "%s: %s; dropped with the %d that stand on it",
                self._directory.path_of(entry.number),
                error,
                len(dropped) - 1,
            )
        with self._lock:
            self._counts.num_damaged_entries += len(dropped)
        self._delete(dropped)
