"""Sources of a plan's pages: host memory, or this server's own KV pool.

check          raise if no more bytes will arrive   while the request waits
admit          keep the pages until `release`       when SGLang has slots for the request
read_e, copy   read tokens                          when its batch runs
release        give up the pages
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cachetree import (
    Cache,
    Deadline,
    DeadlineExceeded,
    FetchError,
    Kind,
    PageHash,
    Plan,
    Span,
    Staging,
    Step,
    is_pool,
)
from cachetree.memory import cut
from sglang_droidspeak.engine import tracing
from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
from sglang_droidspeak.start.this_server import ThisServer
from sglang_droidspeak.store.pool import PoolIndex, PoolPages
from sglang_droidspeak.store.rows import ServerPool

_MARGIN: Final = 1.05
"""Factor on the predicted time until a fetch ends. With it, a fetch that gets a little slower
delays no forward."""


class Source:
    """Base class of the places from which a plan's pages are read. Methods take tokens of the
    plan's pages, by their position in the prompt. Scheduler thread only, except `wait` and `copy`
    in the loader's thread."""

    def __init__(self, plan: Plan, pool: ServerPool, staging: Staging) -> None:
        self.staging: Final = staging
        """Host memory that the fetch fills; empty if the plan reads this server's own pool."""
        self._plan: Final = plan
        self._pool: Final = pool

    @property
    def has_e(self) -> bool:
        """Whether all E that the recompute begins with has arrived."""
        staging = self.staging
        return all(staging.has_landed(step) for step in staging.steps if step.kind is Kind.E)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.staging.started_s

    @property
    def rest_s(self) -> float:
        """Predicted seconds until all bytes have arrived, at the rate so far. Infinity if no byte
        has arrived."""
        num_landed = self.staging.num_landed_bytes
        num_left = self.staging.num_bytes - num_landed
        if num_left and not num_landed:
            return math.inf
        return num_left and self.elapsed_s * num_left / num_landed * _MARGIN

    def check(self) -> None:
        """Raise FetchError if no more bytes will arrive."""
        staging = self.staging
        if not staging.is_complete:
            if staging.deadline.has_passed:
                staging.fail(DeadlineExceeded("the fetch did not end in time"))
            staging.check()

    def admit(self) -> bool:
        """Keep the pages until `release`. Return False if SGLang has evicted some of them."""
        return True

    def wait(self, step: Step) -> None:
        """Block until a transfer step (KV or E of a layer) has arrived. Or raise FetchError."""
        self.staging.wait(step)

    def read_e(self, layer: int, at: Span, into: torch.Tensor) -> None:
        """Write E of the tokens to `into`, `[tokens, columns of this rank]`, on the device. Raises
        FetchError if there is no E."""
        raise NotImplementedError

    def copy(self, layer: int, at: Span, slots: torch.Tensor) -> int:
        """Copy the KV of these tokens into slots. Returns the bytes read from host memory."""
        raise NotImplementedError

    def adopt_e(self, at: Span, slots: torch.Tensor) -> bool:
        """Copy E into slots of exact KV, if the source is in the KV pool. Return whether all of the
        slots have E now."""
        return False

    def release(self) -> None:
        """Give up the pages. No thread may read them afterwards."""
        self.staging.release()

    def _of_plan(self, at: Span) -> Span:
        """Return the same tokens, counted from the plan's first token."""
        first = self._plan.pages.start * self._pool.page_size
        return Span(at.start - first, at.stop - first)


class Staged(Source):
    """Pages in host memory: in this server's cache, or in the staging memory of a fetch."""

    def read_e(self, layer: int, at: Span, into: torch.Tensor) -> None:
        self._pool.coding.fill(into, self.rows(Step(Kind.E, layer), at))

    def copy(self, layer: int, at: Span, slots: torch.Tensor) -> int:
        return self._pool.load(layer, slots, self.rows(Step(Kind.KV, layer), at))

    def rows(self, step: Step, at: Span) -> list[memoryview]:
        """Return the arrived bytes of these tokens, as one view per contiguous run."""
        tokens = self._of_plan(at)
        size, num_tokens = self.staging.sizes[step], len(self._plan.pages) * self._pool.page_size
        span = Span(size * tokens.start // num_tokens, size * tokens.stop // num_tokens)
        return cut(self.staging.views(step), span)


class InPool(Source):
    """Pages of another model in this server's KV pool: there is nothing to fetch.

    SGLang keeps the pages from `admit` to `release`. Before `admit`, SGLang may evict them.
    """

    def __init__(self, plan: Plan, pool: ServerPool, lock: Callable[[], PoolPages | None]) -> None:
        super().__init__(plan, pool, Staging({}, Deadline.after(0)))
        self._lock: Final = lock
        self._pages: PoolPages | None = None

    def wait(self, step: Step) -> None:
        """Return at once: the pages are in the pool."""

    def admit(self) -> bool:
        """Lock the pages in SGLang's tree. Returns False if SGLang has evicted some of them since
        they were planned, perhaps for the request's own slots."""
        self._pages = self._lock()
        return self._pages is not None

    def read_e(self, layer: int, at: Span, into: torch.Tensor) -> None:
        layers = self._pool.e_pool.e
        if layer not in layers:
            raise FetchError(f"{self._plan.sender} was unloaded, and layer {layer} has no E")
        torch.index_select(layers[layer], 0, self._slots(at), out=into)

    def copy(self, layer: int, at: Span, slots: torch.Tensor) -> int:
        self._pool.rows.copy(layer, self._slots(at), slots)
        return 0

    def adopt_e(self, at: Span, slots: torch.Tensor) -> bool:
        self._pool.e_pool.adopt(self._slots(at), slots, self._plan.block)
        return self._pages.has_e

    def release(self) -> None:
        if self._pages is not None:
            self._pages.release()
        self._pages = None

    def _slots(self, at: Span) -> torch.Tensor:
        assert self._pages is not None, "not admitted"
        tokens = self._of_plan(at)
        return self._pages.slots[tokens.start : tokens.stop]


@dataclass(eq=False)
class Sources:
    """Factory of the source of each plan's pages. Scheduler thread only."""

    server: ThisServer
    cache: Cache
    pool_index: PoolIndex
    _pool: ServerPool

    def of(
        self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache
    ) -> Source | None:
        """Make the source of a plan, and begin its fetch if there is one. None if staging memory is
        used up."""
        if is_pool(plan.location):
            return InPool(plan, self._pool, lambda: self.pool_index.lock(plan, pages, req, tree))
        deadline = Deadline.after(self.server.settings.fetch_deadline_s)
        staging = self.cache.fetch(plan, pages, deadline, tracing.context_of(req))
        return None if staging is None else Staged(plan, self._pool, staging)
