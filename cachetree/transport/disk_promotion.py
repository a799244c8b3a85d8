"""Pages that are only on disk, brought into memory before they are streamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from cachetree.clock import Clock, Deadline
from cachetree.disk import DiskTier
from cachetree.ids import PAGE_HASH_BYTES, ModelId, PageHash
from cachetree.transport.session import Session
from cachetree.transport.wire import Fetch, Store
from cachetree.tree import CacheTree

CallSoon = Callable[[Callable[[], None]], None]
"""Has something done in the worker's thread; called from any."""


class DiskPromotion:
    """Looks where a fetch's pages are. Used by the worker's thread only; never blocks."""

    def __init__(
        self,
        tree: CacheTree,
        disk: DiskTier | None,
        counts: Counter[str],
        call_soon_threadsafe: CallSoon,
        clock: Clock,
    ) -> None:
        self._tree = tree
        self._disk = disk
        self._counts = counts
        self._call_soon_threadsafe = call_soon_threadsafe
        self._clock = clock

    def promote(
        self, session: Session, fetch: Fetch, most_s: float, go_on: Callable[[Fetch], None]
    ) -> None:
        """Call `go_on` when the pages are in memory, or will not be; never after a cancel.

        At once where they are there, or on no disk. The fetch's deadline counts from now.
        """
        model, page = ModelId(fetch.model), PageHash(fetch.pages[-PAGE_HASH_BYTES:])
        is_page = len(page) == PAGE_HASH_BYTES
        if is_page and self._tree.has(model, page):
            self._counts["hit memory"] += 1
            go_on(fetch)
            return
        self._counts["miss memory"] += 1
        if self._disk is None:
            go_on(fetch)
            return
        if not is_page or not self._disk.has(model, page):
            self._counts["miss disk"] += 1
            go_on(fetch)
            return
        self._counts["hit disk"] += 1
        deadline = Deadline.after(min(max(fetch.timeout_ms, 0) / 1000, most_s), self._clock)

        def resume() -> None:
            left_ms = int(deadline.remaining_s() * 1000)
            go_on(msgspec.structs.replace(fetch, timeout_ms=left_ms))

        self._read(session, fetch.id, model, page, deadline, resume)

    def promote_parent(
        self, session: Session, store: Store, most_s: float, go_on: Callable[[], None]
    ) -> None:
        """As `promote`, of what a store's pages come after."""
        model, page = ModelId(store.model), PageHash(store.parent)
        is_page = len(page) == PAGE_HASH_BYTES
        disk = self._disk
        if disk is None or not is_page or self._tree.has(model, page) or not disk.has(model, page):
            go_on()
            return
        deadline = Deadline.after(min(max(store.timeout_ms, 0) / 1000, most_s), self._clock)
        self._read(session, store.id, model, page, deadline, go_on)

    def _read(
        self,
        session: Session,
        id: int,
        model: ModelId,
        page: PageHash,
        deadline: Deadline,
        go_on: Callable[[], None],
    ) -> None:
        def resume() -> None:
            if id in session.promotions:
                session.promotions.discard(id)
                go_on()

        assert self._disk is not None
        session.promotions.add(id)
        if not self._disk.recall(model, page, deadline, lambda: self._call_soon_threadsafe(resume)):
            resume()
