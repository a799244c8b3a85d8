"""Pages that are only on disk, brought into memory before they are streamed."""

from __future__ import annotations

from collections.abc import Callable

from cachetree.clock import Deadline
from cachetree.disk import DiskTier
from cachetree.ids import PAGE_HASH_BYTES, ModelId, PageHash
from cachetree.transport.session import Session
from cachetree.transport.verbs import Counts
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
        counts: Counts,
        call_soon_threadsafe: CallSoon,
    ) -> None:
        self._tree = tree
        self._disk = disk
        self._counts = counts
        self._call_soon_threadsafe = call_soon_threadsafe

    def promote(
        self,
        session: Session,
        request: Fetch | Store,
        page: bytes,
        deadline: Deadline,
        go_on: Callable[[], None],
    ) -> None:
        """Call `go_on` when `page` is in memory, or will not be; never after a cancel.

        At once where it is there, or on no disk. Fetches are counted by where their pages were.
        """
        model, last = ModelId(request.model), PageHash(page)
        is_page = len(page) == PAGE_HASH_BYTES
        is_here = is_page and self._tree.has(model, last)
        disk = None if is_here or not is_page else self._disk
        is_on_disk = disk is not None and disk.has(model, last)
        if isinstance(request, Fetch):
            (self._counts.hits if is_here else self._counts.misses)["memory"] += 1
            if self._disk is not None and not is_here:
                (self._counts.hits if is_on_disk else self._counts.misses)["disk"] += 1

        def resume() -> None:
            if request in session.promotions:
                session.promotions.discard(request)
                go_on()

        if disk is None or not is_on_disk:
            go_on()
            return
        session.promotions.add(request)
        if not disk.promote(model, last, deadline, lambda: self._call_soon_threadsafe(resume)):
            resume()
