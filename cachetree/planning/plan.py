"""Values of a decision: the demand of a request, the matches of its prompt, and its plan or the
reason for none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import msgspec

from cachetree.ids import EMPTY_SPAN, MAX_LAYERS, Kind, Location, ModelId, Span, Step


class Strategy(StrEnum):
    """Order of loads and recompute: load all layers first, load the reused layers first, or load
    while recomputing (DroidSpeak, NSDI '26, section 4.3)."""

    EVERYTHING_FIRST = "everything_first"
    REUSED_FIRST = "reused_first"
    PIPELINED = "pipelined"


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """The longest prefix of the prompt that one model has at one location.

    A struct, because a look-up makes a match for every model, and a frozen dataclass takes several
    times as long to make.
    """

    model: ModelId
    location: Location
    num_pages: int
    e_pages: Annotated[Mapping[int, int], msgspec.Meta(max_length=MAX_LAYERS)]
    """Number of pages from the start that have E without a gap, for each layer with E."""


class PlanId(msgspec.Struct, frozen=True):
    """Identity of a plan of a profile. It does not depend on pages or prompt."""

    sender: ModelId
    receiver: ModelId
    block: tuple[int, int] | None
    """Layers recomputed, half-open; None if no layer is."""
    e_corrected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One request's way to get the KV of `pages`.

      layers [0, block.start)           loaded      sender's KV
      layers [block.start, block.stop)  recomputed  our KV, from the sender's E at block.start
      layers [block.stop, num_layers)   loaded      sender's KV

    With an empty block every layer is loaded. A block that starts at 0 begins with the receiver's
    own embeddings and needs no E.
    """

    sender: ModelId
    receiver: ModelId
    location: Location
    pages: Span
    block: Span
    num_layers: int
    first_difference: int = 0
    """First layer at which sender and receiver differ. The KV of lower layers is bit-identical, and
    so is E at this layer. 0 if layer 0 differs, or if nothing is known."""
    e_map: str = ""
    """Digest of the map that corrects E before the block begins. Empty if E is not corrected, as in
    every exact plan."""
    head: Span = EMPTY_SPAN
    """Pages directly before `pages` that the receiver computes in full, even if a cache has
    them."""
    is_lossy: bool = False
    """Whether loaded entries are encoded with loss. Then even the receiver's own KV is
    approximate."""
    strategy: Strategy = Strategy.PIPELINED
    """Order of loads and recompute. Orders other than PIPELINED are for measurements."""

    @property
    def id(self) -> PlanId:
        """Id of this plan in a profile, without pages or prompt."""
        block = (self.block.start, self.block.stop) if len(self.block) else None
        return PlanId(self.sender, self.receiver, block, bool(self.e_map))

    @property
    def first_page(self) -> int:
        """First page that the plan provides: the first of `head` if there is one, or of `pages`."""
        return self.head.start if self.head else self.pages.start

    @property
    def transition_layers(self) -> tuple[int, ...]:
        """Layer at which the block begins, and at which E is fetched. Empty if the block needs no
        E."""
        return (self.block.start,) if len(self.block) and self.block.start else ()

    @property
    def loaded_layers(self) -> tuple[int, ...]:
        """Layers with the sender's KV, ascending."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.block)

    @property
    def is_exact(self) -> bool:
        """Whether the resulting KV equals the receiver's own. It does if the sender is the receiver
        or differs nowhere, or if all layers from the first that differs are recomputed. With lossy
        entries, it does only if every layer is recomputed."""
        if self.is_lossy or self.sender != self.receiver:
            same = 0 if self.is_lossy else self.first_difference
            is_rest_anew = self.block.start <= same and self.block.stop == self.num_layers
            return is_rest_anew or same == self.num_layers
        return True

    @property
    def steps(self) -> tuple[Step, ...]:
        """Transfer steps to fetch, in the order in which they are needed: E first, then KV layer by
        layer."""
        e = (Step(Kind.E, layer) for layer in self.transition_layers)
        is_everything = self.strategy is Strategy.EVERYTHING_FIRST
        layers = range(self.num_layers) if is_everything else self.loaded_layers
        return (*e, *(Step(Kind.KV, layer) for layer in layers))


class Gate(StrEnum):
    """Whether a request needs a profile that allows its plan (`enforce`), or not (`none`, for
    experiments)."""

    ENFORCE = "enforce"
    NONE = "none"


class Reason(StrEnum):
    """Reason why a request reuses nothing, in order: a later reason is closer to reuse.

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
    """Sender and block that a request asks for. Such a block is used even if it is slow."""

    sender: ModelId | None = None
    block: Span | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The request to plan: its model, how much of its prompt may be reused, and its limits."""

    receiver: ModelId
    num_layers: int
    page_size: int
    num_pages: int
    """Largest number of pages of the prompt that may be reused, counted from its start."""
    first_page: int = 0
    """Number of pages that the device has already."""
    first_approximate: int | None = None
    """Number of leading pages on the device that an approximate plan can build on. None: all plans
    start at `first_page`."""
    num_head: int = 0
    """Number of leading pages that the receiver computes itself if a plan is approximate."""
    num_new_tokens: int = 0
    """Number of tokens after `num_pages`, which are computed in any case."""
    min_pages: int = 1
    """Fewest new pages that are worth a fetch."""
    num_waiting: int = 0
    """Number of requests that wait in the server's queue."""
    ttft_target_s: float | None = None
    requested: Requested = Requested()
    gate: Gate = Gate.ENFORCE
    is_lossy: bool = False
    """True if the family's entries are encoded everywhere except in the engine's own pool."""
    max_recompute_tokens: int | None = None
    """Largest number of tokens that are reused by a plan with recomputed layers. Longer prefixes
    are cut."""
    max_stall_s: float | None = None
    """Largest number of seconds that recompute and copies may take in one scheduler step. Times
    that are not yet measured count as 0. None: no limit."""
    max_fetch_bytes: int | None = None
    """Largest number of bytes that one plan may fetch: the size of the staging memory. None: no
    limit. Pages that this host already has do not count."""
    first_differences: Mapping[ModelId, int] = field(default_factory=dict)
    """First layer at which a sender's weights differ from the receiver's, for each sender. A sender
    that is not listed has the first difference of its profile."""

    @property
    def num_held(self) -> int:
        """Number of pages that the device has already, exact or approximate."""
        return max(self.first_page, self.first_approximate or 0)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole prompt."""
        return self.num_pages * self.page_size + self.num_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReuse:
    reason: Reason
    detail: str = ""
    """Explanation for people: what was missing, and which model lacked it."""
