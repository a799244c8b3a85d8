"""Entries of one family on disk, within a budget, found again after a restart."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Final, cast

import msgspec

from cachetree.disk import entry_file as files
from cachetree.disk.directory import MEND, Directory, new_file
from cachetree.disk.entry_file import Record, Views
from cachetree.disk.index import DiskFile, DiskFiles
from cachetree.errors import ConfigError, StaleEntry
from cachetree.ids import DISK, KV, ModelId, PageHash, Part, Span, Step
from cachetree.memory import Layout
from cachetree.tree import CacheTree, Change

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

    The tree shows it at `DISK`, and knows which file has which page. Thread-safe: reads run beside
    each other and beside the one write under way; writes, which also evict, wait for each other and
    block on the disk. Files, the write under way included, never exceed the budget. Opening reads
    every file's header, not its payload.

    Eviction deletes the least recently used file that no other stands on. A read that has opened
    its file ends with the right bytes; the device has them back when it ends.
    """

    def __init__(self, tree: CacheTree, path: Path, budget_bytes: int) -> None:
        """Raises ConfigError for a directory that is another's, and for a budget too small."""
        family = tree.family
        page_bytes = files.page_bytes_of(Layout.of(family, 1, KV))
        if budget_bytes < _FILES_PER_BUDGET * page_bytes:
            raise ConfigError(
                f"disk_bytes is {budget_bytes}; a page of this family takes {page_bytes} on disk, "
                f"so give at least {_FILES_PER_BUDGET * page_bytes}"
            )
        self.family: Final = family
        self.path: Final = path
        self.files: Final = DiskFiles()
        """What is here."""
        self._noted: Final = tree.remote
        self._budget_bytes: Final = budget_bytes
        self._max_file_bytes: Final = min(files.MAX_FILE_BYTES, budget_bytes // _FILES_PER_BUDGET)
        self._directory = Directory(path, family)
        self._counts = DiskCounts()
        self._num_bytes = self._directory.num_bytes
        # Neither a lock of the tree or of the files nor `_lock`, which guards the numbers, is held
        # while the disk is waited for.
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

    def find(
        self, model: ModelId, pages: Sequence[PageHash], part: Part = KV
    ) -> list[tuple[DiskFile, Span]]:
        """Which files have the longest prefix of `pages`, and which pages of each those are.

        `pages` may begin anywhere. The files and what they stand on count as used.
        """
        found = [(file, file.pages_at(at)) for file, at in self._sources(model, pages, part)]
        if found:
            self.files.use(found[-1][0])
        return found

    def line(self, model: ModelId, page: PageHash, part: Part = KV) -> list[DiskFile]:
        """The files of one part from the root to the one with `page`; they count as used."""
        found = self.find(model, [page], part)
        line = found[0][0].line() if found else ()
        return [it for it in line if it.record.part == part][::-1]

    def read(self, file: DiskFile, step: Step, pages: Span, into: memoryview) -> None:
        """Fill `into` with these pages of a file (counted from its first); blocks on the disk.

        Raises StaleEntry where the file is gone, or turns out damaged, which drops it and all that
        stands on it; what is in `into` then must not be used.
        """
        record, layout = file.record, file.layout
        if pages.stop > layout.num_pages:
            raise ValueError(f"{pages} exceeds the {layout.num_pages} pages of the file")
        num_bytes = layout.step_bytes * len(pages)
        if into.nbytes != num_bytes:
            raise ValueError(f"{num_bytes} bytes do not go into {into.nbytes}")
        if file not in self.files or not self._is_open:
            raise StaleEntry(f"pages of model {record.model} are no longer on disk")
        path = self._directory.path_of(file.key)
        try:
            files.read_pages(path, layout, step, pages, into.cast("B"))
        except OSError as exc:
            if exc.errno not in _SAYS_NOTHING_OF_THE_ENTRY:
                self._drop_damaged(file, exc)
            raise StaleEntry(f"{path} cannot be read: {exc}") from exc
        with self._lock:
            self._counts.num_read_bytes += into.nbytes

    # Writing.

    def num_fitting(self, change: Change) -> int:
        """How many of its pages go into one file."""
        page_bytes = files.page_bytes_of(Layout.of(self.family, 1, change.part))
        return max(1, self._max_file_bytes // page_bytes)

    def write(self, change: Change, views: Views) -> bool:
        """Write pages that came into a tree, whose bytes `views` gives; blocks on the disk.

        Pages that are there already are skipped. False where what they hang on is not on disk (such
        pages could never match), where the budget has no room, or where the disk is full or fails.
        What `views` raises is passed on, and nothing of the piece under way is kept.
        """
        num_pages = len(change.pages)
        with self._writing:
            start = sum(len(span) for _, span in self.find(change.model, change.pages, change.part))
            while start < num_pages and self._is_open:
                span = Span(start, min(num_pages, start + self.num_fitting(change)))
                file = self._file_of(change.slice(span))
                if file is None or not self._is_written(file, views, span):
                    return False
                start = span.stop
        return start == num_pages

    def evict(self, model: ModelId | None, pages: Sequence[PageHash]) -> int:
        """Drop what begins with `pages`, and of them what nothing else descends from.

        Of one model, or of all; everything where `pages` is empty. Returns the bytes of their
        files.
        """
        with self._writing:
            wanted = self._beginning(model, pages) if pages else None
            dropped = self.files.take_if(
                lambda it: model in (None, it.record.model) and (wanted is None or it in wanted)
            )
            self._delete(dropped)
        return sum(file.num_bytes for file in dropped)

    def status(self) -> DiskStatus:
        with self._lock:
            return DiskStatus(
                num_bytes=self._num_bytes,
                budget_bytes=self._budget_bytes,
                num_entries=len(self.files),
                num_pages=self.files.num_pages,
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
        there = [it for path in self._directory.entries() if (it := self._recovered(path))]
        self._num_bytes += sum(stat.st_size for _, stat in there)
        found: list[tuple[int, DiskFile]] = []
        # KV before E, and parents before what stands on them, which may have been written before.
        for record, stat in sorted(there, key=lambda it: (it[0].part != KV, it[0].num_before)):
            file = self._file_of(record.change)
            if file is not None and file.record == record and self._is_published(file):
                found.append((stat.st_mtime_ns, file))
            else:
                self._counts.num_damaged_entries += 1
                layout = Layout.of(self.family, len(record.pages), record.part)
                self._delete([DiskFile(record, layout, None, None)])
        for _, file in sorted(found, key=lambda it: it[0]):
            self.files.use(file)
        self._make_room(0)

    def _recovered(self, path: str) -> tuple[Record, os.stat_result] | None:
        """What a file holds; one that is damaged is deleted."""
        why = "no whole entry"
        try:
            if found := files.read_record(path, self.family):
                return found
        except OSError as exc:
            if exc.errno in _SAYS_NOTHING_OF_THE_ENTRY:
                raise
            why = str(exc)
        log.warning("%s is damaged and deleted: %s", path, why)
        self._counts.num_damaged_entries += 1
        Path(path).unlink()
        return None

    def _file_of(self, change: Change) -> DiskFile | None:
        """A file for these pages; None if what they hang on is not here. That counts as used."""
        above = kv = None
        num_before = 0
        if change.parent is not None:
            found = self._sources(change.model, [change.parent], change.part)
            if not found:
                return None
            above, num_before = found[0][0], found[0][1].stop
            self.files.use(above)
        if change.part != KV:
            found = self._sources(change.model, change.pages[-1:], KV)
            if not found:
                return None
            kv = found[0][0]
            self.files.use(kv)
        record = Record(
            family=self.family.digest,
            model=change.model,
            part=change.part,
            num_before=num_before,
            parent=change.parent,
            pages=change.pages,
        )
        return DiskFile(record, Layout.of(self.family, len(change.pages), change.part), above, kv)

    def _is_written(self, file: DiskFile, views: Views, pages: Span) -> bool:
        """False where the budget has no room, the disk is full or fails, or what the file stands on
        has turned out damaged meanwhile."""
        path = self._directory.path_of(file.key)
        taken = 0
        try:
            left = path.stat().st_size if path.exists() else 0  # It could not be deleted.
            # Nothing is evicted where not even an empty file can be had.
            with new_file(path) as stream:
                self._make_room(file.num_bytes)
                taken = file.num_bytes
                files.write_record(stream, file.record, file.layout, views, pages)
        except OSError as exc:
            if not self._is_failing:
                log.warning("%s cannot be written, so nothing is kept: %s", self.path, exc)
            self._is_failing = True
            with self._lock:
                self._counts.num_failed_writes += 1
            return False
        else:
            taken = left  # The new one stays.
        finally:
            with self._lock:
                self._num_bytes -= taken
        if self._is_failing:
            log.info("%s can be written again", self.path)
        self._is_failing = False
        with self._lock:
            self._counts.num_written_entries += 1
            self._counts.num_written_bytes += file.num_bytes
        if self._is_published(file):
            return True
        self._delete([file])
        return False

    def _is_published(self, file: DiskFile) -> bool:
        """Take in a file, and have the tree show it; False if a part of its pages is in another, or
        what it stands on has gone."""
        record = file.record
        if self._sources(record.model, record.pages[:1], record.part) or not self.files.add(file):
            return False
        num_noted = self._noted.add(
            DISK, record.model, record.parent, record.pages, record.part, file
        )
        # A reader may have found damaged what it stands on.
        if num_noted == len(record.pages) and file in self.files:
            return True
        self.files.take(file)
        self._forget(file)
        return False

    def _make_room(self, num_bytes: int) -> None:
        """Evict until there is room, and count it as taken; raises OSError where there is none."""
        if num_bytes > self._budget_bytes:
            raise OSError(f"an entry of {num_bytes:,} bytes is more than the disk's budget")
        while True:
            with self._lock:
                if self._num_bytes + num_bytes <= self._budget_bytes:
                    self._num_bytes += num_bytes
                    return
            coldest = self.files.take_coldest()
            with self._lock:
                self._counts.num_evicted_entries += len(coldest)
            if not coldest or not self._delete(coldest):
                raise OSError("files that are to make room cannot be deleted")

    def _delete(self, dropped: Sequence[DiskFile]) -> bool:
        """Delete files that were taken out; False where one cannot be, whose bytes stay counted."""
        is_done = True
        for file in dropped:
            self._forget(file)
            path = self._directory.path_of(file.key)
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                log.warning("%s cannot be deleted: %s", path, exc)
                is_done = False
                continue
            with self._lock:
                self._num_bytes -= file.num_bytes
        return is_done

    def _drop_damaged(self, file: DiskFile, error: OSError) -> None:
        dropped = self.files.take(file)
        if dropped:
            log.warning(
                "%s: %s; dropped with the %d that stand on it",
                self._directory.path_of(file.key),
                error,
                len(dropped) - 1,
            )
        with self._lock:
            self._counts.num_damaged_entries += len(dropped)
        self._delete(dropped)

    # Which file has which page.

    def _sources(
        self, model: ModelId, pages: Sequence[PageHash], part: Part
    ) -> list[tuple[DiskFile, Span]]:
        return cast(list[tuple[DiskFile, Span]], self._noted.sources(DISK, model, pages, part))

    def _forget(self, file: DiskFile) -> None:
        """The tree shows a file no more, if it did."""
        record = file.record
        found = self._sources(record.model, record.pages[:1], record.part)
        if found and found[0][0] is file:
            self._noted.drop(DISK, record.model, record.pages[:1], record.part)

    def _beginning(self, model: ModelId | None, pages: Sequence[PageHash]) -> set[DiskFile]:
        """KV with pages that begin with these, and KV whose pages all are among these."""
        there = [it for it in self.files.coldest_first() if it.record.part == KV]
        found: set[DiskFile] = set()
        below: set[tuple[ModelId, PageHash | None]] = set()
        for each in {it.record.model for it in there if model in (None, it.record.model)}:
            line = self._sources(each, pages, KV)
            if line and (line[0][1].start, line[-1][1].stop) == (0, len(pages)):
                found.update(it for it, at in line if at.stop in (it.stop, len(pages)))
                end = line[-1][0].record
                below.update((each, page) for page in end.pages[len(pages) - 1 - end.num_before :])
        for file in reversed(there):
            record = file.record
            if (record.model, record.parent) in below:
                found.add(file)
                below.update((record.model, page) for page in record.pages)
        return found
