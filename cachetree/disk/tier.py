"""The disk below a tree: what the tree holds is written behind it, and outlives it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final

import msgspec

from cachetree.clock import Clock, Deadline
from cachetree.disk.index import DiskEntry
from cachetree.disk.store import DiskStatus, DiskStore
from cachetree.errors import DeadlineExceeded, FetchError, StaleEntry
from cachetree.ids import DISK, Location, ModelId, PageHash, Span, Step
from cachetree.memory import Staging
from cachetree.tier import GRACE_S, MAX_WAITING, IsOver, NoteSpeed, Search, Turns, WriteBehind
from cachetree.tree import CacheTree, Change, Lease

log = logging.getLogger(__name__)

_MAX_CLOSE_S: Final = 5.0
_MAX_STOP_S: Final = 5.0
_MAX_PROMOTIONS: Final = 64


class DiskTier:
    """Writes every entry that comes into `tree` to disk, and shows the tree what is there.

    Entries are written when they come, not when they are evicted: eviction takes the last pages of
    a prompt first, which alone would never match after a restart; an entry on its way to the disk
    would be in no budget; and a process that is killed loses only what waits to be written. In the
    long run as much is written either way. What is evicted before its turn is not written.

    In the tree the entries are at location `DISK`. When it is opened, a thread fills the tree's
    free memory with what was used last, so that peers find it again too.
    """

    location: Final[Location] = DISK
    num_readers: Final = 2
    is_paused: Final = False

    def __init__(
        self, tree: CacheTree, path: Path, budget_bytes: int, note_speed: NoteSpeed, clock: Clock
    ) -> None:
        """Raises ConfigError, as `DiskStore`."""
        self.budget_bytes: Final = budget_bytes
        self._tree = tree
        self._note_speed = note_speed
        self._clock = clock
        self._is_warm = False
        self._promotions = threading.BoundedSemaphore(_MAX_PROMOTIONS)
        self._hiding: dict[tuple[ModelId, PageHash | None], PageHash] = {}
        """Last pages of what is in memory without the E that is here."""
        self._store: Final = DiskStore(tree.family, path, budget_bytes, self._show)
        self._reads: Turns[Callable[[], object]] = Turns(
            "cachetree-disk-read", self._read_all, self.num_readers
        )
        self._behind = WriteBehind(
            tree, DISK, "cachetree-disk-write", self._write, clock, self._store.num_fitting
        )
        self._reads.put(self._warm_up)

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        """Fill `staging` from disk in a thread; what goes wrong fails it."""
        if not self._reads.put(partial(self._fetch, model, pages, staging)):
            staging.fail(FetchError("this cache is closed"))

    def has(self, model: ModelId, page: PageHash) -> bool:
        """Whether `page` is here, and so all before it; waits for no disk."""
        return self._store.index.has(model, page)

    def promote(
        self, model: ModelId, page: PageHash, deadline: Deadline, done: Callable[[], None]
    ) -> None:
        """Read `page` and what is before it into the tree, in a thread that then calls `done`; at
        once where too much waits to be read.

        What is not in the tree by then could not be read, has no room there, or is late.
        """
        read = partial(self._promote_and_tell, model, page, deadline, done)
        if not (self._promotions.acquire(blocking=False) and self._reads.put(read)):
            done()

    def note_use(self, model: ModelId, pages: Sequence[PageHash]) -> None:
        """These pages were read from memory: on disk too they are not the ones to go."""
        if self._reads.num_waiting < MAX_WAITING:
            self._reads.put(partial(self._store.index.find, model, pages))

    def search(self, pages: Sequence[PageHash]) -> Search:
        """Over: the tree knows of every entry on disk."""
        return Search(Deadline(0.0, self._clock))

    def evict(
        self, model: ModelId | None, pages: Sequence[PageHash], done: Callable[[int, int], None]
    ) -> None:
        """As `CacheTree.evict`, there and here, in a thread that then calls `done` with the bytes
        of memory and of the disk given up."""
        if not self._reads.put(partial(self._evict, model, pages, done)):
            done(0, 0)

    def status(self) -> DiskStatus:
        return msgspec.structs.replace(
            self._store.status(), num_late_entries=self._behind.num_late, is_warm=self._is_warm
        )

    def close(self) -> None:
        """Write what waits, for a few seconds at most; fetches then fail. Idempotent.

        A disk that does not answer in that time is left as it is; the directory stays locked.
        """
        ends = Deadline.after(_MAX_CLOSE_S + GRACE_S)
        is_written = self._behind.close(_MAX_CLOSE_S)
        if self._reads.close(ends.remaining_s()) and is_written:
            self._store.close()
        else:
            log.warning("%s does not answer; it is left as it is", self._store.path)

    # Called under the lock of the index.

    def _show(self, change: Change) -> None:
        if change.added:
            self._tree.remote.add(DISK, change.model, change.parent, change.pages, change.e_layers)
        else:
            self._tree.remote.drop(DISK, change.model, change.pages)

    # In the writer's thread.

    def _write(self, change: Change, lease: Lease, _is_over: IsOver) -> bool:
        """A file that has been begun is written, whether or not time is over."""
        self._store.write(change, lease.views)
        there = self._store.index.find(change.model, change.pages)
        if any(set(change.e_layers) < set(it.record.layout.e_layers) for it, _ in there):
            # It was loaded, without the E that is here, and hides that from those who read memory.
            self._hiding.pop((change.model, change.parent), None)  # A line to here leads by there.
            self._hiding[change.model, change.pages[-1]] = change.pages[-1]
            self._reads.put(self._bring_e)
        return True

    # In a reader's thread.

    def _read_all(self, reads: Iterator[Callable[[], object]]) -> None:
        for read in reads:
            try:
                read()
            except Exception:
                log.exception("reading from disk failed")
            del read

    def _fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        begun_at_s = self._clock()
        try:
            found = self._store.index.find(model, pages)
            if sum(len(span) for _, span in found) < len(pages):
                raise StaleEntry(f"{len(pages)} pages of model {model} are no longer on disk")
            for step in staging.steps:
                self._read_step(step, found, staging)
        except FetchError as exc:
            staging.fail(exc)
        except Exception as exc:
            log.exception("a fetch from disk failed")
            staging.fail(FetchError(f"internal error: {exc}"))
        seconds = self._clock() - begun_at_s
        self._note_speed(staging.num_landed_bytes, seconds, staging.error)
        if staging.is_complete and self._is_warm:
            # Behind the fetches that wait.
            line = takewhile(self._has_room, self._store.index.line(model, pages[-1]))
            self._reads.put(partial(self._promote, line, staging.deadline))

    def _promote_and_tell(
        self, model: ModelId, page: PageHash, deadline: Deadline, done: Callable[[], None]
    ) -> None:
        try:
            self._promote(self._store.index.line(model, page), deadline)
        finally:
            self._promotions.release()
            done()

    def _promote(self, line: Iterable[DiskEntry], deadline: Deadline) -> None:
        """Until one cannot be had: below it, where its pages are in memory without their E, others
        would have that never brought."""
        for entry in line:
            is_late = deadline.has_passed or self._behind.is_over()
            if is_late or not self._promote_entry(entry):
                return

    def _bring_e(self, line: Sequence[DiskEntry] = ()) -> None:
        """To what hides it, an entry at a time: all others of the line wait behind other reads."""
        if not line:
            with suppress(KeyError):  # No more does.
                (model, _), page = self._hiding.popitem()
                line = self._store.index.line(model, page)
        if line and not self._behind.is_over() and self._promote_entry(line[0]):
            self._reads.put(partial(self._bring_e, line[1:]))

    def _promote_entry(self, entry: DiskEntry) -> bool:
        """Have an entry in memory, whose parent is there; False where that cannot be."""
        layout, new = entry.record.layout, entry.change(added=True)
        with self._behind.moves:
            reservation = self._tree.reserve(new.model, new.parent, new.pages, new.e_layers)
            if reservation is None:
                return False
            first = layout.num_pages - len(reservation.pages)
            with reservation:
                try:
                    for step in reservation.steps:
                        self._read_into(reservation.views(step), entry, step, first)
                except StaleEntry:
                    return False
                with self._behind.unheard():
                    reservation.commit()
        return True

    def _read_into(
        self, views: Sequence[memoryview], entry: DiskEntry, step: Step, page: int
    ) -> None:
        """The entry's pages from `page` on; each of the views has whole pages."""
        for view in views:
            num_pages = view.nbytes // entry.record.layout.bytes_of(step, 1)
            self._store.read(entry, step, Span(page, page + num_pages), view)
            page += num_pages

    def _read_step(
        self, step: Step, found: Sequence[tuple[DiskEntry, Span]], staging: Staging
    ) -> None:
        offset = 0
        for entry, span in found:
            staging.check()
            if staging.deadline.has_passed:
                raise DeadlineExceeded("the read from disk did not end in time")
            size = entry.record.layout.bytes_of(step, len(span))
            self._store.read(entry, step, span, staging.room(step, offset, size))
            staging.land(step, size)
            offset += size

    def _evict(
        self, model: ModelId | None, pages: Sequence[PageHash], done: Callable[[int, int], None]
    ) -> None:
        """What moved meanwhile would be held in one place, and come back to the other from it.

        While a disk hangs, only memory can be given up.
        """
        num_bytes = num_disk_bytes = 0
        try:
            with self._behind.moves.stopped(_MAX_STOP_S) as is_stopped:
                num_bytes = self._tree.evict(model, pages)
                if is_stopped:
                    num_disk_bytes = self._store.evict(model, pages)
                else:
                    log.warning("%s does not answer; nothing on it goes", self._store.path)
        finally:
            done(num_bytes, num_disk_bytes)

    def _warm_up(self) -> None:
        """Read into free memory what was used last, as far as it goes."""
        try:
            for entry in takewhile(self._has_room, self._store.index.entries()):
                if self._behind.is_over():
                    return
                self._promote_entry(entry)
        finally:
            self._is_warm = True

    def _has_room(self, entry: DiskEntry) -> bool:
        """Whether it is in memory, or may be without that anything goes for it."""
        record, tree = entry.record, self._tree
        is_here = tree.has(record.model, record.pages[-1])
        return is_here or tree.num_bytes + record.layout.num_bytes <= tree.host_bytes
