"""Cause and remedy of each outcome, from `outcomes.yaml`. docs/no-reuse.md shows the same text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

import msgspec

OUT_OF_SERVICE: Final = (
    "the drift guard has taken it out of service: its answers were further from full prefill's "
    "than is allowed; `droidspeak guard` shows how far"
)
"""Detail of the outcome `gate_failed` for a pair that the guard has stopped."""


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cause and remedy of an outcome, as Markdown with links relative to docs/."""

    cause: str
    remedy: str


SECTIONS: Final[Mapping[str, Mapping[str, Advice]]] = msgspec.yaml.decode(
    files(__package__).joinpath("outcomes.yaml").read_bytes(), type=dict[str, dict[str, Advice]]
)
_BY_OUTCOME: Final = {name: it for part in SECTIONS.values() for name, it in part.items()}


def advice_on(outcome: str) -> Advice:
    """Return the advice as plain text, with links as file names. An unknown outcome gets the advice
    on a failed fetch."""
    advice = _BY_OUTCOME.get(outcome) or _BY_OUTCOME["fallback: FetchError"]
    return Advice(_plain(advice.cause), _plain(advice.remedy))


def _plain(text: str) -> str:
    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", r"\1 (docs/\2)", text)
