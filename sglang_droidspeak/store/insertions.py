"""Index the pages that SGLang inserts into its tree, for other models, and copy them to the cache.

scheduler  checkpoint ─► note the pages in the pool's index ─► offload, for each new node
offloader  each node's KV and E out of the pool, layer after layer ─► the cache ─► peers
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cachetree import KV, Cache, Deadline, ModelId, PageHash, Part, WorkerThread, lower_priority
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import LoRARef, PoolTransfer, Req, UnifiedRadixCache
from sglang_droidspeak.store.pool import PoolIndex
from sglang_droidspeak.store.rows import ServerPool

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64
"""Largest number of tree nodes that may be locked for a copy at once. More locked nodes could fill
the KV pool."""

_MAX_BRING_S = 0.5
"""Largest number of seconds that a node waits for E of the pages before it."""

Ready = Callable[[], Sequence[torch.cuda.Event]]
"""Function that returns CUDA events, recorded behind the forwards that write the inserted slots.
Without CUDA it returns none."""


@dataclass(frozen=True, slots=True)
class EventTokens:
    """Content of KV events about an offload's pages. The pages' hashes are added later."""

    tokens: Sequence[int]
    adapter: LoRARef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """A new node of SGLang's tree, to copy to the cache. `slots` hold the KV of `pages`."""

    model: ModelId
    before: Sequence[PageHash]
    """All pages of the prompt before `pages`."""
    pages: Sequence[PageHash]
    slots: torch.Tensor
    ready: Sequence[torch.cuda.Event]
    """Events that the copy waits for, of the forwards that write the slots. Empty without CUDA."""
    event_tokens: EventTokens | None = None
    """Content of KV events about the node. None if events are off, or must not name the node."""


def _no_events(*_about: object) -> None:
    """Do nothing: no events are published."""


@dataclass(eq=False)
class Insertions:
    """Handle insertions into SGLang's tree. `checkpoint` hooks UnifiedRadixCache.checkpoint, which
    calls `offload` for each new node. Scheduler thread only.
    """

    _models: Models
    _pool: PoolIndex
    _offloader: Offloader
    _page_size: int
    _inserting: tuple[Req, int] | None = field(default=None, init=False)
    about: Callable[[Req, int, int], EventTokens | None] = _no_events
    """Function that returns the content of KV events about a request's tokens [start, stop)."""
    name: Callable[[Req], object] = _no_events
    """Function by which SGLang's own KV events learn the name of the request's adapter."""

    def checkpoint(self, original: Any, tree: Any, req: Req, *, up_to: int, **rest: Any) -> None:
        """Remember the request while SGLang inserts its tokens, because SGLang calls `offload`
        during the insertion."""
        self.name(req)
        if self._pool.is_read:
            self._note(req, up_to, tree)
        self._inserting = (req, up_to)
        try:
            original(tree, req, up_to=up_to, **rest)
        finally:
            self._inserting = None

    def _note(self, req: Req, up_to: int, tree: UnifiedRadixCache) -> None:
        """Note the request's pages in the pool's index, where other models find them."""
        owner = self._models.owner_of(req)
        if owner is None or prefixes.refusal(req) or prefixes.is_approximate(req):
            return
        pages = owner.pages_of(prefixes.pages_of(req, up_to, self._page_size), self._page_size)
        self._pool.note(
            prefixes.namespace_of(req),
            owner.model,
            pages,
            self._pool.held(req, len(pages), tree).exact,
            prefixes.num_without_e(req) // self._page_size,
        )

    def offload(self, transfers: Sequence[PoolTransfer], ready: Ready) -> bool:
        """Queue a copy of new exact KV, which waits for the events of `ready`. Return False if it
        cannot be copied now: SGLang then offers it again."""
        if self._offloader.is_stopped:
            return self._offloader.put(None)
        if self._inserting is None:
            return False
        req, up_to = self._inserting
        owner = self._models.owner_of(req)
        if prefixes.refusal(req) or owner is None:
            return False
        if prefixes.is_approximate(req):
            return self._offloader.put(None)  # Approximate KV never becomes exact.
        (transfer,), page_size = transfers, self._page_size
        first = prefixes.page_hash(transfer.keys[0])
        own_path = prefixes.own_pages_of(req, up_to, page_size)
        if first not in own_path:
            return False
        index = own_path.index(first)
        path = prefixes.pages_of(req, up_to, page_size) if prefixes.place_of(req) else own_path
        pages = owner.pages_of(path, page_size)[index : index + len(transfer.keys)]
        if not pages:
            return False
        num_tokens, start = len(pages) * page_size, index * page_size
        return self._offloader.put(
            Offload(
                model=owner.model,
                before=path[:index],
                pages=pages,
                slots=transfer.device_indices[:num_tokens],
                ready=ready(),
                event_tokens=self.about(req, start, start + num_tokens),
            )
        )


class Offloader:
    """Copy exact KV and E of new nodes into the cache, in a thread."""

    def __init__(self, cache: Cache, pool: ServerPool, stream: Any) -> None:
        """Copies run on `stream`."""
        self._cache = cache
        self._pool = pool
        self._device = torch.get_device_module(pool.e_pool.valid.device)
        self._stream = stream
        self.is_stopped = False
        """True once nothing more is to be stored."""
        self.storing: Offload | None = None
        """Node that the offloading thread stores now. Only this thread reads the attribute."""
        self.num_put = 0
        """Number of nodes ever queued."""
        self.num_done = 0
        """Number of queued nodes that are finished: stored, or given up."""
        self._num_taken = 0
        """Number of finished nodes that SGLang knows to be finished, equal on all ranks."""
        self._thread: WorkerThread[tuple[Offload | None]] = WorkerThread(
            "droidspeak-offload", self._run, fail=self._let_go
        )

    def put(self, offload: Offload | None) -> bool:
        """Queue one node. Return False if too many are in flight. None stands for a node that is
        not stored, and that SGLang must not offer again."""
        if self.num_put - self._num_taken >= MAX_IN_FLIGHT:
            return False
        self.num_put += 1
        self._thread.put((offload,))
        return True

    @property
    def num_results(self) -> int:
        return self.num_done - self._num_taken

    def pop_result(self) -> bool:
        """Count one more finished node as known to SGLang. Return True: do not offer it again."""
        self._num_taken += 1
        return True

    def reset(self) -> None:
        """Wait until all queued nodes are finished, and forget the results."""
        while self.num_done < self.num_put:
            time.sleep(0.001)
        self._num_taken = self.num_done

    def close(self) -> None:
        self._thread.close(10)

    def _run(self, offloads: Iterator[tuple[Offload | None]]) -> None:
        lower_priority()
        with torch.inference_mode(), self._device.stream(self._stream):
            for (offload,) in offloads:
                self.storing = offload
                try:
                    if offload is not None:
                        self._store(offload)
                except Exception:  # The cache then lacks the node, as if it were evicted.
                    log.exception("a new node was not stored")
                self.storing = None
                self.num_done += 1

    def _let_go(self, _item: object, _error: object) -> None:
        """Count a node as done after the thread has failed, so that SGLang unlocks it."""
        self.num_done += 1

    def _store(self, offload: Offload) -> None:
        for event in offload.ready:
            event.synchronize()
        e_pool = self._pool.e_pool
        self._store_part(offload, 0, KV)
        # Loaded pages may lack E; pages computed after them have it.
        first = e_pool.num_pages_without(offload.slots, self._pool.page_size)
        for layer in e_pool.e:
            if first < len(offload.pages):
                self._bring_e([*offload.before, *offload.pages[:first]], offload.model, layer)
                self._store_part(offload, first, Part(layer))

    def _bring_e(self, pages: Sequence[PageHash], model: ModelId, layer: int) -> None:
        """Copy E of earlier pages into host memory, if a tier or a peer has it. Without E of all
        earlier pages, the cache stores no E of a page."""
        if pages and not self._cache.tree.has(model, pages[-1], Part(layer)):
            self._cache.bring_e(model, pages, layer, Deadline.after(_MAX_BRING_S))

    def _store_part(self, offload: Offload, first: int, part: Part) -> None:
        """Store KV, or E of one layer, from page `first` on."""
        pages = offload.pages[first:]
        before = [*offload.before, *offload.pages[:first]]
        parent = before[-1] if before else None
        reservation = self._cache.tree.reserve(offload.model, parent, pages, part)
        if reservation is None:
            return
        with reservation:
            if not reservation.pages:
                return
            start, page_size = first + reservation.skipped, self._pool.page_size
            stop = start + len(reservation.pages)
            slots = offload.slots[start * page_size : stop * page_size]
            self._pool.store({step: reservation.views(step) for step in reservation.steps}, slots)
            reservation.commit()
