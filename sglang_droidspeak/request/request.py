"""One request, from SGLang's queue to the end of the forward that loads its prefix. The docstring
of this package explains the phases.

seen ──► planned ◄──► fetching ◄──► arriving ──► ready ──► loading
  └─────────┴────────────┴─────────────┴───────────┴──────────┴──► settled

A fetch may reach `ready` at once. An `arriving` request may load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final

import torch

from cachetree import EMPTY_SPAN, PageHash, Plan, Span
from cachetree.planning import Patience
from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
from sglang_droidspeak.request.load import Load
from sglang_droidspeak.request.planner import Planned
from sglang_droidspeak.request.source import Source, Sources


class Phase(IntEnum):
    """Phase of a request. On several ranks, the lowest phase of any rank counts."""

    SETTLED = 0
    """This package is done with the request: declined, given up, cancelled or loaded."""
    SEEN = 1
    PLANNED = 2
    """The request has a plan, but staging memory is used up. SGLang may admit it for a full
    prefill."""
    FETCHING = 3
    ARRIVING = 4
    """All E of the plan has arrived; the KV should arrive while the block is recomputed. If the
    KV is late, the batch that loads the request prefills its tokens in full."""
    READY = 5
    """All E and KV of the plan has arrived."""
    LOADING = 6
    """SGLang has given the request KV slots and will start its batch in this scheduler step."""


_NEXT: Final[Mapping[Phase, Sequence[Phase]]] = {
    Phase.SEEN: (Phase.PLANNED, Phase.SETTLED),
    Phase.PLANNED: (Phase.FETCHING, Phase.SETTLED),
    Phase.FETCHING: (Phase.PLANNED, Phase.ARRIVING, Phase.READY, Phase.SETTLED),
    Phase.ARRIVING: (Phase.FETCHING, Phase.READY, Phase.LOADING, Phase.SETTLED),
    Phase.READY: (Phase.LOADING, Phase.SETTLED),
    Phase.LOADING: (Phase.SETTLED,),
    Phase.SETTLED: (),
}


class IllegalTransition(Exception):
    """Bug in this package: code moved a request to a phase that cannot follow its present phase."""


class Request:
    """One stay of a request in SGLang's queue. After a retraction, a new object begins. Scheduler
    thread only."""

    def __init__(self, req: Req) -> None:
        self.req: Final = req
        self.phase = Phase.SEEN
        """Phase of the request. Only `reach` changes it."""
        self.seen_s: Final = time.monotonic()
        self.runnable_s: float | None = None
        """Monotonic time in seconds of the first scheduler step that had room for the request while
        it was held back. The wait counts from this time. None before."""
        self.patience = Patience(saving_s=math.inf)
        """Limit of the request's wait, which counts from `runnable_s` on."""
        self.pages: Sequence[PageHash] = ()
        self.num_there = 0
        """Number of leading pages that the request expects SGLang to have on the device. If SGLang
        evicts such a page, the request is `seen` again."""

        self.may_be_planned: Callable[[], bool] = lambda: True
        """Function that returns whether a seen request may be planned now. Until then, the request
        waits for answers of tiers, or for pages that another request computes."""
        self.has_followed = False
        """True once this request has waited for another request to compute shared pages. A request
        waits in this way only once."""

        self.planned: Planned | None = None
        self.own_pages: Sequence[PageHash] = ()
        """Hashes of the request's pages in SGLang's own tree."""
        self.match_s = 0.0
        """Seconds to hash the prompt, match it and plan."""
        self.failure = ""
        """Outcome of the request if this rank cannot follow the plan; empty otherwise."""

        self.source: Source | None = None
        """Source of the plan's pages: from `FETCHING` until the request is settled or planned
        again."""
        self.load: Load | None = None
        """Load into KV slots. Set from `LOADING` on."""
        self.queued_s = 0.0
        """Seconds from `seen_s` until SGLang admits the request."""

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def is_waiting(self) -> bool:
        """Whether the request has a plan, but no slots yet."""
        return Phase.PLANNED <= self.phase <= Phase.READY

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.seen_s

    @property
    def waited_s(self) -> float:
        return 0.0 if self.runnable_s is None else time.monotonic() - self.runnable_s

    @property
    def delay_s(self) -> float:
        """Seconds by which the plan has delayed the request's batch until now. The wait for another
        request's computation does not count: without reuse the device would be as busy."""
        planned_s = self.seen_s + self.match_s
        could_run_s = math.inf if self.runnable_s is None else max(planned_s, self.runnable_s)
        held_s = max(0.0, time.monotonic() - could_run_s)
        return held_s if self.has_followed else self.match_s + held_s

    def left_s(self, num_landed_bytes: int = 0) -> float:
        """Seconds the request may still wait if no byte beyond `num_landed_bytes` arrives.
        Negative: give up."""
        return self.patience.limit_s(num_landed_bytes) - self.waited_s

    def pass_over(self) -> None:
        """Note that a scheduler step could have taken the request if it had not been held back."""
        if self.runnable_s is None:
            self.runnable_s = time.monotonic()

    def reach(self, phase: Phase) -> None:
        """Enter a phase, or stay in it. Release the source in a phase that needs none. Raises
        IllegalTransition."""
        if phase is self.phase:
            return
        if phase not in _NEXT[self.phase]:
            raise IllegalTransition(f"{self.req.rid}: {self.phase.name} to {phase.name}")
        self.phase = phase
        if phase in (Phase.PLANNED, Phase.SETTLED) and self.source is not None:
            self.source.release()
            self.source, self.num_there = None, 0

    def take_up(self, planned: Planned) -> None:
        self.reach(Phase.PLANNED)
        self.planned, self.patience = planned, planned.patience

    def fetch(self, sources: Sources, tree: UnifiedRadixCache) -> None:
        """Begin to fetch the plan's pages, if there is staging memory for them."""
        source = sources.of(self.plan, self.pages, self.req, tree)
        if source is not None:
            self.reach(Phase.FETCHING)
            self.source, self.num_there = source, self.plan.first_page

    def begin_load(self, at: Span, slots: torch.Tensor, head: Span = EMPTY_SPAN) -> None:
        """Create the load of the tokens `at` into `slots`, which SGLang has just allocated. The
        batch computes the tokens of `head`, which are right before them."""
        self.reach(Phase.LOADING)
        self.queued_s = self.age_s
        left_s = max(0.0, self.left_s(self.source.staging.num_landed_bytes))
        self.load = Load(
            plan=self.plan,
            source=self.source,
            at=at,
            slots=slots,
            head=head,
            patience_s=left_s,
        )

    def settle(self) -> None:
        self.reach(Phase.SETTLED)
