"""One request, from SGLang's queue to the end of the forward that loads its prefix.

seen ──► planned ◄──► fetching ◄──► arriving ──► ready ──► loading
  └─────────┴────────────┴─────────────┴───────────┴──────────┴──► settled

A fetch may end in `ready` at once; an `arriving` request may load.
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
    """How far a request is: on several ranks, as far as on the least of them."""

    SETTLED = 0
    """It reads nothing by a plan, or no more: declined, given up, cancelled, or done."""
    SEEN = 1
    PLANNED = 2
    """Without staging memory: admitted as it is, it does a full prefill."""
    FETCHING = 3
    ARRIVING = 4
    """E is there, and the rest should come within its recompute. If it does not, the batch that
    loads the request prefills its tokens in full."""
    READY = 5
    """Everything is there."""
    LOADING = 6
    """It has slots, and soon a batch."""


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
    """A mistake of this package: a request was to enter a phase that does not follow."""


class Request:
    """One stay in SGLang's queue: who is retracted is seen anew. Scheduler thread only."""

    def __init__(self, req: Req) -> None:
        self.req: Final = req
        self.phase = Phase.SEEN
        """Changed by `reach` alone."""
        self.seen_s: Final = time.monotonic()
        self.runnable_s: float | None = None
        """When a step first could have taken it, on monotonic time: its wait counts from then."""
        self.patience = Patience(saving_s=math.inf)
        """How long it may wait."""
        self.pages: Sequence[PageHash] = ()
        self.num_there = 0
        """On how many of its pages it counts that the device had: while what it needs comes, or has
        come; and where it needs nothing more."""

        self.may_be_planned: Callable[[], bool] = lambda: True
        """Seen, whether all that it waits for is there: answers of tiers that do not advertise, or
        what another request computes."""
        self.has_followed = False
        """It has waited for another request, and does so no more."""

        self.planned: Planned | None = None
        self.own_pages: Sequence[PageHash] = ()
        """The pages as SGLang names them."""
        self.match_s = 0.0
        """Time to hash, match and plan."""
        self.failure = ""
        """The outcome where this rank cannot go on with the plan."""

        self.source: Source | None = None
        """From fetching until it is settled."""
        self.load: Load | None = None
        """Since it loads."""
        self.queued_s = 0.0
        """Time from its first sight to its admission."""

    @property
    def plan(self) -> Plan:
        """Only of one that was planned."""
        return self.planned.plan

    @property
    def is_waiting(self) -> bool:
        """Whether it has a plan, and no slots."""
        return Phase.PLANNED <= self.phase <= Phase.READY

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.seen_s

    @property
    def waited_s(self) -> float:
        return 0.0 if self.runnable_s is None else time.monotonic() - self.runnable_s

    @property
    def delay_s(self) -> float:
        """Seconds by which its plan has put off its batch until now. The wait for a request that
        computes the same pages is not among them: without reuse the device is as busy."""
        planned_s = self.seen_s + self.match_s
        could_run_s = math.inf if self.runnable_s is None else max(planned_s, self.runnable_s)
        held_s = max(0.0, time.monotonic() - could_run_s)
        return held_s if self.has_followed else self.match_s + held_s

    def left_s(self, num_landed_bytes: int = 0) -> float:
        """How much longer it waits while no more than that comes; negative once it gives up."""
        return self.patience.limit_s(num_landed_bytes) - self.waited_s

    def pass_over(self) -> None:
        """A step could have taken it, had it not been held back."""
        if self.runnable_s is None:
            self.runnable_s = time.monotonic()

    def reach(self, phase: Phase) -> None:
        """Enter a phase, or stay in it; in those that need no source, it is released."""
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
        """Begin to bring together what the plan needs, if there is memory for it."""
        source = sources.of(self.plan, self.pages, self.req, tree)
        if source is not None:
            self.reach(Phase.FETCHING)
            self.source, self.num_there = source, self.plan.first_page

    def begin_load(self, at: Span, slots: torch.Tensor, head: Span = EMPTY_SPAN) -> None:
        """SGLang has these slots for tokens that stand there in the prompt, and slots for a head
        before them."""
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
