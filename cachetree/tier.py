"""Tiers: places besides memory that keep a cache's entries, such as a disk or a cluster's storage.

Here are the interface of a tier, and classes from which to build one: threads that take work from a
queue, and a writer that stores new entries of a tree in the background.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf
from queue import SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from cachetree.clock import Clock, Deadline
from cachetree.errors import FetchError, StaleEntry
from cachetree.ids import KV, Location, ModelId, PageHash, Part
from cachetree.memory import Layout, Staging
from cachetree.tree import CacheTree, Change, EntryKey, Lease

log = logging.getLogger(__name__)

T = TypeVar("T")

_NICENESS: Final = 10
MAX_WAITING: Final = 4096
"""Largest number of entries that wait to be written. A waiting entry keeps its page hashes in
memory, not its pages."""
_MAX_WRITE_S: Final = 60.0
GRACE_S: Final = 1.0
"""Seconds that a running call may take beyond the time limit of `close`."""

STALL_S: Final = 2.0
"""Seconds after which a call that has not returned counts as hanging."""

NoteSpeed = Callable[[int, float, FetchError | None], None]
"""Function that is called for each fetch that has ended: with the bytes read, the seconds taken,
and the error that ended the fetch early."""


class Search:
    """A running search of a tier for pages of a prompt. It is over once its results are in the
    tree, or at its deadline."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline: Final = deadline
        self._answered = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether requests can stop waiting for the search."""
        return self._answered.is_set() or self.deadline.has_passed

    def end(self) -> None:
        """End the search, because the tier has answered. Thread-safe."""
        self._answered.set()


class Tier(Protocol):
    """Interface of a place that keeps entries, and lists them in the tree under its location.

    A tier subscribes to the tree's new entries. `fetch`, `note_use` and `search` return at once and
    raise nothing; any problem counts as a miss.
    """

    @property
    def location(self) -> Location:
        """Location of the tier's entries, in the tree and in plans. It never changes."""

    @property
    def num_readers(self) -> int:
        """Number of fetches that the tier reads at once. Further fetches wait for their turn."""

    @property
    def is_paused(self) -> bool:
        """Whether the tier cannot be read now. `match` then leaves its entries out. Thread-safe."""

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        """Read pages into `staging`, in a thread of the tier. A problem fails `staging`."""

    def note_use(self, model: ModelId, pages: Sequence[PageHash], parts: Collection[Part]) -> None:
        """Note in the tier that these pages were used. Call it when they were read from memory,
        where the tier cannot see the use."""

    def search(self, pages: Sequence[PageHash]) -> Search:
        """Find the pages of a prompt that the tier has, and list them in the tree. The search is
        over at once if the tree lists them already."""

    def status(self) -> msgspec.Struct:
        """Return the tier's state in numbers, for operators. Thread-safe."""

    def close(self) -> None:
        """End the tier. Idempotent. Takes a few seconds at most."""


MakeTier = Callable[[CacheTree, NoteSpeed], Tier]
"""Function that makes a tier. Raises ConfigError if the tier cannot work."""


def lower_priority() -> None:
    """Give the calling thread a low priority, on systems with a priority for each thread.

    When the thread wakes, it does not interrupt a computing thread either (`SCHED_BATCH`).
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


def _ignore(_item: object, _error: Exception) -> None:
    """Default of `WorkerThread.fail`: do nothing, because no thread waits for the item."""


class WorkerThread(Generic[T]):
    """Daemon threads, one or several, that take items from a queue in order. Use them for calls
    that may hang: the end of the process does not wait for these threads."""

    def __init__(
        self,
        name: str,
        take: Callable[[Iterator[T]], None],
        num_threads: int = 1,
        fail: Callable[[T, Exception], None] = _ignore,
    ) -> None:
        """Each thread calls `take` with an iterator of the items that it gets. If `take` raises,
        the thread gives the current item and all later ones to `fail`, which must not raise."""
        self._name: Final = name
        self._take: Final = take
        self._fail: Final = fail
        self._waiting: SimpleQueue[T | None] = SimpleQueue()
        self._putting = threading.Lock()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            for _ in self._threads:
                self._waiting.put(None)
            raise

    @property
    def num_waiting(self) -> int:
        """Number of items in the queue that no thread has taken yet."""
        return self._waiting.qsize()

    def put(self, item: T) -> bool:
        """Add an item. Return False if the queue is closed."""
        with self._putting:
            if not self._is_closed:
                self._waiting.put(item)
            return not self._is_closed

    def close(self, timeout_s: float) -> bool:
        """Refuse further items, and wait until all items are done. Return False if a thread still
        runs after `timeout_s` seconds; it continues to run."""
        with self._putting:
            self._is_closed = True
            for _ in self._threads:
                self._waiting.put(None)
        deadline = Deadline.after(timeout_s)
        for thread in self._threads:
            thread.join(deadline.remaining_s())
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        under_way: list[T] = []

        def items() -> Iterator[T]:
            for item in iter(self._waiting.get, None):
                under_way.append(item)
                del item  # Else this variable would keep the item alive until the next one.
                yield under_way[0]
                under_way.clear()

        try:
            self._take(items())
        except Exception as exc:
            log.exception("thread %s fails all it takes from now on: %r", self._name, exc)
            error = exc.with_traceback(None)
            while under_way:
                self._fail(under_way.pop(), error)
            for item in iter(self._waiting.get, None):
                self._fail(item, error)
                del item


class Calls:
    """Running calls to a disk or a storage, to see whether one hangs. Enter this object (`with`)
    around each call. Thread-safe."""

    def __init__(self, clock: Clock, stall_s: float) -> None:
        self._clock: Final = clock
        self._stall_s: Final = stall_s
        self._lock = threading.Lock()
        self._begun_at_s: dict[int, float] = {}
        """Start of each running call. Keys are the ids of the calls' threads."""

    def __enter__(self) -> None:
        with self._lock:
            self._begun_at_s[threading.get_ident()] = self._clock()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            del self._begun_at_s[threading.get_ident()]

    @property
    def have_stalled(self) -> bool:
        """Whether the oldest running call has taken longer than `stall_s`."""
        now_s = self._clock()
        with self._lock:
            return now_s - min(self._begun_at_s.values(), default=now_s) > self._stall_s


class MoveBarrier:
    """Barrier around moves: copies of entries between memory and a tier. Threads enter it (`with`)
    for each move; several may be inside at once."""

    def __init__(self) -> None:
        self._may_begin = threading.Lock()
        self._changed = threading.Condition()
        self._num_under_way = 0

    def __enter__(self) -> None:
        with self._may_begin, self._changed:
            self._num_under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._num_under_way -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def stopped(self, timeout_s: float) -> Iterator[bool]:
        """Wait until running moves have ended, and let no move start inside the `with` block.
        Yields False if a move has not ended in time, or another thread is inside `stopped`."""
        deadline = Deadline.after(timeout_s)
        if not self._may_begin.acquire(timeout=timeout_s):
            yield False
            return
        try:
            with self._changed:
                have_ended = self._changed.wait_for(
                    lambda: not self._num_under_way, deadline.remaining_s()
                )
            yield have_ended
        finally:
            self._may_begin.release()


IsOver = Callable[[], bool]
"""Function that returns True once no further write may start: the time to close is over."""

Write = Callable[[Change, Lease, IsOver], bool]
"""Function that writes pages of an entry, and returns whether all were written in time.

The writer thread calls it. The thread that has added the entry to the tree may still be in that
call. Raises StaleEntry if the lease of the pages ends before they are written.
"""


class Unwritten:
    """Entries that wait to be written to a tier, or are being written. Thread-safe.

    Memory evicts the least recently used entries, and may evict these before their turn if they
    take more than `max_bytes`. A thread that adds copies of a peer's entries asks for room first.
    """

    def __init__(self, max_bytes: float = inf) -> None:
        """Without `max_bytes`, there is always room: no tier writes the entries."""
        self._max_bytes: Final = max_bytes
        self._sizes: dict[EntryKey, float] = {}

    def __contains__(self, key: EntryKey) -> bool:
        return key in self._sizes

    def add(self, key: EntryKey, num_bytes: int) -> None:
        # Small entries count as larger ones, because only MAX_WAITING entries can wait.
        self._sizes[key] = max(num_bytes, self._max_bytes / MAX_WAITING)

    def discard(self, key: EntryKey) -> None:
        self._sizes.pop(key, None)

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Return whether entries of these sizes may be added. If none waits, one always may."""
        waiting = [*self._sizes.copy().values(), *sizes]  # Other threads change `_sizes`.
        return len(waiting) == 1 or sum(waiting) <= self._max_bytes


class WriteBehind:
    """Write every entry that is added to a tree to a tier, in a background thread.

    An entry is leased while it is written. It counts as late, and is not written, if it is evicted
    before its turn, or if too many entries wait when it is added.
    """

    def __init__(
        self,
        tree: CacheTree,
        location: Location,
        name: str,
        write: Write,
        clock: Clock,
        num_at_once: Callable[[Change], int],
    ) -> None:
        """Start the thread. `write` stores pages at `location`, as many at once as `num_at_once`
        returns for an entry. Exceptions of `write` are logged."""
        self.num_late = 0
        self.moves: Final = MoveBarrier()
        """Barrier that the writer thread enters for each lease of pages and its call of `write`."""
        self.unwritten: Final = Unwritten(tree.host_bytes / 2)  # Pins may take the other half.
        self._unheard: set[int] = set()
        self._closes_at_s = inf
        self._tree: Final = tree
        self._location: Final = location
        self._name: Final = name
        self._write: Final = write
        self._num_at_once: Final = num_at_once
        self._clock: Final = clock
        self._thread: WorkerThread[Change] = WorkerThread(name, self._write_all, fail=self._lose)
        present, self._unsubscribe = tree.subscribe(self._note)
        for change in present:
            self._note(change)

    def close(self, timeout_s: float) -> bool:
        """Write waiting entries for at most `timeout_s` seconds, then end the thread. Return False
        if the thread still runs `GRACE_S` later. Idempotent."""
        self._unsubscribe()
        self._closes_at_s = min(self._closes_at_s, self._clock() + timeout_s)
        return self._thread.close(timeout_s + GRACE_S)

    def is_over(self) -> bool:
        """Return whether the time of `close` is over. Thread-safe."""
        return self._clock() >= self._closes_at_s

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Do not write the entries that this thread adds inside the `with` block, because the tier
        has them already."""
        self._unheard.add(threading.get_ident())
        try:
            yield
        finally:
            self._unheard.discard(threading.get_ident())

    def _note(self, change: Change) -> None:
        """Queue an entry to be written. The tree calls this with its lock held."""
        if not change.added or threading.get_ident() in self._unheard:
            return
        num_bytes = Layout.of(self._tree.family, len(change.pages), change.part).num_bytes
        self.unwritten.add(change.key, num_bytes)  # Before `put`: the thread discards it.
        if self._thread.num_waiting >= MAX_WAITING or not self._thread.put(change):
            self._lose(change)

    def _lose(self, change: Change, _error: Exception | None = None) -> None:
        self.num_late += 1
        self.unwritten.discard(change.key)

    def _write_all(self, changes: Iterator[Change]) -> None:
        lower_priority()
        for change in changes:
            try:
                is_late = not self._is_written(change)
                self.num_late += is_late  # No call here: another thread could add meanwhile.
            except Exception:
                log.exception("%s: an entry was not written", self._name)
            self.unwritten.discard(change.key)

    def _is_written(self, change: Change) -> bool:
        """Write an entry. First write its parents that the tier lacks, because an entry without its
        parents is never found. Return whether all were written."""
        tree, model, part, parent = self._tree, change.model, change.part, change.parent
        line = [change]
        if parent is not None and not tree.remote.has(self._location, model, parent, part):
            line = [*tree.line(model, parent, part), change]
        if part != KV and not tree.remote.has(self._location, model, change.pages[-1]):
            line = [*tree.line(model, change.pages[-1]), *line]
        pieces = (piece for each in line for piece in each.slices(self._num_at_once(each)))
        return all(map(self._is_piece_written, pieces))

    def _is_piece_written(self, piece: Change) -> bool:
        if self.is_over():
            return False
        with self.moves:
            deadline = Deadline.after(_MAX_WRITE_S, self._clock)
            lease = self._tree.lease(
                piece.model, piece.pages, self._name, deadline, [piece.part], is_use=False
            )
            if lease is None:
                return False
            with lease, contextlib.suppress(StaleEntry):
                return self._write(piece, lease, self.is_over)
        return False
