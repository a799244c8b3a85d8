"""What the two halves of the drift guard, and an operator, tell each other."""

from __future__ import annotations

from typing import Final

import msgspec

from cachetree.planning import PlanId
from sglang_droidspeak.guard.plans import WatchedPair

ALL: Final = "all"


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """How far the answer of one request was from an exact run."""

    plan: PlanId
    tv: float
    """Total variation, 0 to 1."""


class GuardQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the front end and an operator tell; without either, only how things are is asked."""

    shadow: Shadow | None = None
    missed: dict[str, int] = {}
    """Shadows that came to nothing, by what became of them: `dropped` or `failed`."""
    reset: str | None = None
    """The id of a sender whose pairs begin anew, or `all`."""


class GuardState(msgspec.Struct, frozen=True, kw_only=True):
    shadow_rate: float
    pairs: tuple[WatchedPair, ...]
    suspects: tuple[PlanId, ...]
