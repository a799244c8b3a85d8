"""The disk tier of a cache: it writes the tree's entries in the background, and reads them back."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final

import msgspec

from cachetree.clock import Clock, Deadline
from cachetree.disk.asker import NO_PEER, Asker, AskingPeer, LetGo
from cachetree.disk.index import DiskFile
from cachetree.disk.store import DiskStatus, DiskStore
from cachetree.errors import DeadlineExceeded, FetchError, StaleEntry
from cachetree.ids import DISK, KV, Location, ModelId, PageHash, Part, Span, Step, part_of
from cachetree.memory import Staging
from cachetree.tier import (
    GRACE_S,
    MAX_WAITING,
    STALL_S,
    Calls,
    IsOver,
    NoteSpeed,
    Search,
    WorkerThread,
    WriteBehind,
)
from cachetree.tree import CacheTree, Change, Lease

log = logging.getLogger(__name__)

_MAX_CLOSE_S: Final = 5.0
_MAX_STOP_S: Final = 5.0
"""Seconds after which a write, or a copy of an entry from disk to memory, counts as hanging."""
_MAX_PROMOTIONS: Final = 64


class DiskTier:
    """Write every entry that is added to `tree` to disk, and list the entries on disk in the tree.

    Entries are written when they are added, not when they are evicted, for three reasons. Eviction
    takes the last pages of a prompt first; without the pages before them they would never match
    after a restart. An evicted entry that waits for its write would be in no budget. A process that
    is killed loses only unwritten entries. In the long run, both ways write as many bytes. An entry
    that is evicted before its turn is not written.

    In the tree the entries are at location `DISK`. After opening, a thread fills the tree's free
    memory with the most recently used entries, so that peers find them again, too.
    """

    location: Final[Location] = DISK
    num_readers: Final = 2

    def __init__(
        self, tree: CacheTree, path: Path, budget_bytes: int, note_speed: NoteSpeed, clock: Clock
    ) -> None:
        """Open the directory at `path`. Raises ConfigError, like `DiskStore`."""
        self.budget_bytes: Final = budget_bytes
        self._tree = tree
        self._note_speed = note_speed
        self._clock = clock
        self._is_warm = False
        self._calls = Calls(clock, STALL_S)
        """Running reads, and running deletions that an operator ordered."""
        self._writes = Calls(clock, _MAX_STOP_S)
        self._store: Final = DiskStore(tree, path, budget_bytes)
        with ExitStack() as undo:
            undo.callback(self._store.close)
            self._reads = _threads("cachetree-disk-read", self.num_readers, undo)
            self._promotions = _threads("cachetree-disk-promote", 1, undo)
            """Queue of one thread: memory may lack room for two prompts' entries at a time."""
            self._orders = _threads("cachetree-disk-evict", 2, undo)
            """Queue of two threads that evict for operators: one may hang in a file's deletion."""
            self._behind = WriteBehind(
                tree, DISK, "cachetree-disk-write", self._write, clock, self._store.num_fitting
            )
            undo.pop_all()
        self.unwritten: Final = self._behind.unwritten
        self._reads.put(self._warm_up)

    @property
    def is_paused(self) -> bool:
        """Whether a read hangs. No other read starts until it returns."""
        return self._calls.have_stalled

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        """Fill `staging` from disk, in a thread. If that fails, fail `staging`."""
        if self.is_paused:
            staging.fail(FetchError("the disk does not answer"))
        elif not self._reads.put(partial(self._fetch, model, pages, staging)):
            staging.fail(FetchError("this cache is closed"))

    def has(self, model: ModelId, page: PageHash, part: Part = KV) -> bool:
        """Return whether `page`, and so all pages before it, are on disk. Does not wait for the
        disk."""
        return self._tree.remote.has(DISK, model, page, part)

    @property
    def num_free_promotions(self) -> int:
        """Number of further calls of `promote` that fit into the queue. Thread-safe."""
        return _MAX_PROMOTIONS - self._promotions.num_waiting

    def promote(
        self,
        model: ModelId,
        page: PageHash,
        parts: Collection[Part],
        deadline: Deadline,
        is_wanted: Callable[[], bool],
        done: Callable[[LetGo], object],
    ) -> None:
        """Read these parts of `page` and of all earlier pages into memory, for a peer. A thread
        reads, then calls `done`. If too many calls wait or the disk hangs, `done` is called at
        once.

        A page may then still be missing: the disk could not read it, memory had no room, or the
        deadline has passed. The pages in memory are leased until `deadline`, or until the caller
        calls the function that `done` gets. If memory is full, the thread waits a little while
        `is_wanted` returns True (any thread may call it).
        """
        asker = AskingPeer(self._tree, model, deadline, is_wanted)
        read = partial(self._promote_and_keep, model, page, sorted(parts), asker, done)
        if self.num_free_promotions <= 0 or self.is_paused or not self._promotions.put(read):
            done(lambda: None)

    def note_use(self, model: ModelId, pages: Sequence[PageHash], parts: Collection[Part]) -> None:
        """Note in the index of files that these pages were used. They were read from memory, so the
        disk tier did not see the use."""
        if self._reads.num_waiting < MAX_WAITING:
            for part in parts:
                self._reads.put(partial(self._find, model, pages, part))

    def search(self, pages: Sequence[PageHash]) -> Search:
        """Return a finished search, because the tree lists every entry on disk already."""
        return Search(Deadline(0.0, self._clock))

    def evict(
        self, model: ModelId | None, pages: Sequence[PageHash], done: Callable[[int, int], None]
    ) -> None:
        """Evict like `CacheTree.evict`, from memory and disk, in a thread. The thread then calls
        `done` with the freed bytes of memory and of the disk. If the disk hangs, only memory is
        evicted."""
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
        """Write waiting entries, for a few seconds at most; later fetches fail. Idempotent.

        A disk that hangs longer is left as it is; the directory stays locked.
        """
        ends = Deadline.after(_MAX_CLOSE_S + GRACE_S)
        is_written = self._behind.close(_MAX_CLOSE_S)
        threads = (self._reads, self._promotions, self._orders)
        have_ended = [each.close(ends.remaining_s()) for each in threads]
        if all(have_ended) and is_written:
            self._store.close()
        else:
            log.warning("%s does not answer; it is left as it is", self._store.path)

    # Called in the writer's thread.

    def _write(self, change: Change, lease: Lease, _is_over: IsOver) -> bool:
        """Write pages to disk. A file that was begun is completed, even if the time to write is
        over."""
        with self._writes:
            return self._store.write(change, lease.views)

    # Called in a reader's thread.

    def _find(
        self, model: ModelId, pages: Sequence[PageHash], part: Part
    ) -> list[tuple[DiskFile, Span]]:
        with self._calls:
            return self._store.find(model, pages, part)

    def _fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        begun_at_s = self._clock()
        parts = sorted({part_of(step) for step in staging.steps})
        files: dict[Part, list[tuple[DiskFile, Span]]] = {}
        try:
            for part in parts:
                files[part] = self._find(model, pages, part)
                if sum(len(span) for _, span in files[part]) < len(pages):
                    raise StaleEntry(f"{len(pages)} pages of model {model} are no longer on disk")
            for step in staging.steps:
                self._read_step(step, files[part_of(step)], staging)
        except FetchError as exc:
            staging.fail(exc)
        except Exception as exc:
            log.exception("a fetch from disk failed")
            staging.fail(FetchError(f"internal error: {exc}"))
        seconds = self._clock() - begun_at_s
        self._note_speed(staging.num_landed_bytes, seconds, staging.error)
        if staging.is_complete and self._is_warm:
            # Copy the pages into memory after the waiting fetches.
            line = takewhile(self._has_room, self._line(model, pages[-1], parts))
            asker = Asker(lambda: staging.deadline.has_passed)
            self._reads.put(partial(self._promote, line, asker))

    def _line(self, model: ModelId, page: PageHash, parts: Sequence[Part]) -> Iterator[DiskFile]:
        """Yield the files of these parts from the root to `page`, KV first."""
        for part in parts:
            with self._calls:
                files = self._store.line(model, page, part)
            yield from files

    def _promote(self, line: Iterable[DiskFile], asker: Asker) -> None:
        """Read these files into memory, in order, until one fails."""
        for file in line:
            is_over = asker.is_over() or self._behind.is_over()
            if is_over or not self._promote_file(file, asker):
                return

    def _promote_file(self, file: DiskFile, asker: Asker = NO_PEER) -> bool:
        """Read a file's pages into memory. The page before them must be in memory already. Return
        False if that fails."""
        with self._behind.moves:
            is_here = self._bring(file, asker)
            if is_here:
                asker.keep(file.record.pages, file.record.part)
        return is_here

    def _bring(self, file: DiskFile, asker: Asker) -> bool:
        new = file.record.change
        reserve = partial(self._tree.reserve, new.model, new.parent, new.pages, new.part)
        while (reservation := reserve()) is None:
            if not asker.waits():
                return False
        with reservation:
            try:
                for step in reservation.steps:
                    self._read_into(reservation.views(step), file, step, reservation.skipped)
            except StaleEntry:
                return False
            with self._behind.unheard():
                reservation.commit()
        return True

    def _read_into(
        self, views: Sequence[memoryview], file: DiskFile, step: Step, page: int
    ) -> None:
        """Read the file's pages, from `page` on, into the views. Each view has room for whole
        pages."""
        for view in views:
            num_pages = view.nbytes // file.layout.step_bytes
            with self._calls:
                self._store.read(file, step, Span(page, page + num_pages), view)
            page += num_pages

    def _read_step(
        self, step: Step, sources: Sequence[tuple[DiskFile, Span]], staging: Staging
    ) -> None:
        offset = 0
        for file, span in sources:
            staging.check()
            if staging.deadline.has_passed:
                raise DeadlineExceeded("the read from disk did not end in time")
            size = file.layout.step_bytes * len(span)
            room = staging.room(step, offset, size)
            with self._calls:
                self._store.read(file, step, span, room)
            staging.land(step, size)
            offset += size

    def _warm_up(self) -> None:
        """Read the most recently used entries into free memory until it is full."""
        try:
            warmest_first = reversed(self._store.files.coldest_first())
            for file in takewhile(self._has_room, warmest_first):
                if self._behind.is_over():
                    return
                self._promote_file(file)
        finally:
            self._is_warm = True

    # Called in the thread that promotes for peers.

    def _promote_and_keep(
        self,
        model: ModelId,
        page: PageHash,
        parts: Sequence[Part],
        asker: Asker,
        done: Callable[[LetGo], object],
    ) -> None:
        try:
            line = [] if asker.is_over() else list(self._line(model, page, parts))
            if self._has_room_for(self._missing_bytes(line, asker), asker):
                self._promote(line, asker)
        finally:
            if asker.is_over():
                asker.let_go()  # The peer may be gone, and would never release the pages.
            done(asker.let_go)

    def _missing_bytes(self, line: Sequence[DiskFile], asker: Asker) -> int:
        """Return how many bytes of these files are not in memory. Lease their pages that are in
        memory for `asker`."""
        num_bytes = 0
        for file in line:
            record = file.record
            # Pages that are in memory come before pages that are not.
            num_here = bisect_left(
                record.pages,
                True,
                key=lambda page: not self._tree.has(record.model, page, record.part),
            )
            num_bytes += (len(record.pages) - num_here) * file.layout.page_bytes
            if num_here:
                asker.keep(record.pages[:num_here], record.part)
        return num_bytes

    def _has_room_for(self, num_bytes: int, asker: Asker) -> bool:
        """Return whether `num_bytes` fit into memory beside all bytes that cannot be evicted. If
        they did not, reading them would only evict other pages."""
        tree = self._tree
        while num_bytes + tree.held_bytes > tree.host_bytes:
            is_futile = num_bytes + tree.num_pinned_bytes > tree.host_bytes
            if is_futile or not asker.waits():
                return False
        return True

    # Called in a thread that evicts.

    def _evict(
        self, model: ModelId | None, pages: Sequence[PageHash], done: Callable[[int, int], None]
    ) -> None:
        """Evict from memory first, without waiting for the disk. Then evict from both, while no
        entry is copied between them. An entry that is being copied is leased in one place, and
        would come back in the other."""
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
                    log.warning("%s does not answer; nothing on it is evicted", self._store.path)
        finally:
            done(num_bytes, num_disk_bytes)

    # Called in any thread.

    def _has_room(self, file: DiskFile) -> bool:
        """Return whether a file is in memory, or fits there without an eviction."""
        record, tree = file.record, self._tree
        is_here = tree.has(record.model, record.pages[-1], record.part)
        return is_here or tree.num_bytes + file.layout.num_bytes <= tree.host_bytes


def _threads(name: str, num_threads: int, undo: ExitStack) -> WorkerThread[Callable[[], object]]:
    """Start threads that call the functions put into their queue. `undo` ends them."""
    threads = WorkerThread(name, _call_all, num_threads)
    undo.callback(threads.close, GRACE_S)
    return threads


def _call_all(calls: Iterator[Callable[[], object]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("%s failed", threading.current_thread().name)
        del call
