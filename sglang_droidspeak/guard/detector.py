"""Has the mean of what is observed risen above what is allowed? Pure.

A Shiryaev-Roberts e-detector for the mean of values in [0, 1] (Shin, Ramdas and Rinaldo,
"E-detectors: a nonparametric framework for sequential change detection", NEJSDS 2024):

    evidence' = (evidence + 1) * (1 + bet * (x - allowed)),   averaged over several bets

While each value's mean, given all before it, is at most `allowed`, the second factor's is at most
1, so evidence grows by at most 1 per observation on average, whatever the distribution. Summed over
all plans of a server that holds for every shadow it runs, whichever plan that is of. An alarm at
`threshold` therefore comes after at least `threshold` shadows of the whole server on average,
however many plans it has. How often shadows are run may depend on the evidence: a decision about
the next one uses the past alone.
"""

from __future__ import annotations

from statistics import fmean
from typing import Final

SHARES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Of the largest bet, under which a value of 0 would leave nothing."""
NO_EVIDENCE: Final = (0.0,) * len(SHARES)

Evidence = tuple[float, ...]
"""Of each bet."""


def observed(evidence: Evidence, x: float, allowed: float) -> Evidence:
    """The evidence with one more value, in [0, 1]; `allowed` is above 0."""
    return tuple(
        (1.0 + before) * (1.0 - share + share * x / allowed)
        for before, share in zip(evidence, SHARES, strict=True)
    )


def strength(evidence: Evidence) -> float:
    """What is compared with a threshold."""
    return fmean(evidence)


def suspicion(evidence: Evidence) -> float:
    """Rises after fewer values than `strength`, and says nothing of error rates: at most 1 where
    all are 0, 2 where they stay at half of what is allowed, and without bound beyond that."""
    return max(share * it for share, it in zip(SHARES, evidence, strict=True))
