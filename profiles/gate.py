"""The gate: may a pair be reused? Judged on data that had no part in choosing the block. Pure.

Questions about one context share its KV, so the bootstrap draws contexts, not questions. A block is
within the tolerance where even the upper end of the interval of its loss is: too few questions make
a pair fail, never pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cachetree.evidence import Interval
from cachetree.profile import Recipe

NUM_SAMPLES: Final = 10_000
_SEED: Final = 0


def interval(values: Sequence[Sequence[float]]) -> Interval:
    """Mean over all values, and its 95 % interval; `values` are by context, none of them empty."""
    sums = np.array([sum(it) for it in values])
    counts = np.array([len(it) for it in values])
    mean = float(sums.sum() / counts.sum())
    drawn = np.random.default_rng(_SEED).integers(len(values), size=(NUM_SAMPLES, len(values)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(
        mean=round(mean, 6),
        low=round(min(float(low), mean), 6),
        high=round(max(float(high), mean), 6),
    )


def loss(full: Sequence[Sequence[float]], block: Sequence[Sequence[float]]) -> Interval:
    """What a block loses against full prefill, question by question."""
    return interval(
        [
            [a - b for a, b in zip(ours, theirs, strict=True)]
            for ours, theirs in zip(full, block, strict=True)
        ]
    )


def is_within(lost: Interval, full_prefill: float, tolerance: float) -> bool:
    """A receiver that answers nothing right has nothing to lose, and proves nothing."""
    return full_prefill > 0 and lost.high <= tolerance * full_prefill


def verdict(
    recipe: Recipe | None, lost: Interval | None, full_prefill: Interval, tolerance: float
) -> tuple[bool, str]:
    """Whether the pair passes, and why, in one sentence."""
    if full_prefill.mean <= 0:
        return False, (
            "the receiver alone answers nothing right on held-out questions, so no loss can be "
            "judged; check data, template and metric"
        )
    if recipe is None or lost is None:
        return False, (
            "no block smaller than all layers keeps the training quality within "
            f"{tolerance:.0%} of full prefill's with 95 % confidence"
        )
    share = f"{tolerance:.0%} of full prefill's {full_prefill.mean:.3f}"
    found = (
        f"layers {recipe} lose {lost.mean:.3f} on held-out questions "
        f"(95 % interval {lost.low:.3f} to {lost.high:.3f})"
    )
    if is_within(lost, full_prefill.mean, tolerance):
        return True, f"{found}, within {share}"
    if lost.mean <= tolerance * full_prefill.mean:
        return False, f"{found}, which may exceed {share}; more held-out contexts may decide it"
    return False, f"{found}, more than {share}"
