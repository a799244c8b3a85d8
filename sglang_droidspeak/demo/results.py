"""The ways in which the receiver answers the same question, what was measured of them, and what
has to hold for a demo to count.

Pure: no server, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from statistics import fmean

import msgspec
import numpy as np

from cachetree import ModelId, Span
from cachetree.planning import PairProfile
from profiles.stats.gate import interval
from sglang_droidspeak.request.meta_info import RequestProvenance


class Condition(StrEnum):
    """Names as they stand in `demo.json`."""

    FULL_PREFILL = "full_prefill"
    """The receiver alone: the reference for quality and for time."""
    FULL_REUSE = "full_reuse"
    """Every layer from the sender, nothing recomputed."""
    BLOCK = "block"
    """The profile's recommended block recomputed, the other layers from the sender."""
    ALORA_REUSE = "alora_reuse"
    """The same skill as an activated LoRA, every layer from the sender: exact."""
    ALL_LAYERS = "all_layers"
    """Every layer recomputed: must answer as the receiver alone does."""
    ALORA_PREFILL = "alora_prefill"
    """The activated LoRA alone: must answer as it does with reuse."""

    @property
    def title(self) -> str:
        return self.value.replace("_", " ").replace("alora", "aLoRA")

    @property
    def is_activated(self) -> bool:
        return self in (Condition.ALORA_REUSE, Condition.ALORA_PREFILL)

    @property
    def is_full(self) -> bool:
        """Whether nothing is reused."""
        return self in (Condition.FULL_PREFILL, Condition.ALORA_PREFILL)

    def controls(self, sender: ModelId, block: Span) -> dict[str, str]:
        """What a request of this condition says in `custom_params["droidspeak"]`."""
        blocks = {Condition.BLOCK: f"{block.start}:{block.stop}", Condition.ALL_LAYERS: "all"}
        if self.is_full:
            return {"mode": "off"}
        return {"sender": sender, "block": blocks.get(self, "none")}


def rotated(conditions: Sequence[Condition], index: int) -> list[Condition]:
    """All conditions, beginning with another one each time, so that none always comes first."""
    first = index % len(conditions)
    return [*conditions[first:], *conditions[:first]]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the receiver."""

    ttft_ms: float
    quality: float | None
    """By the data's metric, 0 to 1; None where no answer is known."""
    token_ids: tuple[int, ...]
    num_reusable: int
    """Tokens of this prompt that the sender's cache held."""
    document: int = 0
    """Number of the document that was asked about."""
    provenance: RequestProvenance

    @property
    def is_reused(self) -> bool:
        """Whether most of it was. First pages that all prompts share the receiver computes."""
        provenance = self.provenance
        is_loaded = provenance.outcome in ("reused", "own")
        return is_loaded and 2 * provenance.reused_tokens > self.num_reusable


Samples = Mapping[Condition, Sequence[Sample]]
"""Of every condition, one per question and in the same order."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One condition; means over its requests."""

    quality: float | None
    """None for random weights."""
    quality_95: tuple[float, float] | None = None
    """Interval by a bootstrap of documents."""
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
    qualities: dict[int, list[float]] = {}
    for it in answered:
        if it.quality is not None:
            qualities.setdefault(it.document, []).append(it.quality)
    of_all = interval([*qualities.values()]) if qualities else None
    return Measured(
        quality=of_all and round(of_all.mean, 4),
        quality_95=of_all and (round(of_all.low, 4), round(of_all.high, 4)),
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


LEAST_REUSED_SHARE = 0.9
"""A fetch that misses its deadline on a busy machine is no defect; a tenth of them is."""
LEAST_AGREEMENT_16_BIT = 0.75
"""In 16 bits the rounding depends on the shape of the batch, which decides between near equals."""


def reuse_failures(samples: Samples, pair: str) -> Iterator[str]:
    """Reuse has to happen where it was asked for, and nowhere else. Each failure is one
    sentence for a person, here and below."""
    for condition, answered in samples.items():
        if condition.is_full:
            num_wrong = sum(sample.provenance.reused_tokens > 0 for sample in answered)
            if num_wrong:
                yield f"{pair}: {num_wrong} requests of {condition.title} reused a cache"
            continue
        if condition.is_activated and not all(it.provenance.exact for it in answered):
            yield f"{pair}: an answer of {condition.title} is not exact"
        num_reused = sum(sample.is_reused for sample in answered)
        if num_reused < LEAST_REUSED_SHARE * len(answered):
            outcomes = Counter(sample.provenance.outcome for sample in answered)
            found = ", ".join(f"{count} × {outcome}" for outcome, count in outcomes.most_common())
            yield (
                f"{pair}: only {num_reused} of {len(answered)} requests of {condition.title} "
                f"reused the whole document ({found})"
            )


def equality_failures(samples: Samples, pair: str, dtype: str) -> Iterator[str]:
    """Recomputing all layers is a full prefill by another way; so is the exact reuse of an
    activated LoRA."""
    least = 1.0 if dtype == "float32" else LEAST_AGREEMENT_16_BIT
    stop = None if least == 1.0 else 1
    for alone, reused in (
        (Condition.FULL_PREFILL, Condition.ALL_LAYERS),
        (Condition.ALORA_PREFILL, Condition.ALORA_REUSE),
    ):
        pairs = list(zip(samples.get(alone, ()), samples.get(reused, ()), strict=True))
        num_equal = sum(own.token_ids[:stop] == other.token_ids[:stop] for own, other in pairs)
        if num_equal < least * len(pairs):
            yield (
                f"{pair}: {reused.title} gave the answer of {alone.title} for only "
                f"{num_equal} of {len(pairs)} prompts, in {dtype}"
            )


def quality_failures(found: Mapping[Condition, Measured], profile: PairProfile) -> Iterator[str]:
    """The recommended block has to keep what its profile promises, on this data."""
    full, block = found[Condition.FULL_PREFILL].quality, found[Condition.BLOCK].quality
    if full is None or block is None:
        return
    floor = full * (1 - profile.tolerance)
    if block < floor:
        yield (
            f"the recommended block reaches {profile.metric} {block:.3f}, below {floor:.3f} (full "
            f"prefill {full:.3f}, the profile's tolerance {100 * profile.tolerance:.3g}%); "
            "profile the pair on data like this"
        )
