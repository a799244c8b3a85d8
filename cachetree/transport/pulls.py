"""Keep copies of peers' entries: fetch each entry that a peer advertises, parents first.

    hear      an advert names entries; they wait, oldest first
    turn      takes the oldest one, and its parents that are missing here:
              tree.remote       says that the peer still has it
              tree.reserve      makes room here for the pages that are new
              pending_fetches   fetches into that room, like any fetch
              commit            makes the pages readable here, and advertises them

A parent is the entry with the pages before. A snapshot (the list of all the peer's entries) also
names old entries. Entries that this cache has evicted are not copied again from a snapshot, only
from a later advert. A copy never makes the peer read its disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator
from itertools import chain
from math import inf
from typing import Final

import msgspec

from cachetree.clock import Clock, Deadline
from cachetree.errors import FetchError, StaleEntry, printable
from cachetree.ids import DISK, KV, PAGE_HASH_BYTES, Location, ModelId, PageHash, Part, Span
from cachetree.memory import Layout, NoRoom, Staging
from cachetree.tier import Unwritten
from cachetree.transport.advertise import Advert
from cachetree.transport.backoff import Backoff, LogLimiter
from cachetree.transport.frames import MAX_MESSAGE_BYTES
from cachetree.transport.pace import Cap
from cachetree.transport.pending_fetches import PendingFetches
from cachetree.transport.status import PullStatus
from cachetree.transport.wire import MAX_REQUEST_S, Entries, Entry, Reset, Synced
from cachetree.tree import CacheTree, Change, EntryKey, Reservation

log = logging.getLogger("cachetree.peer")

_Steps = Generator[float, None, None]
"""Work in steps. Each step yields the seconds until the next step has to run at the latest."""

_MAX_WAITING: Final = 1 << 16
"""Largest number of entries of one peer that wait to be copied."""
_MAX_GIVEN_UP: Final = 1 << 13
"""Largest number of entries that are remembered as evicted. An entry that a peer's snapshot names
is not copied again if it is among them."""
_PART_BYTES: Final = 64 << 20
"""Largest number of bytes of one fetch. A larger entry takes several fetches, and the pages of each
can be read as soon as they are here."""
_FIRST_PART_BYTES: Final = 1 << 20
"""Largest number of bytes of one fetch until the rate of the link is known."""
_PART_S: Final = 0.25
"""Longest fetch in seconds if there is a rate limit. A single page may take longer."""
_MAX_PAGES: Final = MAX_MESSAGE_BYTES // PAGE_HASH_BYTES // 2
"""Largest number of pages of one fetch, so that one message can name them."""
_FETCH_S: Final = MAX_REQUEST_S
"""Seconds until the deadline of one fetch."""
_PLANNED_S: Final = _FETCH_S / 4
"""Longest fetch in seconds at the measured rate of the link. The rate may become four times lower
before the deadline ends the fetch."""
_PAUSE_S: Final = 0.5
"""Seconds of pause after a failed fetch. It doubles with each failure, up to ten times this
value."""
_CLAIMED_S: Final = 0.01
"""Seconds between two checks whether a fetch may start: another peer's thread may fetch the same
pages, and entries may have to be written first."""
_BURST: Final = 64
"""Largest number of entries that one pass of the peer's thread handles."""


class Keeper:
    """State that the peers of a cache share while they copy entries: the rate limit, which thread
    fetches which pages, and evicted entries. Used by any peer's thread."""

    def __init__(
        self, tree: CacheTree, max_bytes_per_s: float, unwritten: Unwritten, clock: Clock
    ) -> None:
        """`unwritten` has the entries that a tier has not written yet."""
        self.tree: Final = tree
        self.part_bytes: Final = min(_PART_BYTES, max_bytes_per_s * _PART_S)
        self._lock = threading.Lock()
        """Lock for the fields below. A thread may take it while it holds the tree's lock, but never
        the reverse."""
        self._cap = Cap(max_bytes_per_s, clock)
        self._unwritten = unwritten
        self._claimed: dict[EntryKey, int] = {}
        """Bytes of each running fetch."""
        self._given_up: dict[EntryKey, None] = {}
        """Model, last page and part of each entry that left memory and disk, the oldest first."""
        tree.subscribe_kept(self._note)

    def has_given_up(self, key: EntryKey) -> bool:
        return key in self._given_up

    def claim(self, key: EntryKey, num_bytes: int) -> bool:
        """Let only the calling thread fetch this page and the pages after it, until `release`.
        Return False if another thread has claimed them, or if entries have to be written first:
        the fetched `num_bytes` would evict them."""
        with self._lock:
            sizes = *self._claimed.values(), num_bytes
            is_free = key not in self._claimed and self._unwritten.has_room(sizes)
            if is_free:
                self._claimed[key] = num_bytes
            return is_free

    def release(self, key: EntryKey) -> None:
        with self._lock:
            del self._claimed[key]

    def delay_s(self) -> float:
        """Return the seconds until the rate limit lets the next fetch begin."""
        return self._cap.delay_s()

    def spend(self, num_bytes: int) -> None:
        with self._lock:
            self._cap.spend(num_bytes)

    def _note(self, change: Change) -> None:
        with self._lock:
            self._given_up.pop(change.key, None)
            # An entry that was evicted before it could be written is copied again.
            if not change.added and change.key not in self._unwritten:
                self._given_up[change.key] = None
            if len(self._given_up) > _MAX_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]


class Pulls:
    """Copy the entries that one peer advertises, one after another. For the peer's thread, except
    `status`.

    An entry that cannot be fetched is left out. When the session ends, all waiting entries are
    dropped, because the snapshot of the next session names them again.
    """

    def __init__(
        self, address: Location, keeper: Keeper | None, fetches: PendingFetches, clock: Clock
    ) -> None:
        """Without a `keeper`, no entry is copied."""
        self._address: Final = address
        self._keeper = keeper
        self._fetches = fetches
        fetches.as_copies = keeper is not None
        self._clock = clock
        self._counts = PullStatus()
        self._log_limiter = LogLimiter(clock)
        self._backoff = Backoff(_PAUSE_S)
        self._waiting: dict[EntryKey, None] = {}
        """Model, last page and part of each waiting entry, oldest first."""
        self._is_snapshot = True
        self._work: _Steps | None = None
        self._look_at_s = inf
        """Time at which `_work` has to run again at the latest."""

    @property
    def status(self) -> PullStatus | None:
        if self._keeper is None:
            return None
        num_waiting = len(self._waiting) + (self._work is not None)
        return msgspec.structs.replace(self._counts, num_waiting=num_waiting)

    def timeout_s(self) -> float:
        """Seconds until `turn` has work; infinity if no entry waits."""
        if self._work is None:
            return 0.0 if self._waiting else inf
        return max(0.0, self._look_at_s - self._clock())

    def hear(self, message: Advert) -> None:
        """Queue the entries of an advert. The advert is already applied to `tree.remote`."""
        match message:
            case Reset():
                self._is_snapshot = True
            case Synced():
                self._is_snapshot = False
            case Entries() if self._keeper is not None:
                for entry in message.entries:
                    self._hear(entry, self._keeper)

    def turn(self) -> None:
        """Continue copying as far as possible without waiting, for at most `_BURST` entries."""
        for _ in range(_BURST):
            if self._work is None:
                if self._keeper is None or not self._waiting:
                    return
                key = next(iter(self._waiting))
                del self._waiting[key]
                self._work = self._pull(self._keeper, key)
            pause_s = next(self._work, None)
            if pause_s is not None:
                self._look_at_s = self._clock() + pause_s
                return
            self._work = None

    def interrupt(self) -> None:
        """Drop all waiting entries, because the session is over."""
        self._waiting.clear()
        if self._work is not None:
            self._work.close()
            self._work = None

    def _hear(self, entry: Entry, keeper: Keeper) -> None:
        page = PageHash(entry.pages[-PAGE_HASH_BYTES:])
        key = ModelId(entry.model), page, Part(entry.part)
        if not entry.added or (self._is_snapshot and keeper.has_given_up(key)):
            return
        self._waiting[key] = None
        if len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
            self._failed(
                f"more than {_MAX_WAITING} entries wait to be copied; the oldest is dropped"
            )

    def _pull(self, keeper: Keeper, key: EntryKey) -> _Steps:
        """Copy an entry, and its parents that are missing here."""
        model, page, part = key
        remote = keeper.tree.remote
        try:
            if not remote.has(self._address, *key):
                raise StaleEntry("the peer does not advertise it any more")
            if remote.has(DISK, *key):
                return
            line = remote.missing(self._address, *key)
            if part != KV:
                line = [*remote.missing(self._address, model, page), *line]
            for piece in chain.from_iterable(self._pieces(keeper, change) for change in line):
                yield from self._fetch(keeper, piece)
            self._counts.error = ""
            self._backoff.reset()
            return
        except StaleEntry:
            self._counts.num_gone += 1
            return
        except (FetchError, NoRoom) as exc:
            self._failed(str(exc))
        yield self._backoff.next_s()

    def _pieces(self, keeper: Keeper, change: Change) -> Iterator[Change]:
        """Cut an addition into parts for one fetch each, by the rate measured until then."""
        page_bytes = Layout.of(keeper.tree.family, 1, change.part).page_bytes
        start, num_pages = 0, len(change.pages)
        while start < num_pages:
            rate = self._fetches.bandwidth.bytes_per_s or 0.0
            part_bytes = min(keeper.part_bytes, max(_FIRST_PART_BYTES, rate * _PLANNED_S))
            stop = start + max(1, min(int(part_bytes // page_bytes), _MAX_PAGES))
            yield change.slice(Span(start, min(stop, num_pages)))
            start = stop

    def _fetch(self, keeper: Keeper, piece: Change) -> _Steps:
        """Fetch the pages of `piece` that are missing here. Raises NoRoom or FetchError."""
        tree = keeper.tree
        num_bytes = Layout.of(tree.family, len(piece.pages), piece.part).num_bytes
        while not keeper.claim(claim := _first_new(tree, piece), num_bytes):
            yield _CLAIMED_S
        try:
            while (pause_s := keeper.delay_s()) > 0:
                yield pause_s
            reservation = tree.reserve(piece.model, piece.parent, piece.pages, piece.part)
            pages = f"{len(piece.pages)} pages of {piece.model}"
            if reservation is None:
                if piece.parent is None or tree.has(piece.model, piece.parent, piece.part):
                    raise NoRoom(f"there is no room here for {pages}")
                raise FetchError(f"{pages} are not copied: the page before them has left memory")
            with reservation:
                if reservation.pages:
                    yield from self._fill(keeper, reservation)
            if reservation.skipped + len(reservation.pages) < len(piece.pages):
                raise FetchError(f"E of {pages} is not copied: KV of some of them is missing here")
        finally:
            keeper.release(claim)

    def _fill(self, keeper: Keeper, reservation: Reservation) -> _Steps:
        page_bytes, num_pages = keeper.tree.family.page_bytes, len(reservation.pages)
        sizes = {step: num_pages * page_bytes(step.kind) for step in reservation.steps}
        views = {step: reservation.views(step) for step in reservation.steps}
        deadline = Deadline.after(_FETCH_S, self._clock)
        with Staging(sizes, deadline, views) as staging:
            keeper.spend(staging.num_bytes)
            model = reservation.change.model
            self._fetches.begin(model, reservation.pages, staging)
            while not staging.is_complete:
                staging.check()
                yield inf
            reservation.commit()
        self._counts.num_fetched += 1
        self._counts.num_bytes += staging.num_bytes

    def _failed(self, error: str) -> None:
        # The peer has chosen the model's id. Who reads that a copy failed finds why.
        self._counts.error = printable(error)
        self._counts.num_failed += 1
        if self._log_limiter.may("pull"):
            log.warning("not all of peer %s is copied: %s", self._address, self._counts.error)


def _first_new(tree: CacheTree, piece: Change) -> EntryKey:
    """Return the key of the first page that is missing here; of the first page if all are here."""
    new = (it for it in piece.pages if not tree.has(piece.model, it, piece.part))
    return piece.model, next(new, piece.pages[0]), piece.part
