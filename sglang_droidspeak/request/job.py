"""One admitted request's load: from its source into its KV slots."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachetree import Deadline, DeadlineExceeded, FetchError, Span
from cachetree.planning import Plan

if TYPE_CHECKING:
    import torch

    from sglang_droidspeak.request.source import Source


class ForwardWaitExceeded(FetchError):
    """Layers predicted to have arrived had not when the forward had waited for them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Made by `linker.load`, started with its batch, over when the batch's forward is.

    The loader thread copies; the scheduler thread may abandon the job, after which the loader
    writes nothing more into the slots.
    """

    rid: str
    plan: Plan
    source: Source
    pages: Span
    """The pages loaded, within plan.pages; SGLang may have promised fewer."""
    slots: torch.Tensor
    """KV slots of these pages' tokens, on the device, int64."""
    page_size: int
    match_s: float
    """Time to hash, match and plan."""
    queued_s: float
    """Time from the request's first sight to its admission."""
    patience_s: float = math.inf
    """How long its forward may still wait for layers that are late."""
    copied_s: float = 0.0
    """Time that the loader has spent copying for this job, decoding included."""
    copied_bytes: int = 0
    """Out of host memory, as they are stored."""
    low_rank: list[int] = field(default_factory=list)
    """Layers refreshed by what the adapters' factors change, without the model's own matrix."""
    copying: threading.Lock = field(default_factory=threading.Lock)
    abandoned: bool = False
    """The scheduler thread computes the slots itself; the loader writes nothing more."""
    is_broken: bool = False
    """The loader could not copy a layer."""
    is_lost: bool = False
    """Nor could its slots be computed: the request must be aborted."""

    @property
    def num_tokens(self) -> int:
        return len(self.pages) * self.page_size

    @property
    def tokens(self) -> Span:
        """Those of the pages, counted from the plan's first."""
        start = (self.pages.start - self.plan.pages.start) * self.page_size
        return Span(start, start + self.num_tokens)

    def e(self, layer: int, tokens: Span) -> torch.Tensor:
        """Of some of its tokens, counted from its first; raises FetchError without it."""
        start = self.tokens.start
        return self.source.e(layer, Span(start + tokens.start, start + tokens.stop))

    def wait_staged(self, deadline: Deadline) -> None:
        """Block until every layer is there; raises FetchError where it is not by then."""
        if self.abandoned or self.is_broken:
            raise FetchError("the load was given up")
        try:
            self.source.wait(self.plan.steps, deadline)
        except DeadlineExceeded as exc:
            raise self.source.error or ForwardWaitExceeded(str(exc)) from exc
        if self.source.error is not None:  # the loader has left layers out that came late
            raise self.source.error

    def abandon(self, error: FetchError) -> None:
        """Stop the loader for this job; returns once no copy of it is running."""
        self.source.fail(error)
        with self.copying:
            self.abandoned = True
