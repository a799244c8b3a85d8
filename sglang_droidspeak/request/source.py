"""Where the pages of a plan come from: staged in host memory, or in this server's own KV pool.

progress   what has come                            while the request waits
admit      hold what is there from now on           when SGLang has slots for it
e, copy    of tokens, counted from the plan's first when its batch runs
release    nobody reads it any more
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from cachetree import Deadline, DeadlineExceeded, FetchError, Kind, PageHash, Span, Step, is_pool

if TYPE_CHECKING:
    import torch

    from cachetree import Cache, Plan
    from cachetree.memory import BudgetedStaging
    from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
    from sglang_droidspeak.request.low_rank import LowRank
    from sglang_droidspeak.start.site import Site
    from sglang_droidspeak.store.pool import PoolIndex, PoolPages
    from sglang_droidspeak.store.rows import ServerPool


@dataclass(frozen=True, slots=True)
class Arrival:
    """What has come of a plan's steps."""

    num_bytes: int = 0
    num_landed_bytes: int = 0
    elapsed_s: float = 0.0
    has_e: bool = True
    """Of every layer at which a recompute begins."""
    is_complete: bool = True


class Source(Protocol):
    """Scheduler thread only but for `wait` and `copy`, which the loader calls too."""

    started_s: float
    """On monotonic time; and when all had come, if it has."""
    completed_s: float | None
    num_bytes: int
    num_landed_bytes: int
    error: FetchError | None

    def progress(self) -> Arrival:
        """Raises FetchError where no more will come."""

    def admit(self) -> bool:
        """Whether all is there still, or coming; from now on until `release`."""

    def wait(self, steps: Iterable[Step], deadline: Deadline | None = None) -> None:
        """Block until these have come; raises FetchError where they have not by then."""

    def e(self, layer: int, tokens: Span) -> torch.Tensor:
        """`[len(tokens), hidden]`, on the device or the host; raises FetchError without it."""

    def copy(self, layer: int, tokens: Span, slots: torch.Tensor) -> int:
        """Copy the KV of these tokens into as many slots; the bytes that came from host memory."""

    def refresh(self, low_rank: LowRank, layer: int, loaded: Loaded) -> bool:
        """Make the receiver's KV of a layer from the sender's; False where that cannot be done."""

    def adopt_e(self, tokens: Span, slots: torch.Tensor) -> None:
        """The slots have been loaded with what is exact: give them E, where it lies beside."""

    def fail(self, error: FetchError) -> None:
        """Nothing more is wanted of it."""

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tokens that are being loaded."""

    tokens: Span
    """Counted from the plan's first."""
    slots: torch.Tensor
    at: Span
    """The same tokens in the prompt."""


class Staged:
    """Fetched from a peer or a disk into host memory, or being fetched."""

    def __init__(self, staging: BudgetedStaging, plan: Plan, pool: ServerPool) -> None:
        self.staging: Final = staging
        self._plan: Final = plan
        self._pool: Final = pool

    @property
    def started_s(self) -> float:
        return self.staging.started_s

    @property
    def completed_s(self) -> float | None:
        return self.staging.completed_s

    @property
    def num_bytes(self) -> int:
        return self.staging.num_bytes

    @property
    def num_landed_bytes(self) -> int:
        return self.staging.num_landed_bytes

    @property
    def error(self) -> FetchError | None:
        return self.staging.error

    def progress(self) -> Arrival:
        it = self.staging
        if not it.is_complete:
            if it.deadline.has_passed:
                it.fail(DeadlineExceeded("the fetch did not end in time"))
            if it.error is not None:
                raise it.error
        return Arrival(
            num_bytes=it.num_bytes,
            num_landed_bytes=it.num_landed_bytes,
            elapsed_s=time.monotonic() - it.started_s,
            has_e=all(it.has_landed(Step(Kind.E, at)) for at in self._plan.transition_layers),
            is_complete=it.is_complete,
        )

    def admit(self) -> bool:
        return True

    def wait(self, steps: Iterable[Step], deadline: Deadline | None = None) -> None:
        for step in steps:
            self.staging.wait(step, deadline)

    def e(self, layer: int, tokens: Span) -> torch.Tensor:
        rows = self.rows(Step(Kind.E, layer), tokens)
        return self._pool.coding.load(rows, self._pool.e_pool.no_rows)

    def copy(self, layer: int, tokens: Span, slots: torch.Tensor) -> int:
        rows = self.rows(Step(Kind.KV, layer), tokens)
        self._pool.rows.write_from(layer, slots, rows)
        return rows.nbytes

    def refresh(self, low_rank: LowRank, layer: int, loaded: Loaded) -> bool:
        return False

    def adopt_e(self, tokens: Span, slots: torch.Tensor) -> None:
        """It is of use to one forward alone, and gone with it."""

    def fail(self, error: FetchError) -> None:
        self.staging.fail(error)

    def release(self) -> None:
        self.staging.release()

    def rows(self, step: Step, tokens: Span) -> memoryview:
        """The staged bytes of these tokens; they must have landed."""
        view = self.staging.view(step)
        num_tokens = len(self._plan.pages) * self._pool.page_size
        start, stop = (view.nbytes * it // num_tokens for it in (tokens.start, tokens.stop))
        return view[start:stop]


class InPool:
    """Pages of another model's prefix in the same pool: there is nothing to fetch.

    SGLang keeps them from `admit` to `release`; before, while the request waits, it may evict them.
    """

    num_bytes = num_landed_bytes = 0
    error = None

    def __init__(self, plan: Plan, lock: Callable[[], PoolPages | None], pool: ServerPool) -> None:
        self._plan: Final = plan
        self._lock: Final = lock
        self._pool: Final = pool
        self._pages: PoolPages | None = None
        self.started_s = self.completed_s = time.monotonic()

    def progress(self) -> Arrival:
        return Arrival()

    def admit(self) -> bool:
        """What was found when it was planned may be gone, for these very slots even."""
        self._pages = self._lock()
        return self._pages is not None

    def wait(self, steps: Iterable[Step], deadline: Deadline | None = None) -> None:
        """It is there."""

    def e(self, layer: int, tokens: Span) -> torch.Tensor:
        layers = self._pool.e_pool.e
        if layer not in layers:
            raise FetchError(f"{self._plan.sender} was unloaded, and layer {layer} has no E")
        return layers[layer][self._slots(tokens)]

    def copy(self, layer: int, tokens: Span, slots: torch.Tensor) -> int:
        self._pool.rows.copy(layer, self._slots(tokens), slots)
        return 0

    def refresh(self, low_rank: LowRank, layer: int, loaded: Loaded) -> bool:
        if not low_rank.can_refresh(self._plan.sender, self._plan.receiver, layer):
            return False
        source = self._slots(loaded.tokens)
        low_rank.refresh(self._plan, layer, source, loaded.slots, loaded.at)
        return True

    def adopt_e(self, tokens: Span, slots: torch.Tensor) -> None:
        plan = self._plan
        first_own = plan.block.start if len(plan.block) else plan.num_layers
        self._pool.e_pool.adopt(self._slots(tokens), slots, first_own)

    def fail(self, error: FetchError) -> None:
        """Nothing is under way."""

    def release(self) -> None:
        if self._pages is not None:
            self._pages.release()
        self._pages = None

    def _slots(self, tokens: Span) -> torch.Tensor:
        assert self._pages is not None, "not admitted"
        return self._pages.slots[tokens.start : tokens.stop]


class Sources:
    """Makes them. Scheduler thread only."""

    def __init__(self, site: Site, cache: Cache, noted: PoolIndex, pool: ServerPool) -> None:
        self.site: Final = site
        self.cache: Final = cache
        self.noted: Final = noted
        self._pool: Final = pool

    def of(
        self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache
    ) -> Source | None:
        """Begins to fetch what is elsewhere; None where staging memory is used up."""
        if is_pool(plan.location):
            return InPool(plan, lambda: self.noted.lock(plan, pages, req, tree), self._pool)
        deadline = Deadline.after(self.site.settings.fetch_deadline_s)
        staging = self.cache.fetch(plan, pages, deadline)
        return None if staging is None else Staged(staging, plan, self._pool)
