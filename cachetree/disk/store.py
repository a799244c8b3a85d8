"""The files of one family's entries in a directory, within a budget. They outlive a restart."""

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
"""Least number of files that fill the budget, so that one eviction frees only a small share."""
_SAYS_NOTHING_OF_THE_ENTRY: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES)


class DiskCounts(msgspec.Struct, kw_only=True):
    """Counts of events since a store was opened. The store's lock guards them."""

    num_written_entries: int = 0
    num_written_bytes: int = 0
    num_failed_writes: int = 0
    """Number of writes that failed: the disk was full or failed, or the budget had no room."""
    num_read_bytes: int = 0
    num_damaged_entries: int = 0
    """Number of entries that were damaged or unreadable, with the entries that depend on them."""
    num_torn_writes: int = 0
    """Number of incomplete files that processes left when they died."""
    num_evicted_entries: int = 0


class DiskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a disk store in numbers."""

    num_bytes: int
    """Bytes of all files now, including the write under way."""
    budget_bytes: int
    num_entries: int
    num_pages: int
    counts: DiskCounts
    num_late_entries: int = 0
    """Number of entries that left memory before they could be written."""
    is_failing: bool = False
    """True if the last write failed, or the running write hangs."""
    is_paused: bool = False
    """True if a read hangs; no other read starts until it returns."""
    is_warm: bool = False
    """True once the most recently used entries were read into free memory, after the start."""


class DiskStore:
    """Entries on disk. They stay until they are evicted or turn out damaged.

    The tree lists them at `DISK`, with the file of each page. Thread-safe: several reads and one
    write can run at the same time. Writes wait for each other, block on the disk, and evict if they
    need room. All files together, with the running write, never exceed the budget. Opening reads
    every file's header, not its payload. Eviction deletes the least recently used file that no
    other file depends on. A read that has opened its file still gets the right bytes.
    """

    def __init__(self, tree: CacheTree, path: Path, budget_bytes: int) -> None:
        """Raises ConfigError if `path` is another family's, or the budget is too small."""
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
        self._noted: Final = tree.remote
        self._budget_bytes: Final = budget_bytes
        self._max_file_bytes: Final = min(files.MAX_FILE_BYTES, budget_bytes // _FILES_PER_BUDGET)
        self._directory = Directory(path, family)
        self._counts = DiskCounts()
        self._num_bytes = self._directory.num_bytes
        # The lock `_lock` guards the numbers. A thread that holds this lock, or a lock of the tree
        # or of the files, does not wait for the disk.
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
        """Return files with some of the leading `pages`, and the span of these pages in each file.

        `pages` may start inside a prompt. Counts as a use of these files and all they depend on.
        """
        sources = [(file, file.pages_at(at)) for file, at in self._sources(model, pages, part)]
        if sources:
            self.files.use(sources[-1][0])
            sources[-1][0].touch(self._directory.path_of)
        return sources

    def line(self, model: ModelId, page: PageHash, part: Part = KV) -> list[DiskFile]:
        """Return the files of one part, from the root to the file with `page`. Counts as a use."""
        sources = self.find(model, [page], part)
        line = sources[0][0].line() if sources else ()
        return [it for it in line if it.record.part == part][::-1]

    def read(self, file: DiskFile, step: Step, pages: Span, into: memoryview) -> None:
        """Fill `into` with pages of a file. `pages` counts from the file's first page. Blocks on
        the disk.

        Raises StaleEntry if the file is gone or damaged. Damage drops it and all files that depend
        on it. After an error `into` must not be used.
        """
        record, layout = file.record, file.layout
        if pages.stop > layout.num_pages:
            raise ValueError(f"{pages} exceeds the {layout.num_pages} pages of the file")
        num_bytes = layout.step_bytes * len(pages)
        if into.nbytes != num_bytes:
            raise ValueError(f"{num_bytes} bytes do not fit into {into.nbytes}")
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
        """Return how many pages of `change` fit into one file."""
        page_bytes = files.page_bytes_of(Layout.of(self.family, 1, change.part))
        return max(1, self._max_file_bytes // page_bytes)

    def write(self, change: Change, views: Views) -> bool:
        """Write pages that were added to a tree. `views` returns their bytes. Blocks on the disk.

        Pages that are on disk already are skipped. Returns False if the pages before them are not
        on disk (they could never match), if the budget has no room, or if the disk is full or
        fails. Raises the errors of `views`, after the unfinished file was deleted.
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
        """Delete all prompts that begin with `pages`, of `model` or all models. Return freed bytes.

        Pages that another prompt shares stay. Empty `pages`: delete everything.
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
        """Release the directory for other processes. Later reads and writes fail. Idempotent."""
        with self._writing:
            self._is_open = False
            self._directory.close()

    # Everything below except `_drop_damaged` and its callees is called with `_writing` held.

    def _recover(self) -> None:
        """Add the directory's files to the store. Delete damaged and incomplete files."""
        self._counts.num_torn_writes = self._directory.sweep()
        readable = [it for path in self._directory.entries() if (it := self._recovered(path))]
        self._num_bytes += sum(stat.st_size for _, stat in readable)
        numbered: list[tuple[int, DiskFile]] = []
        # KV before E, and parents before their children. Children may have been written before.
        for record, stat in sorted(readable, key=lambda it: (it[0].part != KV, it[0].num_before)):
            file = self._file_of(record.change)
            if file is not None and file.record == record and self._is_published(file):
                numbered.append((stat.st_mtime_ns, file))
            else:
                self._counts.num_damaged_entries += 1
                layout = Layout.of(self.family, len(record.pages), record.part)
                self._delete([DiskFile(record, layout, None, None)])
        for _, file in sorted(numbered, key=lambda it: it[0]):
            self.files.use(file)
        self._make_room(0)

    def _recovered(self, path: str) -> tuple[Record, os.stat_result] | None:
        """Return the record of a file. Delete the file if it is damaged."""
        why = "no whole entry"
        try:
            if recovered := files.read_record(path, self.family):
                return recovered
        except OSError as exc:
            if exc.errno in _SAYS_NOTHING_OF_THE_ENTRY:
                raise
            why = str(exc)
        log.warning("%s is damaged and deleted: %s", path, why)
        self._counts.num_damaged_entries += 1
        Path(path).unlink()
        return None

    def _file_of(self, change: Change) -> DiskFile | None:
        """Make a `DiskFile` for these pages, and count the files that it depends on as used now.
        None if such a file is missing."""
        above = kv = None
        num_before = 0
        if change.parent is not None:
            sources = self._sources(change.model, [change.parent], change.part)
            if not sources:
                return None
            above, num_before = sources[0][0], sources[0][1].stop
            self.files.use(above)
        if change.part != KV:
            sources = self._sources(change.model, change.pages[-1:], KV)
            if not sources:
                return None
            kv = sources[0][0]
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
        """Write a file. Returns False if the budget has no room, if the disk is full or fails, or
        if a file that it depends on has turned out damaged."""
        path = self._directory.path_of(file.key)
        taken = 0
        try:
            # Bytes of a damaged file with this name that could not be deleted.
            left = path.stat().st_size if path.exists() else 0
            # Make the file before evicting: if even an empty file fails, evict nothing.
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
            taken = left  # The new file stays.
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
        """Add a file to the index and to the tree. Returns False if another file has some of its
        pages, or if a file that it depends on is gone."""
        record = file.record
        if self._sources(record.model, record.pages[:1], record.part) or not self.files.add(file):
            return False
        num_noted = self._noted.add(
            DISK, record.model, record.parent, record.pages, record.part, file
        )
        # Meanwhile a reader may have dropped a damaged file that this file depends on.
        if num_noted == len(record.pages) and file in self.files:
            return True
        self.files.take(file)
        self._forget(file)
        return False

    def _make_room(self, num_bytes: int) -> None:
        """Evict until `num_bytes` fit, and add them to the used bytes. Raises OSError if they
        cannot fit."""
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
                raise OSError("files cannot be deleted to make room")

    def _delete(self, dropped: Sequence[DiskFile]) -> bool:
        """Delete files that were removed from the index. False if one cannot be deleted; its bytes
        still count."""
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
                "%s: %s; dropped with the %d files that depend on it",
                self._directory.path_of(file.key),
                error,
                len(dropped) - 1,
            )
        with self._lock:
            self._counts.num_damaged_entries += len(dropped)
        self._delete(dropped)

    # The tree knows which file has which page.

    def _sources(
        self, model: ModelId, pages: Sequence[PageHash], part: Part
    ) -> list[tuple[DiskFile, Span]]:
        return cast(list[tuple[DiskFile, Span]], self._noted.sources(DISK, model, pages, part))

    def _forget(self, file: DiskFile) -> None:
        """Remove a file's entries from the tree, if there are any."""
        record = file.record
        sources = self._sources(record.model, record.pages[:1], record.part)
        if sources and sources[0][0] is file:
            self._noted.drop(DISK, record.model, record.pages[:1], record.part)

    def _beginning(self, model: ModelId | None, pages: Sequence[PageHash]) -> set[DiskFile]:
        """Return the KV files of prompts that begin with `pages`. A file may have only some of
        `pages`, or only later pages."""
        kv_files = [it for it in self.files.coldest_first() if it.record.part == KV]
        beginning: set[DiskFile] = set()
        below: set[tuple[ModelId, PageHash | None]] = set()
        for each in {it.record.model for it in kv_files if model in (None, it.record.model)}:
            line = self._sources(each, pages, KV)
            if line and (line[0][1].start, line[-1][1].stop) == (0, len(pages)):
                beginning.update(it for it, at in line if at.stop in (it.stop, len(pages)))
                end = line[-1][0].record
                below.update((each, page) for page in end.pages[len(pages) - 1 - end.num_before :])
        for file in reversed(kv_files):
            record = file.record
            if (record.model, record.parent) in below:
                beginning.add(file)
                below.update((record.model, page) for page in record.pages)
        return beginning
