"""What SGLang inserts into its tree: noted for the models beside, and copied out for others.

SGLang    checkpoint ─► offload, for each new node ─► its pages are noted in the pool's index
thread                  └► KV and E out of the pool, layer after layer ─► the cache ─► peers
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
"""Nodes whose slots may be locked for a copy at once; more would starve the KV pool."""

_MAX_BRING_S = 0.5
"""Seconds that a node waits for E of the pages before it."""

Ready = Callable[[], Sequence[torch.cuda.Event]]
"""Records what writes the slots that are inserted now; nothing off CUDA."""


@dataclass(frozen=True, slots=True)
class EventTokens:
    """What events say of an offload's pages, beside their hashes."""

    tokens: Sequence[int]
    adapter: LoRARef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """One new radix node: `slots` hold the KV of `pages`, which follow those `before`."""

    model: ModelId
    before: Sequence[PageHash]
    """All pages of the prompt up to the first."""
    pages: Sequence[PageHash]
    slots: torch.Tensor
    ready: Sequence[torch.cuda.Event]
    """What the copy waits for: the forward that writes the slots. Empty off CUDA."""
    told: EventTokens | None = None
    """What events say of it; None where there are none, or nobody is to hear of it."""


def _nobody(*_about: object) -> None:
    """Where nobody follows events."""


@dataclass(eq=False)
class Insertions:
    """Scheduler thread only. `checkpoint` hooks UnifiedRadixCache.checkpoint, inside of which
    SGLang calls `offload`.
    """

    _models: Models
    _pool: PoolIndex
    _offloader: Offloader
    _page_size: int
    _inserting: tuple[Req, int] | None = field(default=None, init=False)
    about: Callable[[Req, int, int], EventTokens | None] = _nobody
    """What events say of some of a request's tokens."""
    name: Callable[[Req], object] = _nobody
    """Has SGLang's own events name the request's adapter by the extra key that it has now."""

    def checkpoint(self, original: Any, tree: Any, req: Req, *, up_to: int, **rest: Any) -> None:
        """Tell `offload`, which SGLang calls from inside, whose tokens are being inserted."""
        self.name(req)
        if self._pool.is_read:
            self._note(req, up_to, tree)
        self._inserting = (req, up_to)
        try:
            original(tree, req, up_to=up_to, **rest)
        finally:
            self._inserting = None

    def _note(self, req: Req, up_to: int, tree: UnifiedRadixCache) -> None:
        """What SGLang's tree will have of this request is there for the other models, too."""
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
        """Have new exact KV copied out, after what `ready` records; False where it is not, yet."""
        if self._offloader.is_stopped:
            return self._offloader.put(None)
        if self._inserting is None:
            return False
        req, up_to = self._inserting
        owner = self._models.owner_of(req)
        if prefixes.refusal(req) or owner is None:
            return False
        if prefixes.is_approximate(req):
            return self._offloader.put(None)  # It never becomes exact.
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
                told=self.about(req, start, start + num_tokens),
            )
        )


class Offloader:
    """Stores exact KV only."""

    def __init__(self, cache: Cache, pool: ServerPool, stream: Any) -> None:
        """It copies on `stream`."""
        self._cache = cache
        self._pool = pool
        self._device = torch.get_device_module(pool.e_pool.valid.device)
        self._stream = stream
        self.is_stopped = False
        """It stores nothing more."""
        self.storing: Offload | None = None
        """What its thread stores now; read in that thread."""
        self.num_put = 0
        """Nodes that were ever queued."""
        self.num_done = 0
        """Of these, how many are stored, or never will be,"""
        self._num_taken = 0
        """and of how many of those SGLang knows: as many on each rank of a server."""
        self._thread: WorkerThread[tuple[Offload | None]] = WorkerThread(
            "droidspeak-offload", self._run, fail=self._let_go
        )

    def put(self, offload: Offload | None) -> bool:
        """Queue one node, or None for one that is let go in its turn and never offered again; False
        where too many are in flight."""
        if self.num_put - self._num_taken >= MAX_IN_FLIGHT:
            return False
        self.num_put += 1
        self._thread.put((offload,))
        return True

    @property
    def num_results(self) -> int:
        return self.num_done - self._num_taken

    def pop_result(self) -> bool:
        """True: SGLang is not to offer it again, whatever became of it."""
        self._num_taken += 1
        return True

    def reset(self) -> None:
        """Wait until nothing is in flight and forget the results."""
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
                except Exception:  # As if it were evicted, and what follows it as well.
                    log.exception("a new node was not stored")
                self.storing = None
                self.num_done += 1

    def _let_go(self, _item: object, _error: object) -> None:
        """The thread has failed. SGLang still unlocks the node."""
        self.num_done += 1

    def _store(self, offload: Offload) -> None:
        for event in offload.ready:
            event.synchronize()
        e_pool = self._pool.e_pool
        self._store_part(offload, 0, KV)
        # Loaded pages hold no E of their own; what was computed after them does.
        first = e_pool.num_pages_without(offload.slots, self._pool.page_size)
        for layer in e_pool.e:
            if first < len(offload.pages):
                self._bring_e([*offload.before, *offload.pages[:first]], offload.model, layer)
                self._store_part(offload, first, Part(layer))

    def _bring_e(self, pages: Sequence[PageHash], model: ModelId, layer: int) -> None:
        """Have E of the pages before those that are stored, if it is anywhere."""
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
            for step in reservation.steps:
                self._pool.store(step, slots, reservation.views(step))
            reservation.commit()
