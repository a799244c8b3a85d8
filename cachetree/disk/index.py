"""All files on disk: which file continues which, and which was used last.

The index does not list pages. The tree's entries at `DISK` have the file of each page.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Final

from cachetree.disk.entry_file import Record, size_of
from cachetree.ids import KV, Span
from cachetree.memory import Layout

_TOUCH_S: Final = 60.0


class DiskFile:
    """A file with KV, or E of one layer, of consecutive pages of one model."""

    def __init__(
        self, record: Record, layout: Layout, above: DiskFile | None, kv: DiskFile | None
    ) -> None:
        self.record: Final = record
        self.layout: Final = layout
        self.key: Final = record.key
        self.num_bytes: Final = size_of(record, layout)
        self.above: Final = above
        """File of the same part that has the page before this file's first page. None if this file
        begins a prompt."""
        self.kv: Final = kv
        """File with the KV of the last page, if this file has E. E is deleted with its KV."""
        self.on: Final[set[DiskFile]] = set()
        """Files that depend on this one: they continue it, or have E of its pages. The lock of
        `DiskFiles` guards it."""
        self._touched_at_s = -inf

    @property
    def stop(self) -> int:
        """Number of a prompt's pages up to the end of the file."""
        return self.record.num_before + self.layout.num_pages

    def touch(self, path_of: Callable[[str], Path]) -> None:
        """Set the file's time to now, at most once a minute. The next start reads from these times
        which files were used last. Blocks on the disk."""
        now_s = time.monotonic()
        if now_s - self._touched_at_s >= _TOUCH_S:
            self._touched_at_s = now_s
            with suppress(OSError):
                # The kernel's own time is too coarse to order uses.
                os.utime(path_of(self.key), ns=2 * (time.time_ns(),))

    def pages_at(self, depths: Span) -> Span:
        """Convert pages of a prompt to pages of the file, which count from the file's first
        page."""
        start = self.record.num_before
        return Span(depths.start - start, depths.stop - start)

    def line(self) -> Iterator[DiskFile]:
        """Yield the file and all files that it depends on. E comes before its KV, and a prompt's
        first pages come last."""
        for end in (self, self.kv):
            file = end
            while file is not None:
                yield file
                file = file.above


class DiskFiles:
    """All files, from the least to the most recently used. Thread-safe. No method reads or writes
    files."""

    def __init__(self) -> None:
        self.num_pages = 0
        """Number of pages with KV in all files."""
        self._lock = threading.Lock()
        # A use moves a file to the end, and then all files that it depends on.
        self._order: OrderedDict[DiskFile, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, file: object) -> bool:
        return file in self._order

    def coldest_first(self) -> list[DiskFile]:
        """Return the least recently used files first, each before the files that it depends on."""
        with self._lock:
            return list(self._order)

    def use(self, file: DiskFile) -> None:
        with self._lock:
            if file in self._order:
                self._use(file)

    def add(self, file: DiskFile) -> bool:
        """Add a file, and count it as used now. Return False if a file that it depends on is
        missing."""
        with self._lock:
            below = [it for it in (file.above, file.kv) if it is not None]
            if not all(it in self._order for it in below):
                return False
            for each in below:
                each.on.add(file)
            self.num_pages += _num_kv_pages(file)
            self._use(file)
            return True

    def take(self, file: DiskFile) -> list[DiskFile]:
        """Remove all files that depend on `file`, then `file` itself, if the index has it. Return
        the removed files in this order."""
        with self._lock:
            return self._taken(file)

    def take_coldest(self) -> list[DiskFile]:
        """Remove the least recently used file. If it has KV, first remove the files with E of its
        pages."""
        with self._lock:
            coldest = next(iter(self._order), None)
            return self._taken(coldest) if coldest else []

    def take_if(self, is_wanted: Callable[[DiskFile], bool]) -> list[DiskFile]:
        """Remove each file for which `is_wanted` is true, except if another file has later pages of
        the same prompts. Files with E of its pages are removed, too."""
        with self._lock:
            gone: list[DiskFile] = []
            for file in list(self._order):
                if is_wanted(file) and all(it.kv is file for it in file.on):
                    gone += self._taken(file)
            return gone

    # Called with the lock held.

    def _use(self, file: DiskFile) -> None:
        for each in file.line():
            self._order[each] = None
            self._order.move_to_end(each)

    def _taken(self, file: DiskFile) -> list[DiskFile]:
        if file not in self._order:
            return []
        taken, pending = {file}, [file]
        while pending:
            new = pending.pop().on - taken
            taken |= new
            pending += new
        gone = sorted(taken, key=lambda it: (it.record.part == KV, -it.record.num_before))
        for each in gone:
            del self._order[each]
            self.num_pages -= _num_kv_pages(each)
            for below in (each.above, each.kv):
                if below is not None:
                    below.on.discard(each)
        return gone


def _num_kv_pages(file: DiskFile) -> int:
    return len(file.record.pages) if file.record.part == KV else 0
