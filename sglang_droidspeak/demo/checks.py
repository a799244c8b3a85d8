"""What has to hold for a demo to count. Each failure is one sentence for a person. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from cachetree.planning import PairProfile
from sglang_droidspeak.demo.results import Condition, Measured, Samples

LEAST_REUSED_SHARE = 0.9
"""A fetch that misses its deadline on a busy machine is no defect; a tenth of them is."""
LEAST_AGREEMENT_16_BIT = 0.75
"""In 16 bits the rounding depends on the shape of the batch, which decides between near equals."""


def reuse_failures(samples: Samples, pair: str) -> Iterator[str]:
    """Reuse has to happen where it was asked for, and nowhere else."""
    for condition, answered in samples.items():
        if condition is Condition.FULL_PREFILL:
            num_wrong = sum(sample.provenance.reused_tokens > 0 for sample in answered)
            if num_wrong:
                yield f"{pair}: {num_wrong} requests of full prefill reused another model's cache"
            continue
        num_reused = sum(sample.is_reused for sample in answered)
        if num_reused < LEAST_REUSED_SHARE * len(answered):
            outcomes = Counter(sample.provenance.outcome for sample in answered)
            found = ", ".join(f"{count} × {outcome}" for outcome, count in outcomes.most_common())
            yield (
                f"{pair}: only {num_reused} of {len(answered)} requests of {condition.title} "
                f"reused the whole document ({found})"
            )


def equality_failures(samples: Samples, pair: str, dtype: str) -> Iterator[str]:
    """Recomputing all layers is a full prefill by another way."""
    pairs = list(zip(samples[Condition.FULL_PREFILL], samples[Condition.ALL_LAYERS], strict=True))
    least = 1.0 if dtype == "float32" else LEAST_AGREEMENT_16_BIT
    stop = None if least == 1.0 else 1
    num_equal = sum(own.token_ids[:stop] == other.token_ids[:stop] for own, other in pairs)
    if num_equal < least * len(pairs):
        yield (
            f"{pair}: recomputing all layers gave the answer of full prefill for only "
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
            f"prefill {full:.3f}, the profile's tolerance {profile.tolerance:.0%}); "
            "profile the pair on data like this"
        )
