"""Where the pages of a plan come from: host memory, or this server's own KV pool.

check      whether more will come                   while the request waits
admit      hold what is there from now on           when SGLang has slots for it
e, copy    of tokens                                when its batch runs
release    nobody reads it any more
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
"""How much longer than predicted the rest of a fetch may take without holding up a forward."""


class Source:
    """Scheduler thread only but for `wait` and `copy`, which are the loader's. Tokens are named by
    their place in the prompt, and are of the plan's pages."""

    def __init__(self, plan: Plan, pool: ServerPool, staging: Staging) -> None:
        self.staging: Final = staging
        """What is not in this server's own pool comes there; nothing of a plan that reads the
        pool."""
        self._plan: Final = plan
        self._pool: Final = pool

    @property
    def has_e(self) -> bool:
        """All that a recompute begins with."""
        it = self.staging
        return all(it.has_landed(step) for step in it.steps if step.kind is Kind.E)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.staging.started_s

    @property
    def rest_s(self) -> float:
        """That the rest takes at the rate of what has come; infinity where nothing has."""
        num_landed = self.staging.num_landed_bytes
        num_left = self.staging.num_bytes - num_landed
        if num_left and not num_landed:
            return math.inf
        return num_left and self.elapsed_s * num_left / num_landed * _MARGIN

    def check(self) -> None:
        """Raises FetchError where no more will come."""
        it = self.staging
        if not it.is_complete:
            if it.deadline.has_passed:
                it.fail(DeadlineExceeded("the fetch did not end in time"))
            it.check()

    def admit(self) -> bool:
        """Whether all is there still, or coming; from now on until `release`."""
        return True

    def wait(self, step: Step) -> None:
        """Block until it has come; raises FetchError where it will not."""
        self.staging.wait(step)

    def e(self, layer: int, at: Span) -> Sequence[torch.Tensor]:
        """`[tokens, columns of this rank]` on the device, part after part; raises FetchError
        without it."""
        raise NotImplementedError

    def copy(self, layer: int, at: Span, slots: torch.Tensor) -> int:
        """Copy the KV of these tokens into as many slots; the bytes that came from host memory."""
        raise NotImplementedError

    def adopt_e(self, at: Span, slots: torch.Tensor) -> bool:
        """The slots have been loaded with what is exact: give them E, where it lies beside; whether
        they have it."""
        return False

    def release(self) -> None:
        """Nobody reads it any more."""
        self.staging.release()

    def _of_plan(self, at: Span) -> Span:
        """Counted from the plan's first token."""
        first = self._plan.pages.start * self._pool.page_size
        return Span(at.start - first, at.stop - first)


class Staged(Source):
    """Cached in host memory, and read where they lie; or fetched, or being fetched, into it."""

    def e(self, layer: int, at: Span) -> Sequence[torch.Tensor]:
        coding, no_rows = self._pool.coding, self._pool.e_pool.no_rows
        return [coding.load(run, no_rows) for run in self.rows(Step(Kind.E, layer), at)]

    def copy(self, layer: int, at: Span, slots: torch.Tensor) -> int:
        return self._pool.load(layer, slots, self.rows(Step(Kind.KV, layer), at))

    def rows(self, step: Step, at: Span) -> list[memoryview]:
        """The bytes of these tokens, in as many runs as they lie in; they must have landed."""
        tokens = self._of_plan(at)
        size, num_tokens = self.staging.sizes[step], len(self._plan.pages) * self._pool.page_size
        span = Span(size * tokens.start // num_tokens, size * tokens.stop // num_tokens)
        return cut(self.staging.views(step), span)


class InPool(Source):
    """Pages of another model's prefix in the same pool: there is nothing to fetch.

    SGLang keeps them from `admit` to `release`; before, while the request waits, it may evict them.
    """

    def __init__(self, plan: Plan, pool: ServerPool, lock: Callable[[], PoolPages | None]) -> None:
        super().__init__(plan, pool, Staging({}, Deadline.after(0)))
        self._lock: Final = lock
        self._pages: PoolPages | None = None

    def wait(self, step: Step) -> None:
        """It is there."""

    def admit(self) -> bool:
        """What was found when it was planned may be gone, for these very slots even."""
        self._pages = self._lock()
        return self._pages is not None

    def e(self, layer: int, at: Span) -> Sequence[torch.Tensor]:
        layers = self._pool.e_pool.e
        if layer not in layers:
            raise FetchError(f"{self._plan.sender} was unloaded, and layer {layer} has no E")
        return [layers[layer][self._slots(at)]]

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
    """Makes them. Scheduler thread only."""

    server: ThisServer
    cache: Cache
    pool_index: PoolIndex
    _pool: ServerPool

    def of(
        self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache
    ) -> Source | None:
        """Begins to fetch what is elsewhere; None where staging memory is used up."""
        if is_pool(plan.location):
            return InPool(plan, self._pool, lambda: self.pool_index.lock(plan, pages, req, tree))
        deadline = Deadline.after(self.server.settings.fetch_deadline_s)
        staging = self.cache.fetch(plan, pages, deadline, tracing.context_of(req))
        return None if staging is None else Staged(plan, self._pool, staging)
