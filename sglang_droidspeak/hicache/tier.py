"""A tier over a HiCache storage backend: what a server holds is stored where its cluster stores.

    searcher   asks which pages of a prompt are there
    reader     reads a plan's layers, in its order, into its staging
    writer     writes every entry that comes into the tree, behind it

One thread each, as in SGLang: backends keep one bounce buffer for reads and one for writes. A call
that hangs holds up its thread, never a request: those have deadlines of their own, and a `Breaker`
for reading and one for writing keep everybody else away.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from cachetree import Clock, Deadline, Location, MakeTier, ModelId, NoteSpeed, PageHash, Search
from cachetree.memory import Staging
from cachetree.tree import CacheTree
from sglang_droidspeak.engine.hicache import Backend
from sglang_droidspeak.hicache.lane import Breaker, Count, Lane
from sglang_droidspeak.hicache.objects import HICACHE, Objects
from sglang_droidspeak.hicache.reader import Reader
from sglang_droidspeak.hicache.search import Searcher
from sglang_droidspeak.hicache.writer import Writer

log = logging.getLogger(__name__)

MAX_SLOTS: Final = 64
"""Objects that move in one call of the backend."""
MAX_LANE_BYTES: Final = 16 << 20
"""Memory for them, of the reader and of the writer."""
MAX_KNOWN_PAGES: Final = 1 << 18
"""Pages that the tree shows of the backend; past them the coldest go, to be found anew."""
MAX_CLOSE_S: Final = 5.0


class HiCacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A tier in numbers, since its start."""

    num_late_entries: int
    """Evicted from memory, or refused by the backend, before they were written."""
    is_reading_paused: bool
    is_writing_paused: bool


class HiCacheTier:
    """Keeps what comes into `tree` in a backend, and shows the tree what is there."""

    location: Final[Location] = HICACHE

    def __init__(
        self,
        tree: CacheTree,
        backend: Backend,
        senders: Mapping[ModelId, Collection[int]],
        note_speed: NoteSpeed,
        *,
        count: Count = lambda _result, _num: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`senders` are whose entries may be read, and the layers whose E is wanted of each;
        `count` hears of objects `read`, `written`, `missing`, `damaged` and `failed`."""
        self._backend = backend
        self._reading, self._writing = Breaker("reading", clock), Breaker("writing", clock)
        objects, half = Objects(tree.family), len(backend.slots) // 2
        reading = Lane(backend, objects, range(half), self._reading, count, clock)
        writing = Lane(backend, objects, range(half, 2 * half), self._writing, count, clock)
        tree.limit_remote(HICACHE, MAX_KNOWN_PAGES)
        self._searcher = Searcher(tree, senders, reading)
        self._reader = Reader(tree, reading, self._searcher.absent, note_speed)
        self._writer = Writer(tree, writing)
        self._is_closed = False

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        self._reader.fetch(model, pages, staging)

    def note_use(self, model: ModelId, pages: Sequence[PageHash]) -> None:
        """The backend has a recency of its own, and no call to change it."""

    def search(self, pages: Sequence[PageHash]) -> Search:
        return self._searcher.search(pages)

    def status(self) -> HiCacheStatus:
        return HiCacheStatus(
            num_late_entries=self._writer.behind.num_late,
            is_reading_paused=self._reading.is_open,
            is_writing_paused=self._writing.is_open,
        )

    def close(self) -> None:
        """Write what waits, for a few seconds at most. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = Deadline.after(MAX_CLOSE_S)
        threads = (self._searcher.turns, self._reader.turns, self._writer.behind)
        have_ended = [thread.close(deadline.remaining_s()) for thread in threads]
        if all(have_ended):
            with contextlib.suppress(Exception):
                self._backend.close()
        else:
            log.warning("the HiCache backend does not return; it is left as it is")


def hicache_tier(
    name: str,
    config: Mapping[str, Any],
    senders: Mapping[ModelId, Collection[int]],
    count: Count = lambda _result, _num: None,
) -> MakeTier:
    """What a Cache needs to make the tier; raises ConfigError when it does."""

    def make(tree: CacheTree, note_speed: NoteSpeed) -> HiCacheTier:
        objects = Objects(tree.family)
        backend = Backend(
            name,
            config,
            tp_rank=tree.family.tp_rank,
            tp_size=tree.family.tp_size,
            slot_bytes=objects.slot_bytes,
            num_slots=2 * max(1, min(MAX_SLOTS, MAX_LANE_BYTES // objects.slot_bytes)),
        )
        return HiCacheTier(tree, backend, senders, note_speed, count=count)

    return make
