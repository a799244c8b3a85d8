"""A tier over a HiCache storage backend: what a server holds is stored where its cluster stores.

Who calls the backend, the last two with slots of memory of their own:

    searcher   which pages of a prompt are there
    reader     a plan's layers, in its order, into its staging
    writer     every entry that comes into the tree, behind it

One thread each, as in SGLang: backends keep one bounce buffer for reads and one for writes. A call
that hangs holds up its thread, never a request: those have deadlines of their own, and a `Guard`
for reading and one for writing keep everybody else away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import msgspec

from cachetree.clock import Clock, Deadline
from cachetree.entries import Change
from cachetree.errors import DeadlineExceeded, FetchError, StaleEntry
from cachetree.ids import Location, ModelId, PageHash, Span
from cachetree.lease import Lease
from cachetree.plan import Kind, Step
from cachetree.staging import Staging
from cachetree.tier import NoteSpeed, Search
from cachetree.tree import CacheTree
from sglang_droidspeak.hicache.guard import Guard
from sglang_droidspeak.hicache.objects import MARKER, Objects
from sglang_droidspeak.hicache.search import Searcher

log = logging.getLogger(__name__)

HICACHE: Final = Location("hicache")

MAX_SLOTS: Final = 64
"""Objects that move in one call of the backend."""
MAX_LANE_BYTES: Final = 16 << 20
"""Memory for them, of the reader and of the writer."""
MAX_WAITING: Final = 4096
"""Entries that wait to be written; they hold page hashes, no pages."""
MAX_KNOWN_PAGES: Final = 1 << 18
"""Pages that the tree shows of the backend; past them it forgets, and finds out anew."""
DAMAGED_S: Final = 600.0
"""How long a damaged page is left alone: only the backend can remove it."""
_MAX_WRITE_S: Final = 60.0
_MAX_CLOSE_S: Final = 5.0
_QUIET_S: Final = 60.0
"""Between two lines of the log on damage."""
_NICENESS: Final = 10
"""Of the writer's thread: whoever computes comes first."""

Count = Callable[[str, int], None]
"""Takes a result and how many objects had it."""


class ObjectBackend(Protocol):
    """What the tier needs of a backend; every call may hang or raise anything."""

    @property
    def slots(self) -> Sequence[memoryview]: ...

    def num_leading(self, keys: Sequence[str]) -> int: ...

    def read(
        self, keys: Sequence[str], slots: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[bool]: ...

    def write(self, keys: Sequence[str], slots: Sequence[int], sizes: Sequence[int]) -> bool: ...

    def close(self) -> None: ...


class HiCacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A tier in numbers, since its start."""

    objects: dict[str, int]
    """By result: read, written, missing, damaged, failed."""
    num_late_entries: int
    """Evicted from memory, or refused by the backend, before they were written."""
    is_reading_paused: bool
    is_writing_paused: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """One object of a fetch or of an entry."""

    page: int
    step: Step
    key: str


class HiCacheTier:
    """Keeps what comes into `tree` in a backend, and shows the tree what is there."""

    location: Final[Location] = HICACHE

    def __init__(
        self,
        tree: CacheTree,
        backend: ObjectBackend,
        senders: Mapping[ModelId, Collection[int]],
        note_speed: NoteSpeed,
        *,
        count: Count = lambda _result, _num: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`senders` are whose entries may be read, and the layers whose E is wanted of each."""
        self._tree = tree
        self._backend = backend
        self._objects = Objects(tree.family)
        self._note_speed = note_speed
        self._count_outside = count
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._num_late = 0
        self._num_known = 0
        self._quiet_until_s = 0.0
        self._closes_at_s = float("inf")
        self._reading = Guard("reading", clock)
        self._writing = Guard("writing", clock)
        self._searcher = Searcher(
            tree, HICACHE, senders, self._num_leading, self._show, self._reading, clock
        )
        self._fetches: queue.SimpleQueue[tuple[ModelId, Sequence[PageHash], Staging] | None]
        self._fetches = queue.SimpleQueue()
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        half = len(backend.slots) // 2
        self._threads = [
            threading.Thread(
                target=self._read_for_ever, args=(range(half),), name="hicache-read", daemon=True
            ),
            threading.Thread(
                target=self._write_for_ever,
                args=(range(half, 2 * half),),
                name="hicache-write",
                daemon=True,
            ),
        ]
        there, self._unsubscribe = tree.subscribe(self._enqueue)
        for change in there:
            self._enqueue(change)
        for thread in self._threads:
            thread.start()

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        if self._reading.is_open or self._clock() >= self._closes_at_s:
            staging.fail(FetchError("the HiCache backend is paused or closed"))
        else:
            self._fetches.put((model, pages, staging))

    def note_use(self, model: ModelId, pages: Sequence[PageHash]) -> None:
        """The backend has a recency of its own, and no call to change it."""

    def search(self, pages: Sequence[PageHash]) -> Search:
        return self._searcher.search(pages)

    def status(self) -> HiCacheStatus:
        return HiCacheStatus(
            objects=dict(self._counts),
            num_late_entries=self._num_late,
            is_reading_paused=self._reading.is_open,
            is_writing_paused=self._writing.is_open,
        )

    def close(self) -> None:
        """Write what waits, for a few seconds at most. Idempotent."""
        if self._closes_at_s < float("inf"):
            return
        self._unsubscribe()
        self._closes_at_s = self._clock() + _MAX_CLOSE_S
        deadline = Deadline.after(_MAX_CLOSE_S)
        self._changes.put(None)
        self._fetches.put(None)
        has_ended = self._searcher.close(deadline.remaining_s())
        for thread in self._threads:
            thread.join(deadline.remaining_s())
            has_ended &= not thread.is_alive()
        if has_ended:
            with contextlib.suppress(Exception):
                self._backend.close()
        else:
            log.warning("the HiCache backend does not return; it is left as it is")

    # In any thread.

    def _num_leading(self, model: ModelId, pages: Sequence[PageHash], step: Step) -> int:
        num = self._backend.num_leading([self._objects.key(model, it, step) for it in pages])
        return max(0, min(num, len(pages)))

    def _show(
        self,
        model: ModelId,
        parent: PageHash | None,
        pages: Sequence[PageHash],
        e_layers: Collection[int],
    ) -> None:
        with self._lock:
            self._num_known += len(pages)
            is_too_much = self._num_known > MAX_KNOWN_PAGES
            if is_too_much:
                self._num_known = len(pages)
        if is_too_much:
            self._tree.forget(HICACHE)
        self._tree.add_remote(HICACHE, model, parent, pages, e_layers)

    def _count(self, result: str, num: int = 1) -> None:
        with self._lock:
            self._counts[result] += num
        self._count_outside(result, num)

    def _batches(
        self, model: ModelId, pages: Sequence[PageHash], steps: Sequence[Step], most: int
    ) -> Iterator[list[_Piece]]:
        pieces = (
            _Piece(index, step, self._objects.key(model, page, step))
            for step in steps
            for index, page in enumerate(pages)
        )
        while batch := list(islice(pieces, most)):
            yield batch

    # In the reader's thread.

    def _read_for_ever(self, lane: range) -> None:
        while (item := self._fetches.get()) is not None:
            model, pages, staging = item
            begun_at_s = self._clock()
            try:
                self._read(model, pages, staging, lane)
                self._reading.succeed()
                self._note_speed(staging.num_bytes, self._clock() - begun_at_s)
            except FetchError as exc:
                staging.fail(exc)
            except Exception as exc:  # noqa: BLE001  # The guard counts it, and says so.
                self._reading.fail(repr(exc))
                self._count("failed")
                self._lose(model, pages)
                staging.fail(FetchError(f"the HiCache backend failed: {exc!r}"))
            del item, staging

    def _read(
        self, model: ModelId, pages: Sequence[PageHash], staging: Staging, lane: range
    ) -> None:
        for batch in self._batches(model, pages, staging.steps, len(lane)):
            if staging.error is not None:
                raise staging.error
            if staging.deadline.has_passed:
                raise DeadlineExceeded("the HiCache backend was not fast enough")
            try:
                found = self._fill(batch, lane)
            except Exception as exc:
                raise self._damaged(self._culprit(batch, lane, exc), model, pages) from exc
            if len(found) != len(batch):
                found = [False] * len(batch)
            for piece, slot, is_there in zip(batch, lane, found, strict=False):
                if not is_there:
                    self._count("missing")
                    self._lose(model, pages[piece.page :])
                    raise StaleEntry(f"{piece.key} is no longer in the HiCache backend")
                payload = self._objects.open(piece.key, piece.step, self._backend.slots[slot])
                if payload is None:
                    raise self._damaged(piece, model, pages)
                staging.write(piece.step, piece.page * payload.nbytes, payload)
            self._count("read", len(batch))

    def _fill(self, batch: Sequence[_Piece], lane: range) -> Sequence[bool]:
        """Read objects into slots of the lane."""
        sizes = [self._objects.size(piece.step) for piece in batch]
        with self._reading.call():
            return self._backend.read([it.key for it in batch], lane[: len(batch)], sizes)

    def _culprit(self, batch: Sequence[_Piece], lane: range, error: Exception) -> _Piece:
        """The one object for which a batch failed; raises `error` where the backend does."""
        culprit, is_well = None, False
        for piece in batch:
            try:
                self._fill([piece], lane)
                is_well = True
            except Exception:  # noqa: BLE001  # The batch's is reported.
                if culprit is not None:
                    break
                culprit = piece
            if culprit is not None and is_well:
                return culprit
        raise error

    def _damaged(self, piece: _Piece, model: ModelId, pages: Sequence[PageHash]) -> StaleEntry:
        self._count("damaged")
        self._lose(model, pages[piece.page :], DAMAGED_S)
        with self._lock:
            is_quiet = self._clock() < self._quiet_until_s
            if not is_quiet:
                self._quiet_until_s = self._clock() + _QUIET_S
        if not is_quiet:
            log.warning(
                "%s in the HiCache backend is damaged or foreign; the next ones within %.0f s are "
                "only counted",
                piece.key,
                _QUIET_S,
            )
        return StaleEntry(f"{piece.key} is damaged or foreign")

    def _lose(self, model: ModelId, pages: Sequence[PageHash], *seconds: float) -> None:
        self._searcher.absent.add(model, pages[0], *seconds)
        self._tree.drop_remote(HICACHE, model, pages)

    # In the writer's thread, but for the first, which is called under the tree's lock.

    def _enqueue(self, change: Change) -> None:
        if not change.added:
            return
        if self._changes.qsize() < MAX_WAITING and not self._writing.is_open:
            self._changes.put(change)
        else:
            self._num_late += 1

    def _write_for_ever(self, lane: range) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (change := self._changes.get()) is not None:
            try:
                is_written = self._clock() < self._closes_at_s and self._write(change, lane)
                self._num_late += not is_written
            except Exception as exc:  # noqa: BLE001  # The guard counts it, and says so.
                self._count("failed")
                self._writing.fail(repr(exc))

    def _write(self, change: Change, lane: range) -> bool:
        """Whether all of the entry is in the backend."""
        if self._writing.is_open:
            return False
        model, pages = change.model, change.pages
        deadline = Deadline.after(_MAX_WRITE_S, self._clock)
        lease = self._tree.lease(model, pages, "the HiCache writer", deadline)
        if lease is None:
            return False
        layers = range(self._tree.family.num_layers)
        e_steps = [Step(Kind.E, layer) for layer in change.e_layers]
        kv_steps = [Step(Kind.KV, layer) for layer in reversed(layers)]
        assert kv_steps[-1] == MARKER
        with lease:
            is_whole = all(
                self._write_steps(lease, model, pages, steps, lane)
                for steps in (*([it] for it in e_steps), kv_steps)
            )
        if is_whole:
            self._writing.succeed()
            self._show(model, change.parent, pages, change.e_layers)
        return is_whole

    def _write_steps(
        self,
        lease: Lease,
        model: ModelId,
        pages: Sequence[PageHash],
        steps: Sequence[Step],
        lane: range,
    ) -> bool:
        """Write of each step what others have not; the last of `steps` says how much that is."""
        with self._writing.call():
            start = self._num_leading(model, pages, steps[-1])
        for batch in self._batches(model, pages[start:], steps, len(lane)):
            if self._clock() >= self._closes_at_s:
                return False
            slots = list(lane[: len(batch)])
            for piece, slot in zip(batch, slots, strict=True):
                payload = _leased(lease, piece.step, start + piece.page)
                self._objects.seal(piece.key, piece.step, payload, self._backend.slots[slot])
            sizes = [self._objects.size(piece.step) for piece in batch]
            with self._writing.call():
                is_taken = self._backend.write([it.key for it in batch], slots, sizes)
            self._count("written" if is_taken else "failed", len(batch))
            if not is_taken:
                self._writing.fail("it does not take what is written")
                return False
        return True


def num_slots(objects: Objects) -> int:
    """Of a backend for a tier."""
    return 2 * max(1, min(MAX_SLOTS, MAX_LANE_BYTES // objects.slot_bytes))


def _leased(lease: Lease, step: Step, page: int) -> memoryview:
    span = Span(page, page + 1)
    (view,) = lease.kv(step.layer, span) if step.kind is Kind.KV else lease.e(step.layer, span)
    return view.cast("B")
