"""What was measured, per request and per condition. Pure: no server, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from profiles.data import token_f1
from sglang_droidspeak.demo.conditions import Condition
from sglang_droidspeak.request.meta_info import RequestProvenance


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the receiver."""

    ttft_ms: float
    text: str
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


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the requests of one condition."""

    num_requests: int
    num_reused: int
    """Requests whose whole document came from the sender's cache."""
    tokens_reused: float
    layers_recomputed: float
    layers_loaded: float
    bytes_moved: float
    fetch_ms: float
    recompute_ms: float
    overlap: float
    """Share of the shorter of fetch and recompute during which the other ran too, 0 to 1."""


class Quality(Reuse, frozen=True, kw_only=True):
    f1: float
    """Mean token F1, 0 to 1."""


class Speed(Reuse, frozen=True, kw_only=True):
    ttft_p50_ms: float
    ttft_p90_ms: float
    speedup: float
    """Median TTFT of full prefill, divided by this one's."""
    ttft_ms: tuple[float, ...]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy does; ValueError for no values.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 50), percentile([1.0, 2.0], 90)
    (2.5, 1.9)
    """
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def quality_of(samples: Samples, answers: Sequence[Sequence[str]]) -> dict[Condition, Quality]:
    """`answers` are those accepted for each question, in the samples' order."""
    return {
        condition: Quality(
            **_means(answered),
            f1=round(
                fmean(
                    token_f1(sample.text, accepted)
                    for sample, accepted in zip(answered, answers, strict=True)
                ),
                4,
            ),
        )
        for condition, answered in samples.items()
    }


def speed_of(samples: Samples) -> dict[Condition, Speed]:
    times = {
        condition: [sample.ttft_ms for sample in answered]
        for condition, answered in samples.items()
    }
    full_ms = percentile(times[Condition.FULL_PREFILL], 50)
    return {
        condition: Speed(
            **_means(answered),
            ttft_p50_ms=round(percentile(times[condition], 50), 1),
            ttft_p90_ms=round(percentile(times[condition], 90), 1),
            speedup=round(full_ms / percentile(times[condition], 50), 2),
            ttft_ms=tuple(round(ms, 1) for ms in times[condition]),
        )
        for condition, answered in samples.items()
    }


def _means(samples: Sequence[Sample]) -> dict[str, float]:
    provenances = [sample.provenance for sample in samples]
    return {
        "num_requests": len(samples),
        "num_reused": sum(sample.is_reused for sample in samples),
        "tokens_reused": round(fmean(it.reused_tokens for it in provenances), 1),
        "layers_recomputed": round(fmean(it.recomputed_layers for it in provenances), 2),
        "layers_loaded": round(fmean(it.loaded_layers for it in provenances), 2),
        "bytes_moved": round(fmean(it.fetched_bytes for it in provenances)),
        "fetch_ms": round(fmean(it.fetch_ms for it in provenances), 2),
        "recompute_ms": round(fmean(it.recompute_ms for it in provenances), 2),
        "overlap": round(fmean(it.overlap for it in provenances), 4),
    }
