"""The four ways in which the receiver answers the same question, and what was measured of them.

Pure: no server, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from statistics import fmean

import msgspec
import numpy as np

from cachetree import ModelId, Span
from sglang_droidspeak.request.meta_info import RequestProvenance


class Condition(str, Enum):
    """Names as they stand in `demo.json`."""

    FULL_PREFILL = "full_prefill"
    """The receiver alone: the reference for quality and for time."""
    FULL_REUSE = "full_reuse"
    """Every layer from the sender, nothing recomputed."""
    BLOCK = "block"
    """The profile's recommended block recomputed, the other layers from the sender."""
    ALL_LAYERS = "all_layers"
    """Every layer recomputed: must answer as the receiver alone does."""

    @property
    def title(self) -> str:
        return self.value.replace("_", " ")

    def controls(self, sender: ModelId, block: Span) -> dict[str, str]:
        """What a request of this condition says in `custom_params["droidspeak"]`."""
        blocks = {
            Condition.FULL_REUSE: "none",
            Condition.BLOCK: f"{block.start}:{block.stop}",
            Condition.ALL_LAYERS: "all",
        }
        if self is Condition.FULL_PREFILL:
            return {"mode": "off"}
        return {"sender": sender, "block": blocks[self]}


def rotated(index: int) -> list[Condition]:
    """All conditions, beginning with another one each time, so that none always comes first."""
    order = list(Condition)
    first = index % len(order)
    return order[first:] + order[:first]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the receiver."""

    ttft_ms: float
    quality: float | None
    """By the data's metric, 0 to 1; None where no answer is known."""
    token_ids: tuple[int, ...]
    num_reusable: int
    """Tokens of this prompt that the sender's cache held."""
    provenance: RequestProvenance

    @property
    def is_reused(self) -> bool:
        provenance = self.provenance
        return provenance.outcome == "reused" and provenance.reused_tokens == self.num_reusable


Samples = Mapping[Condition, Sequence[Sample]]
"""Of every condition, one per question and in the same order."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One condition; means over its requests."""

    quality: float | None
    """None for random weights."""
    ttft_p50_ms: float
    ttft_p90_ms: float
    speedup: float
    """Median TTFT of full prefill, divided by this one's."""
    num_reused: int
    """Requests whose whole document came from the sender's cache."""
    tokens_reused: float
    layers_recomputed: float
    bytes_moved: float
    overlap: float
    """Share of the shorter of fetch and recompute during which the other ran too, 0 to 1."""
    ttft_ms: tuple[float, ...]


def measured_of(samples: Samples) -> dict[Condition, Measured]:
    full_ms = _ttft(samples[Condition.FULL_PREFILL], 50)
    return {condition: _measured(answered, full_ms) for condition, answered in samples.items()}


def _measured(answered: Sequence[Sample], full_ms: float) -> Measured:
    provenances = [it.provenance for it in answered]
    qualities = [it.quality for it in answered if it.quality is not None]
    return Measured(
        quality=round(fmean(qualities), 4) if qualities else None,
        ttft_p50_ms=round(_ttft(answered, 50), 1),
        ttft_p90_ms=round(_ttft(answered, 90), 1),
        speedup=round(full_ms / _ttft(answered, 50), 2),
        num_reused=sum(it.is_reused for it in answered),
        tokens_reused=round(fmean(it.reused_tokens for it in provenances), 1),
        layers_recomputed=round(fmean(it.recomputed_layers for it in provenances), 2),
        bytes_moved=round(fmean(it.fetched_bytes for it in provenances)),
        overlap=round(fmean(it.overlap for it in provenances), 4),
        ttft_ms=tuple(round(it.ttft_ms, 1) for it in answered),
    )


def _ttft(answered: Sequence[Sample], percent: float) -> float:
    return float(np.percentile([it.ttft_ms for it in answered], percent))
