"""What a request asks, what models have of its prompt, and what it takes of that or why nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import msgspec

from cachetree.ids import EMPTY_SPAN, MAX_LAYERS, Kind, Location, ModelId, Span, Step


class Strategy(StrEnum):
    """How loads and recompute share time (DroidSpeak, NSDI '26, section 4.3)."""

    EVERYTHING_FIRST = "everything_first"
    REUSED_FIRST = "reused_first"
    PIPELINED = "pipelined"


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """The longest prefix that one model has at one location.

    A struct, as a walk makes one for every model: a frozen dataclass takes several times as long.
    """

    model: ModelId
    location: Location
    num_pages: int
    e_pages: Annotated[Mapping[int, int], msgspec.Meta(max_length=MAX_LAYERS)]
    """For each layer with E: how many pages from the start have it without a gap."""


class PlanId(msgspec.Struct, frozen=True):
    """A plan of a profile, whichever pages of whichever prompt it is for."""

    sender: ModelId
    receiver: ModelId
    block: tuple[int, int] | None
    """Layers recomputed, half-open; None where none are."""
    e_corrected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """For one request: how the KV of `pages` comes to be.

        layers [0, block.start)           loaded      sender's KV
        layers [block.start, block.stop)  recomputed  our KV, from the sender's E at block.start
        layers [block.stop, num_layers)   loaded      sender's KV

    An empty block loads every layer. A block that starts at 0 begins with the receiver's own
    embeddings and needs no E.
    """

    sender: ModelId
    receiver: ModelId
    location: Location
    pages: Span
    block: Span
    num_layers: int
    first_difference: int = 0
    """First layer at which sender and receiver differ: below it their KV is bit-identical, and so
    is E at it. 0 promises nothing."""
    e_map: str = ""
    """Digest of the map that corrects E before the block begins; empty where none does. What is
    exact has none."""
    head: Span = EMPTY_SPAN
    """Pages right before `pages` that the receiver computes in full, whoever has them."""
    is_lossy: bool = False
    """What is loaded was encoded: even the receiver's own KV comes back approximate."""
    strategy: Strategy = Strategy.PIPELINED
    """How loads and recompute share time; the others are there to be compared with."""

    @property
    def id(self) -> PlanId:
        """What tells it from other plans, whatever the prompt and wherever the pages are."""
        block = (self.block.start, self.block.stop) if len(self.block) else None
        return PlanId(self.sender, self.receiver, block, bool(self.e_map))

    @property
    def first_page(self) -> int:
        """The first page that the device has not."""
        return self.head.start if self.head else self.pages.start

    @property
    def transition_layers(self) -> tuple[int, ...]:
        """The layer whose E is fetched, where the block begins; none where it needs none."""
        return (self.block.start,) if len(self.block) and self.block.start else ()

    @property
    def loaded_layers(self) -> tuple[int, ...]:
        """The layers whose KV is the sender's, ascending."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.block)

    @property
    def is_exact(self) -> bool:
        """True where the result is the receiver's own KV: its own cache, every layer anew, or all
        layers from the first that differs."""
        if self.is_lossy or self.sender != self.receiver:
            same = 0 if self.is_lossy else self.first_difference
            is_rest_anew = self.block.start <= same and self.block.stop == self.num_layers
            return is_rest_anew or same == self.num_layers
        return True

    @property
    def steps(self) -> tuple[Step, ...]:
        """What to fetch, in the order of need: E first, then KV in layer order."""
        e = (Step(Kind.E, layer) for layer in self.transition_layers)
        is_everything = self.strategy is Strategy.EVERYTHING_FIRST
        layers = range(self.num_layers) if is_everything else self.loaded_layers
        return (*e, *(Step(Kind.KV, layer) for layer in layers))


class Gate(StrEnum):
    """Whether a pair's profile decides; none is for experiments."""

    ENFORCE = "enforce"
    NONE = "none"


class Reason(StrEnum):
    """Why a request is not reused, from the least to the most that was found.

    The values are labels in metrics and in `meta_info`; they never change.
    """

    OFF = "off"
    NO_MATCH = "no_match"
    TOO_SHORT = "too_short"
    ON_DEVICE = "on_device"
    NO_PROFILE = "no_profile"
    GATE_FAILED = "gate_failed"
    LONGER_THAN_MEASURED = "longer_than_measured"
    UNGATED_BLOCK = "ungated_block"
    NO_E = "no_e"
    RECOMPUTE_TOO_LONG = "recompute_too_long"
    SLOWER = "slower"
    STAGING_FULL = "staging_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """What one request asks for itself. A `block` is obeyed without a look at the costs."""

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
    num_head: int = 0
    """First pages that approximate plans leave to the receiver."""
    num_new_tokens: int = 0
    """Tokens after `num_pages`, which are computed in any case."""
    min_pages: int = 1
    """Fewer new pages than this are not worth a fetch."""
    num_waiting: int = 0
    """Depth of the server's queue."""
    ttft_target_s: float | None = None
    requested: Requested = Requested()
    gate: Gate = Gate.ENFORCE
    is_lossy: bool = False
    """The family's entries are encoded, wherever they are but in the engine's own pool."""
    max_recompute_tokens: int | None = None
    """Of longer prefixes only so many tokens are reused where layers are recomputed."""
    max_stall_s: float | None = None
    """Longest that recompute and copies may take in one step, once they were measured."""
    max_fetch_bytes: int | None = None
    """What comes from elsewhere is staged in so much memory."""
    first_differences: Mapping[ModelId, int] = field(default_factory=dict)
    """By sender whose content was compared with the receiver's: the first layer that differs. Of
    others the profile tells."""

    @property
    def num_held(self) -> int:
        """Pages that the device has already, exact or approximate."""
        return max(self.first_page, self.first_approximate or 0)

    @property
    def num_tokens(self) -> int:
        """Of the whole prompt."""
        return self.num_pages * self.page_size + self.num_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReuse:
    reason: Reason
    detail: str = ""
    """For a person: what was missing, of whom."""
