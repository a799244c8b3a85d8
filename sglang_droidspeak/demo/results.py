"""Conditions of a demo (ways in which the receiver answers a question), their measurements, and the
checks of a valid demo.

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
from profiles.stats.gate import ERROR_RATE, interval
from sglang_droidspeak.request.meta_info import RequestProvenance


class Condition(StrEnum):
    """Ways of the receiver to answer a question, by their names in `demo.json`."""

    FULL_PREFILL = "full_prefill"
    """The receiver prefills in full: the reference for quality and time."""
    FULL_REUSE = "full_reuse"
    """Load every layer from the sender, and recompute none."""
    BLOCK = "block"
    """Recompute the profile's recommended block, and load the other layers from the sender."""
    ALORA_REUSE = "alora_reuse"
    """Answer by an activated LoRA of the same skill, with every layer loaded. This is exact."""
    ALL_LAYERS = "all_layers"
    """Recompute every layer. The answer must equal full prefill's."""
    ALORA_PREFILL = "alora_prefill"
    """Answer by the activated LoRA with full prefill. The answer must equal ALORA_REUSE's."""

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
        """Controls of a request under this condition, for `custom_params["droidspeak"]`."""
        blocks = {Condition.BLOCK: f"{block.start}:{block.stop}", Condition.ALL_LAYERS: "all"}
        if self.is_full:
            return {"mode": "off"}
        return {"sender": sender, "block": blocks.get(self, "none")}


def rotated(conditions: Sequence[Condition], index: int) -> list[Condition]:
    """Return the conditions, rotated by `index`, so that no condition is always the first."""
    first = index % len(conditions)
    return [*conditions[first:], *conditions[:first]]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the receiver."""

    ttft_ms: float
    quality: float | None
    """Quality by the data's metric, 0 to 1; None if no answer is known."""
    token_ids: tuple[int, ...]
    num_reusable: int
    """Number of tokens of this prompt that the sender's cache held."""
    document: int = 0
    """Index of the document that was asked about."""
    provenance: RequestProvenance

    @property
    def is_reused(self) -> bool:
        """Whether more than half of the reusable tokens were reused. The receiver itself computes
        some of them: first pages that all prompts share."""
        provenance = self.provenance
        is_loaded = provenance.outcome in ("reused", "own")
        return is_loaded and 2 * provenance.reused_tokens > self.num_reusable


Samples = Mapping[Condition, Sequence[Sample]]
"""Samples (answers) by condition: one for each question, in the same order."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one condition: means over its requests."""

    quality: float | None
    """Mean quality. None for random weights."""
    quality_95: tuple[float, float] | None = None
    """Confidence interval (95 %) by a bootstrap over documents."""
    ttft_p50_ms: float
    ttft_p90_ms: float
    speedup: float
    """Median TTFT of full prefill, divided by this condition's."""
    num_reused: int
    """Number of requests that reused most of their document."""
    tokens_reused: float
    layers_recomputed: float
    bytes_moved: float
    overlap: float
    """Overlap of fetch and recompute, as a share of the shorter one, 0 to 1."""
    ttft_ms: tuple[float, ...]


def measured_of(samples: Samples) -> dict[Condition, Measured]:
    full_ms = _ttft(samples[Condition.FULL_PREFILL], 50)
    return {condition: _measured(answered, full_ms) for condition, answered in samples.items()}


def _measured(answered: Sequence[Sample], full_ms: float) -> Measured:
    provenances = [it.provenance for it in answered]
    qualities: dict[int, list[float]] = {}
    for sample in answered:
        if sample.quality is not None:
            qualities.setdefault(sample.document, []).append(sample.quality)
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
"""Least share of requests that must reuse. On a busy machine a fetch may miss its deadline, but not
a tenth of all fetches."""
LEAST_AGREEMENT_16_BIT = 0.75
"""Least share of answers with the right first token in 16 bits. The batch's shape changes the
rounding, which decides between two tokens that are about equally likely."""


def reuse_failures(samples: Samples, pair: str) -> Iterator[str]:
    """Yield a sentence for each condition with a failure: requests for full prefill reused KV, too
    few others reused it, or an activated LoRA's answer is not exact."""
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
            listed = ", ".join(f"{count} × {outcome}" for outcome, count in outcomes.most_common())
            yield (
                f"{pair}: only {num_reused} of {len(answered)} requests of {condition.title} "
                f"reused the whole document ({listed})"
            )


def equality_failures(samples: Samples, pair: str, dtype: str) -> Iterator[str]:
    """Yield sentences about answers that differ from full prefill although they must be equal: with
    all layers recomputed, or by an activated LoRA."""
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


class QualityCheck(msgspec.Struct, frozen=True):
    """Comparison of the recommended block's quality with what its profile accepts."""

    failures: tuple[str, ...] = ()
    """A sentence if the block loses more than the tolerance, and hardly by chance."""
    notes: tuple[str, ...] = ()
    """A sentence if the block loses more than the tolerance, perhaps by chance."""


def check_quality(samples: Samples, profile: PairProfile) -> QualityCheck:
    """Compare the block's loss of quality with the profile's tolerance. Each document counts once.

    A larger loss fails the demo if it is hardly by chance. A block that loses exactly the tolerance
    fails at most 5 % of demos, by Hoeffding's bound (1963, theorem 1) for independent documents. A
    document that gains counts as a loss of 0.
    """
    qualities: dict[int, list[tuple[float, float]]] = {}
    full, block = samples[Condition.FULL_PREFILL], samples[Condition.BLOCK]
    for own, reused in zip(full, block, strict=True):
        if own.quality is not None and reused.quality is not None:
            qualities.setdefault(own.document, []).append((own.quality, reused.quality))
    means = [[*map(fmean, zip(*of, strict=True))] for of in qualities.values()]
    if not means:
        return QualityCheck()
    exact, approximate = map(fmean, zip(*means, strict=True))
    accepted = profile.tolerance * exact
    if exact - approximate <= accepted:
        return QualityCheck()
    lost = fmean(max(0.0, own - reused) for own, reused in means)
    said = (
        f"the recommended block reaches {profile.metric} {approximate:.3f}; full prefill reaches "
        f"{exact:.3f}, and the profile accepts a loss of {100 * profile.tolerance:.3g}%"
    )
    if _largest_chance(lost, accepted) ** len(means) <= ERROR_RATE:
        return QualityCheck(failures=(f"{said}: profile the pair on data like this",))
    few = "1 document is" if len(means) == 1 else f"{len(means)} documents are"
    return QualityCheck(notes=(f"{said}; {few} too few to say whether by chance",))


def _largest_chance(mean: float, expected: float) -> float:
    """Return b for Hoeffding's bound: n independent values from 0 to 1 have a mean of `mean` or
    more with a probability of at most b ** n. Their expected mean is at most `expected`, which is
    less than `mean`."""
    below = ((1 - expected) / (1 - mean)) ** (1 - mean) if mean < 1 else 1.0
    return float((expected / mean) ** mean * below)
