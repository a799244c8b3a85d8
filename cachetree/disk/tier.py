"""The disk below a tree: what the tree holds is written behind it, and outlives it."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final

import msgspec

from cachetree.clock import Clock, Deadline
from cachetree.disk.asker import NO_PEER, Asker, AskingPeer, LetGo
from cachetree.disk.index import DiskEntry
from cachetree.disk.store import DiskStatus, DiskStore
from cachetree.errors import DeadlineExceeded, FetchError, StaleEntry
from cachetree.ids import DISK, Location, ModelId, PageHash, Span, Step
from cachetree.memory import Staging
from cachetree.tier import (
    GRACE_S,
    MAX_WAITING,
    STALL_S,
    Calls,
    IsOver,
    NoteSpeed,
    Search,
    Turns,
    WriteBehind,
)
from cachetree.tree import CacheTree, Change, Lease

log = logging.getLogger(__name__)

_MAX_CLOSE_S: Final = 5.0
_MAX_STOP_S: Final = 5.0
"""Seconds after which a write, or an entry that moves, is taken to hang."""
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

    def __init__(
        self, tree: CacheTree, path: Path, budget_bytes: int, note_speed: NoteSpeed, clock: Clock
    ) -> None:
        """Raises ConfigError, as `DiskStore`."""
        self.budget_bytes: Final = budget_bytes
        self._tree = tree
        self._note_speed = note_speed
        self._clock = clock
        self._is_warm = False
        self._calls = Calls(clock, STALL_S)
        """Reads, and files that are deleted by order."""
        self._writes = Calls(clock, _MAX_STOP_S)
        self._hiding: dict[tuple[ModelId, PageHash | None], PageHash] = {}
        """Last pages of what is in memory without the E that is here."""
        self._store: Final = DiskStore(tree.family, path, budget_bytes, self._show)
        with ExitStack() as undo:
            undo.callback(self._store.close)
            self._reads = _turns("cachetree-disk-read", self.num_readers, undo)
            self._promotions = _turns("cachetree-disk-promote", 1, undo)
            """One line at a time: two that fit one after another need not fit side by side."""
            self._orders = _turns("cachetree-disk-evict", 2, undo)
            """Two threads: one may hang in the deletion of a file."""
            self._behind = WriteBehind(
                tree, DISK, "cachetree-disk-write", self._write, clock, self._store.num_fitting
            )
            undo.pop_all()
        self._reads.put(self._warm_up)

    @property
    def is_paused(self) -> bool:
        """Whether a read hangs; nothing more is read until it returns."""
        return self._calls.have_stalled

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        """Fill `staging` from disk in a thread; what goes wrong fails it."""
        if self.is_paused:
            staging.fail(FetchError("the disk does not answer"))
        elif not self._reads.put(partial(self._fetch, model, pages, staging)):
            staging.fail(FetchError("this cache is closed"))

    def has(self, model: ModelId, page: PageHash) -> bool:
        """Whether `page` is here, and so all before it; waits for no disk."""
        return self._store.index.has(model, page)

    @property
    def num_free_promotions(self) -> int:
        """Lines that may come to wait beside those that do; any thread."""
        return _MAX_PROMOTIONS - self._promotions.num_waiting

    def promote(
        self,
        model: ModelId,
        page: PageHash,
        deadline: Deadline,
        is_wanted: Callable[[], bool],
        done: Callable[[LetGo], object],
    ) -> None:
        """Read `page` and all before it into the tree, in a thread that then calls `done`; at once
        if too many wait to be read, or the disk hangs.

        Pages that are not in the tree by then could not be read, have no room there, or are late.
        Those that are there stay until `done`'s argument is called, or until `deadline`. A line
        waits a little for room, while `is_wanted`, which any thread may call.
        """
        asker = AskingPeer(self._tree, model, deadline, is_wanted)
        read = partial(self._promote_and_keep, model, page, asker, done)
        if self.num_free_promotions <= 0 or self.is_paused or not self._promotions.put(read):
            done(lambda: None)

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
        of memory and of the disk given up. If the disk hangs, only memory is."""
        if not self._orders.put(partial(self._evict, model, pages, done)):
            done(0, 0)

    def status(self) -> DiskStatus:
        status = self._store.status()
        return msgspec.structs.replace(
            status,
            num_late_entries=self._behind.num_late,
            is_failing=status.is_failing or self._writes.have_stalled,
            is_paused=self.is_paused,
            is_warm=self._is_warm,
        )

    def close(self) -> None:
        """Write what waits, for a few seconds at most; fetches then fail. Idempotent.

        A disk that does not answer in that time is left as it is; the directory stays locked.
        """
        ends = Deadline.after(_MAX_CLOSE_S + GRACE_S)
        is_written = self._behind.close(_MAX_CLOSE_S)
        threads = (self._reads, self._promotions, self._orders)
        have_ended = [each.close(ends.remaining_s()) for each in threads]
        if all(have_ended) and is_written:
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
        with self._writes:
            self._store.write(change, lease.views)
        there = self._store.index.find(change.model, change.pages)
        if any(set(change.e_layers) < set(it.record.layout.e_layers) for it, _ in there):
            # It was loaded, without the E that is here, and hides that from those who read memory.
            self._hiding.pop((change.model, change.parent), None)  # A line to here leads by there.
            self._hiding[change.model, change.pages[-1]] = change.pages[-1]
            self._reads.put(self._bring_e)
        return True

    # In a reader's thread.

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
            asker = Asker(lambda: staging.deadline.has_passed)
            self._reads.put(partial(self._promote, line, asker))

    def _promote(self, line: Iterable[DiskEntry], asker: Asker) -> None:
        """Until one cannot be had: below it, where its pages are in memory without their E, others
        would have that never brought."""
        for entry in line:
            is_over = asker.is_over() or self._behind.is_over()
            if is_over or not self._promote_entry(entry, asker):
                return

    def _bring_e(self, line: Sequence[DiskEntry] = ()) -> None:
        """To what hides it, an entry at a time: all others of the line wait behind other reads."""
        if not line:
            with suppress(KeyError):  # No more does.
                (model, _), page = self._hiding.popitem()
                line = self._store.index.line(model, page)
        if line and not self._behind.is_over() and self._promote_entry(line[0]):
            self._reads.put(partial(self._bring_e, line[1:]))

    def _promote_entry(self, entry: DiskEntry, asker: Asker = NO_PEER) -> bool:
        """Have an entry in memory, whose parent is there; False where that cannot be."""
        with self._behind.moves:
            is_here = self._bring(entry, asker)
            asker.keep(entry.pages if is_here else ())
        return is_here

    def _bring(self, entry: DiskEntry, asker: Asker) -> bool:
        layout, new = entry.record.layout, entry.change(added=True)
        reserve = partial(self._tree.reserve, new.model, new.parent, new.pages, new.e_layers)
        while (reservation := reserve()) is None:
            if not asker.waits():
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
            with self._calls:
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
            room = staging.room(step, offset, size)
            with self._calls:
                self._store.read(entry, step, span, room)
            staging.land(step, size)
            offset += size

    def _warm_up(self) -> None:
        """Read into free memory what was used last, as far as it goes."""
        try:
            for entry in takewhile(self._has_room, self._store.index.entries()):
                if self._behind.is_over():
                    return
                self._promote_entry(entry)
        finally:
            self._is_warm = True

    # In the thread that promotes for peers.

    def _promote_and_keep(
        self,
        model: ModelId,
        page: PageHash,
        asker: Asker,
        done: Callable[[LetGo], object],
    ) -> None:
        try:
            line = () if asker.is_over() else self._store.index.line(model, page)
            if self._has_room_for(self._missing_bytes(line, asker), asker):
                self._promote(line, asker)
        finally:
            if asker.is_over():
                asker.keep(())  # The peer may be gone, and then lets go of nothing.
            done(partial(asker.keep, ()))

    def _missing_bytes(self, line: Sequence[DiskEntry], asker: Asker) -> int:
        """Bytes of a line that are not in memory; the pages that are stay there for `asker`."""
        num_bytes = 0
        for entry in reversed(line):
            model, pages = entry.record.model, entry.pages
            # Pages that are there come before those that are not.
            num_here = bisect_left(pages, True, key=lambda it: not self._tree.has(model, it))
            num_bytes += (len(pages) - num_here) * entry.record.layout.page_bytes
            if num_here:
                asker.keep(pages[:num_here])
                break
        return num_bytes

    def _has_room_for(self, num_bytes: int, asker: Asker) -> bool:
        """Whether so much fits beside all that is held, or soon will: a line that does not fit
        would evict what others want, and then miss its own end."""
        tree = self._tree
        while num_bytes + tree.held_bytes > tree.host_bytes:
            is_futile = num_bytes + tree.num_pinned_bytes > tree.host_bytes
            if is_futile or not asker.waits():
                return False
        return True

    # In a thread that evicts.

    def _evict(
        self, model: ModelId | None, pages: Sequence[PageHash], done: Callable[[int, int], None]
    ) -> None:
        """Memory first, which waits for no disk; then both, without what moves between them: that
        would be held in one place, and come back to the other from there."""
        num_bytes = num_disk_bytes = 0
        try:
            num_bytes = self._tree.evict(model, pages)
            timeout_s = 0.0 if self.is_paused else _MAX_STOP_S
            with self._behind.moves.stopped(timeout_s) as is_stopped:
                if is_stopped and not self.is_paused:
                    num_bytes += self._tree.evict(model, pages)
                    with self._calls:
                        num_disk_bytes = self._store.evict(model, pages)
                else:
                    log.warning("%s does not answer; nothing on it goes", self._store.path)
        finally:
            done(num_bytes, num_disk_bytes)

    # In any thread.

    def _has_room(self, entry: DiskEntry) -> bool:
        """Whether it is in memory, or may be without that anything goes for it."""
        record, tree = entry.record, self._tree
        is_here = tree.has(record.model, record.pages[-1])
        return is_here or tree.num_bytes + record.layout.num_bytes <= tree.host_bytes


def _turns(name: str, num_threads: int, undo: ExitStack) -> Turns[Callable[[], object]]:
    """Threads that call what is put; `undo` ends them."""
    turns = Turns(name, _call_all, num_threads)
    undo.callback(turns.close, GRACE_S)
    return turns


def _call_all(calls: Iterator[Callable[[], object]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("%s failed", threading.current_thread().name)
        del call
