"""A tier of the cache in a storage backend of SGLang's HiCache, which a whole cluster can share.

    search   asks the backend which pages of a new prompt it has
    read     reads a plan's layers, in its order, into its staging
    write    writes every entry of the tree, some time after it was added

A shared store does not announce its pages. So the tier asks for the pages of each model that may
send. One question per batch of pages finds the number of leading pages without a gap. Answers
become entries of the tree, so only the new pages of a growing prompt are asked about. A page that
was absent is not asked for again for some seconds.

Each kind of work has one thread, as in SGLang: backends keep one bounce buffer for reads and one
for writes. A call that hangs blocks its thread and keeps its slots (buffers). Requests and fetches
wait for the call no longer than their deadlines. Meanwhile the `Lane` for reading or writing
refuses other calls.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from cachetree import (
    KV,
    Clock,
    Deadline,
    DeadlineExceeded,
    FetchError,
    Location,
    MakeTier,
    ModelId,
    NoteSpeed,
    PageHash,
    Part,
    Search,
    Span,
    StaleEntry,
    WorkerThread,
    WriteBehind,
    part_of,
)
from cachetree.memory import Layout, Staging
from cachetree.transport import LogLimiter
from cachetree.tree import CacheTree, Change, Lease
from sglang_droidspeak.engine.hicache import Backend
from sglang_droidspeak.hicache.lane import HICACHE, AbsentPages, Lane, Objects, Piece

log = logging.getLogger(__name__)

Count = Callable[[str, int], None]
"""Function that counts objects: it takes a result (such as `read`) and a number. Thread-safe."""

MAX_SLOTS: Final = 64
"""Largest number of objects that move in one call of the backend."""
MAX_LANE_BYTES: Final = 16 << 20
"""Largest size of the memory for the slots of one lane, in bytes."""
PART_BYTES: Final = 64 << 20
"""Size of the slices in which entries are written. Requests find a slice once it is written."""
MAX_KNOWN_PAGES: Final = 1 << 18
"""Largest number of pages of the backend that the tree lists. Beyond this number the tree drops the
coldest pages; a search may find them again."""
MAX_CLOSE_S: Final = 5.0
WAIT_S: Final = 0.1
"""Seconds that a request waits for the backend's answer. A later answer serves the next request."""
MAX_WAITING: Final = 64
"""Largest number of searches that may wait for the backend."""
ABSENT_S: Final = 10.0
"""Seconds for which an absent page is assumed to stay absent."""
BROKEN_S: Final = 60.0
"""Seconds for which an incomplete or damaged page is not read again."""


class HiCacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a tier, with counts since its start."""

    num_late_entries: int
    """Number of entries that were evicted from memory before they were written, and entries that
    the backend refused."""
    is_reading_paused: bool
    is_writing_paused: bool


class HiCacheTier:
    """Store entries of `tree` in a backend, and add the backend's pages to `tree`."""

    location: Final[Location] = HICACHE
    num_readers: Final = 1

    def __init__(
        self,
        tree: CacheTree,
        backend: Backend,
        senders: Mapping[ModelId, Collection[int]],
        note_speed: NoteSpeed,
        count: Count,
        clock: Clock = time.monotonic,
    ) -> None:
        """`senders` has each model that may be read, with the layers at which its E is needed.
        `count` counts objects as `read`, `written`, `missing`, `damaged` or `failed`."""
        self._tree = tree
        self._backend = backend
        self._senders = senders
        self._note_speed = note_speed
        self._count = count
        self._clock = clock
        self._objects: Final = Objects(tree.family)
        slots = range(len(backend.slots))
        half = len(slots) // 2
        self._reading = Lane("reading", backend, self._objects, slots[:half], clock)
        self._writing = Lane("writing", backend, self._objects, slots[half:], clock)
        self._absent = AbsentPages(clock)
        self._lost_pages: list[tuple[ModelId, Sequence[PageHash], Part]] = []
        """Pages that the reading thread will remove from the tree."""
        self._lines = LogLimiter(clock)
        self._is_closed = False
        tree.remote.limit(HICACHE, MAX_KNOWN_PAGES)
        self._searches: WorkerThread[tuple[Sequence[PageHash], Search]] = WorkerThread(
            "hicache-search", self._search_all, fail=lambda it, _: it[1].end()
        )
        self._fetches: WorkerThread[tuple[ModelId, Sequence[PageHash], Staging]] = WorkerThread(
            "hicache-read", self._read_all, fail=self._fail_fetch
        )
        self._behind = WriteBehind(
            tree, HICACHE, "hicache-write", self._write, clock, self._num_at_once
        )

    @property
    def is_paused(self) -> bool:
        return self._reading.is_paused

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        if self.is_paused or not self._fetches.put((model, pages, staging)):
            staging.fail(FetchError("the HiCache backend is paused or closed"))

    def _fail_fetch(
        self, fetch: tuple[ModelId, Sequence[PageHash], Staging], error: Exception
    ) -> None:
        """Fail a fetch after the reading thread has failed. A few such fetches pause the tier."""
        self._reading.fail(error)
        fetch[2].fail(FetchError(f"this side's reader has failed: {error!r}"))

    def note_use(self, model: ModelId, pages: Sequence[PageHash], parts: Collection[Part]) -> None:
        """Do nothing: the backend itself tracks which pages are used, and cannot be told."""

    def search(self, pages: Sequence[PageHash]) -> Search:
        search = Search(Deadline.after(WAIT_S, self._clock))
        is_futile = self.is_paused or self._searches.num_waiting >= MAX_WAITING
        if is_futile or not self._has_more(pages):
            search.end()
        else:
            self._searches.put((pages, search))
        return search

    def status(self) -> HiCacheStatus:
        return HiCacheStatus(
            num_late_entries=self._behind.num_late,
            is_reading_paused=self.is_paused,
            is_writing_paused=self._writing.is_paused,
        )

    def close(self) -> None:
        """Write waiting entries for at most `MAX_CLOSE_S`, and stop. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = Deadline.after(MAX_CLOSE_S)
        threads = (self._searches, self._fetches, self._behind)
        have_ended = [thread.close(deadline.remaining_s()) for thread in threads]
        if all(have_ended):
            with contextlib.suppress(Exception):
                self._backend.close()
        else:
            log.warning("a call of the HiCache backend does not return; its thread is left running")

    def _has_more(self, pages: Sequence[PageHash]) -> bool:
        """Whether the backend may have pages, or E of pages, that the tree does not list yet."""
        shown = {it.model: it for it in self._tree.match(pages) if it.location == HICACHE}
        for model, layers in dict(self._senders).items():  # An update adds a model.
            known = shown.get(model)
            num_kv = known.num_pages if known else 0
            limits = [(KV, num_kv, len(pages))]
            if known:
                limits += [(Part(it), known.e_pages.get(it, 0), num_kv) for it in layers]
            for part, num, stop in limits:
                if num < stop and not self._absent.has(model, part, pages[num]):
                    return True
        return False

    # In the thread that searches.

    def _search_all(self, questions: Iterator[tuple[Sequence[PageHash], Search]]) -> None:
        lane = self._reading
        for pages, search in questions:
            try:
                if not search.is_over and not lane.is_paused:
                    lane.longest_answer_s = 0.0
                    self._find(pages)
                    if lane.longest_answer_s > WAIT_S:
                        lane.fail(f"an answer took longer than {WAIT_S:g} s")
                    else:
                        lane.succeed()
            except Exception as exc:  # noqa: BLE001  # The lane counts and logs it.
                lane.fail(repr(exc))
            finally:
                search.end()

    def _find(self, pages: Sequence[PageHash]) -> None:
        for model, layers in dict(self._senders).items():  # An update adds a model.
            num_kv = self._ask(model, KV, pages)
            for layer in layers:
                self._ask(model, Part(layer), pages[:num_kv])

    def _ask(self, model: ModelId, part: Part, pages: Sequence[PageHash]) -> int:
        """Ask how many of `pages`, the first pages of a prompt, the backend has as this part of
        the model. Add them to the tree, and return their number."""
        start = self._tree.remote.reach(HICACHE, model, pages, part)
        new = pages[start:]
        if not new or self._absent.has(model, part, new[0]):
            return start
        num_new, steps = len(new), self._objects.steps(part)
        for marker in dict.fromkeys((steps[0], steps[-1])):
            num_new = self._reading.num_leading(model, new[:num_new], marker)
        if num_new < len(new):
            self._absent.add(model, part, new[num_new], ABSENT_S)
        parent = pages[start - 1] if start else None
        self._tree.remote.add(HICACHE, model, parent, new[:num_new], part)
        return start + num_new

    # In the thread that reads.

    def _read_all(self, fetches: Iterator[tuple[ModelId, Sequence[PageHash], Staging]]) -> None:
        lane = self._reading
        for model, pages, staging in fetches:
            begun_at_s, num_read_bytes = self._clock(), 0
            try:
                for num_bytes in self._read(model, pages, staging):
                    num_read_bytes += num_bytes
                lane.succeed()
            except FetchError as exc:
                staging.fail(exc)
            except Exception as exc:  # noqa: BLE001  # The lane counts and logs it.
                lane.fail(repr(exc))
                self._count("failed", 1)
                for part in {part_of(step) for step in staging.steps}:
                    self._lose(model, pages, part, ABSENT_S)
                staging.fail(FetchError(f"the HiCache backend failed: {exc!r}"))
            self._note_speed(num_read_bytes, self._clock() - begun_at_s, staging.error)
            del staging
            while self._lost_pages:  # This may take long. The failed fetch does not wait for it.
                self._tree.remote.drop_in_slices(HICACHE, *self._lost_pages.pop())

    def _read(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> Iterator[int]:
        """Read all batches into the staging, and yield the number of bytes of each. Stop if the
        fetch is given up meanwhile. Raises FetchError."""
        lane = self._reading
        for batch in lane.batches(model, pages, staging.steps):
            staging.check()
            if staging.deadline.has_passed:
                raise DeadlineExceeded("the HiCache backend was not fast enough")
            try:
                outcomes = lane.read(batch)
            except Exception as exc:
                raise self._lost(model, pages, self._culprit(batch, exc), "damaged") from exc
            yield sum(self._objects.page_bytes(it.step) for it, is_there in outcomes if is_there)
            for piece, is_there in outcomes:
                payload = piece.opened() if is_there else None
                if payload is None:
                    raise self._lost(model, pages, piece, "damaged" if is_there else "missing")
                staging.write(piece.step, piece.page * payload.nbytes, payload)
            self._count("read", len(batch))

    def _culprit(self, batch: Sequence[Piece], error: Exception) -> Piece:
        """Return the object that makes a read fail. If no single object does, the backend has
        failed: raise `error`."""
        culprit, is_well = None, False
        for piece in batch:
            try:
                self._reading.read([piece])
                is_well = True
            except Exception:  # noqa: BLE001  # The batch's error is reported.
                if culprit is not None:
                    break
                culprit = piece
            if culprit is not None and is_well:
                return culprit
        raise error

    def _lose(self, model: ModelId, pages: Sequence[PageHash], part: Part, seconds: float) -> None:
        """Remove these pages from the tree, later. Do not ask for the first one for `seconds`."""
        self._absent.add(model, part, pages[0], seconds)
        self._lost_pages.append((model, pages, part))

    def _lost(
        self, model: ModelId, pages: Sequence[PageHash], piece: Piece, why: str
    ) -> StaleEntry:
        """Count an object as `damaged` or `missing`, and return the error to raise."""
        self._count(why, 1)
        if why == "damaged" and self._lines.may(why):
            log.warning(
                "object %s of the HiCache backend is damaged or not ours; others that are found "
                "within %.0f s are counted and not logged",
                piece.key,
                LogLimiter.EVERY_S,
            )
        self._lose(model, pages[piece.page :], part_of(piece.step), BROKEN_S)
        return StaleEntry(f"{piece.key} is {why}")

    # In the thread that writes.

    def _num_at_once(self, change: Change) -> int:
        """Return how many of an entry's pages fill `PART_BYTES`."""
        layout = Layout.of(self._tree.family, 1, change.part)
        return max(1, PART_BYTES // layout.page_bytes)

    def _write(self, change: Change, lease: Lease, is_over: Callable[[], bool]) -> bool:
        """Write an entry. Return whether all of it is in the backend."""
        lane, is_there = self._writing, False
        if lane.is_paused:
            return False
        try:
            if not self._write_steps(change, lease, is_over):
                return False
            is_there = True
            new = change.model, change.parent, change.pages, change.part
            self._tree.remote.add(HICACHE, *new)
        except Exception as exc:  # The lane counts and logs the error.
            if isinstance(exc, StaleEntry) and not lease.is_over:
                raise  # The entry was evicted. If its lease ended first, the backend is too slow.
            if not is_there:  # The next search finds a written entry.
                self._count("failed", 1)
            lane.fail(repr(exc))
            return is_there
        lane.succeed()
        return True

    def _write_steps(self, change: Change, lease: Lease, is_over: Callable[[], bool]) -> bool:
        """Write all transfer steps of the pages that the backend lacks. A leading page counts as
        written if the backend has its first and last step. Return False if `is_over` stops the
        write or the backend refuses a batch."""
        lane, model, pages = self._writing, change.model, change.pages
        start, steps = len(pages), self._objects.steps(change.part)
        for step in dict.fromkeys((steps[0], steps[-1])):
            start = lane.num_leading(model, pages[:start], step)
        for batch in lane.batches(model, pages[start:], steps):
            if is_over():
                return False
            for piece in batch:
                page = start + piece.page
                (payload,) = lease.views(piece.step, Span(page, page + 1))
                piece.seal(payload.cast("B"))
            is_taken = lane.write(batch)
            self._count("written" if is_taken else "failed", len(batch))
            if not is_taken:
                lane.fail("it does not take what is written")
                return False
        return True


def hicache_tier(
    name: str, config: Mapping[str, Any], senders: Mapping[ModelId, Collection[int]], count: Count
) -> MakeTier:
    """Return a function with which a Cache makes the tier. This function raises ConfigError."""

    def make(tree: CacheTree, note_speed: NoteSpeed) -> HiCacheTier:
        slot_bytes = Objects(tree.family).slot_bytes
        backend = Backend(
            name,
            config,
            tp_rank=tree.family.tp_rank,
            tp_size=tree.family.tp_size,
            slot_bytes=slot_bytes,
            num_slots=2 * max(1, min(MAX_SLOTS, MAX_LANE_BYTES // slot_bytes)),
        )
        return HiCacheTier(tree, backend, senders, note_speed, count)

    return make
