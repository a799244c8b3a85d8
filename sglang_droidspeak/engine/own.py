"""Requests that the server itself sends: SGLang's `custom_params` say so, beside the controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import Req

ANSWERED: Final = "droidspeak_answered"
"""How many tokens at the end of its input are of an answer."""


def is_own(req: Req) -> bool:
    """Whether no user has sent it."""
    return ANSWERED in _told(req)


def num_answered(req: Req) -> int:
    """How many tokens at the end of the prompt are of the answer."""
    num = _told(req).get(ANSWERED, 0)
    return num if isinstance(num, int) and 0 < num < len(req.origin_input_ids) else 0


def _told(req: Req) -> dict[str, Any]:
    return req.sampling_params.custom_params or {}
