"""The question of one request, and the answer that there is nothing for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from cachetree.ids import ModelId, Span


class Gate(str, Enum):
    """Whether a pair's profile decides; off is for experiments."""

    ENFORCE = "enforce"
    OFF = "off"


class Mode(str, Enum):
    AUTO = "auto"
    OFF = "off"


class Reason(str, Enum):
    """Why a request is not reused, from the least to the most that was found.

    The values are labels in metrics and in `meta_info`; they never change.
    """

    OFF = "off"
    NO_MATCH = "no_match"
    TOO_SHORT = "too_short"
    NO_PROFILE = "no_profile"
    GATE_FAILED = "gate_failed"
    LONGER_THAN_MEASURED = "longer_than_measured"
    UNGATED_BLOCK = "ungated_block"
    NO_E = "no_e"
    RECOMPUTE_TOO_LONG = "recompute_too_long"
    SLOWER = "slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """What one request asks for itself. A `block` is obeyed without a look at the costs."""

    mode: Mode = Mode.AUTO
    sender: ModelId | None = None
    block: Span | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be answered: which model, which part of the prompt, how pressing."""

    receiver: ModelId
    num_layers: int
    page_size: int
    num_pages: int
    """Pages of the prompt that may be reused at most, counted from its start."""
    first_page: int = 0
    """Pages that the device has already."""
    first_approximate: int | None = None
    """Those that it has as approximate KV, which approximate plans go on from; None: the others."""
    num_new_tokens: int = 0
    """Tokens after `num_pages`, which are computed in any case."""
    min_pages: int = 1
    """Fewer new pages than this are not worth a fetch."""
    num_waiting: int = 0
    """Depth of the server's queue."""
    ttft_target_s: float | None = None
    requested: Requested | None = None
    gate: Gate = Gate.ENFORCE
    is_lossy: bool = False
    """The family's entries are encoded, wherever they are but in the engine's own pool."""
    max_recompute_tokens: int | None = None
    """Of longer prefixes only so many tokens are reused where layers are recomputed."""
    max_recompute_s: float | None = None
    """The same as time, once the device's speed is known."""
    first_differences: Mapping[ModelId, int] = field(default_factory=dict)
    """By sender whose content was compared with the receiver's: the first layer that differs. Of
    others the profile tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReuse:
    reason: Reason
    detail: str = ""
    """For a person: what was missing, of whom."""
