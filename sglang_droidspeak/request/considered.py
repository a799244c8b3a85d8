"""What each request's plan, or that there is none, was chosen from: kept beside the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cachetree.planning import Considered
    from sglang_droidspeak.engine.names import Req

_CONSIDERED: Final = "droidspeak_considered"


def consider(req: Req, considered: Considered) -> None:
    """The last word counts."""
    setattr(req, _CONSIDERED, considered)


def considered_of(req: Req) -> Considered | None:
    """None where there was nothing to choose from."""
    return getattr(req, _CONSIDERED, None)
