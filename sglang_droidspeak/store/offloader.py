"""The thread that copies new KV and E out of the pool into the cache, for others to read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from cachetree import Cache, Kind, ModelId, PageHash, Step, Turns, give_way
from sglang_droidspeak.engine.names import LoRARef
from sglang_droidspeak.store.rows import ServerPool

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64
"""Nodes whose slots may be locked for a copy at once; more would starve the KV pool."""


@dataclass(frozen=True, slots=True)
class Told:
    """What events say of an offload's pages, beside their hashes."""

    tokens: Sequence[int]
    adapter: LoRARef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """One new radix node: `slots` hold the KV of `pages`, which follow `parent`."""

    model: ModelId
    parent: PageHash | None
    pages: Sequence[PageHash]
    slots: torch.Tensor
    ready: Sequence[torch.cuda.Event]
    """What the copy waits for: the forward that writes the slots. Empty off CUDA."""
    told: Told | None = None
    """What events say of it; None where there are none, or nobody is to hear of it."""


class Offloader:
    """Stores exact KV only. On CUDA it copies on a stream of its own."""

    def __init__(self, cache: Cache, pool: ServerPool) -> None:
        self._cache = cache
        self._pool = pool
        self._device = torch.get_device_module(pool.e_pool.valid.device)
        self._stream = self._device.Stream()
        self._results: SimpleQueue[bool] = SimpleQueue()
        self.is_stopped = False
        """It takes nothing more."""
        self.storing: Offload | None = None
        """What its thread stores now; read in that thread."""
        self.num_put = 0
        """Nodes that were ever queued."""
        self.num_done = 0
        """Of these, how many are stored, or never will be."""
        self._num_in_flight = 0
        """Put, and their results not yet taken: SGLang takes as many on each rank of a server."""
        self._turns: Turns[tuple[Offload | None]] = Turns("droidspeak-offload", self._run)

    def put(self, offload: Offload | None) -> bool:
        """Queue one node, or None for one that is let go in its turn and never offered again; False
        where too many are in flight."""
        if self._num_in_flight >= MAX_IN_FLIGHT:
            return False
        self._num_in_flight += 1
        self.num_put += 1
        self._turns.put((offload,))
        return True

    @property
    def num_results(self) -> int:
        return self._results.qsize()

    def pop_result(self) -> bool:
        self._num_in_flight -= 1
        return self._results.get_nowait()

    def reset(self) -> None:
        """Wait until nothing is in flight and forget the results."""
        while self._num_in_flight:
            self._results.get()
            self._num_in_flight -= 1

    def close(self) -> None:
        self._turns.close(10)

    def _run(self, offloads: Iterator[tuple[Offload | None]]) -> None:
        give_way()
        with torch.inference_mode(), self._device.stream(self._stream):
            for (offload,) in offloads:
                self.storing = offload
                stored = True
                try:
                    if offload is not None:
                        self._store(offload)
                except Exception:
                    log.exception("a new node was not stored")
                    stored = False
                self.storing = None
                self.num_done += 1
                self._results.put(stored)

    def _store(self, offload: Offload) -> None:
        for event in offload.ready:
            event.synchronize()
        pages, slots, parent = offload.pages, offload.slots, offload.parent
        e_pool = self._pool.e_pool
        # Loaded pages hold no E of their own; what was computed after them does.
        page_size = slots.shape[0] // len(pages)
        cut = e_pool.num_pages_without(slots, page_size)
        if cut:
            self._store_pages(offload.model, parent, pages[:cut], slots[: cut * page_size], ())
            parent = pages[cut - 1]
        if cut < len(pages):
            e_layers, rest = tuple(e_pool.e), slots[cut * page_size :]
            self._store_pages(offload.model, parent, pages[cut:], rest, e_layers)

    def _store_pages(
        self,
        model: ModelId,
        parent: PageHash | None,
        pages: Sequence[PageHash],
        slots: torch.Tensor,
        e_layers: Sequence[int],
    ) -> None:
        tree = self._cache.tree
        reservation = tree.reserve(model, parent, pages, e_layers)
        if reservation is None:
            return
        with reservation:
            if not reservation.pages:
                return
            new = slots[reservation.skipped * (slots.shape[0] // len(pages)) :]
            for layer in range(tree.family.num_layers):
                self._pool.store(Step(Kind.KV, layer), new, reservation.kv(layer))
            for layer in e_layers:
                self._pool.store(Step(Kind.E, layer), new, reservation.e(layer))
            reservation.commit()
