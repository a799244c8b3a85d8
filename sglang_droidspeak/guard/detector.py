"""Has the mean of the observed values risen above what is allowed? Pure.

A Shiryaev-Roberts e-detector for the mean of values in [0, 1] (Shin, Ramdas and Rinaldo,
"E-detectors: a nonparametric framework for sequential change detection", NEJSDS 2024):

    evidence' = (evidence + 1) * (1 + bet * (x - allowed)),   averaged over several bets

While each value's mean, given all before it, is at most `allowed`, the second factor's is at most
1, so evidence grows by at most 1 per observation on average, whatever the distribution. Summed over
all plans of a server that holds for every shadow it runs, whichever plan that is of. An alarm at
`threshold` therefore comes after at least `threshold` shadows of the whole server on average,
however many plans it has. How often shadows are run may depend on the evidence: a decision about
the next one uses the past alone.

Ordinary traffic breaks that condition: hard documents come one after another, and then the mean
given the past is above the mean of all. Nothing can be proven about any order. So limits keep a
cluster from being taken for drift: an hour multiplies evidence by `HOUR` at most, and a document
adds evidence once (`plans`). Limits only lower evidence, so the bound above still holds. An alarm
takes five bad hours or more. `benchmarks/guard_drift.py` counts false alarms in clustered traffic.
"""

from __future__ import annotations

from statistics import fmean
from typing import Final

SHARES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Bets, as shares of the largest one, under which a value of 0 would leave nothing."""
NO_EVIDENCE: Final = (0.0,) * len(SHARES)
HOUR: Final = 10.0
"""The most by which an hour multiplies evidence."""

Evidence = tuple[float, ...]
"""Evidence under each bet, in the order of SHARES."""


def observed(evidence: Evidence, x: float, allowed: float) -> Evidence:
    """The evidence with one more value, in [0, 1]; `allowed` is above 0."""
    return tuple(
        (1.0 + before) * (1.0 - share + share * x / allowed)
        for before, share in zip(evidence, SHARES, strict=True)
    )


def limited(evidence: Evidence, began: Evidence) -> Evidence:
    """At most HOUR times the evidence at the beginning of the hour, plus one."""
    return tuple(min(now, HOUR * (1.0 + then)) for now, then in zip(evidence, began, strict=True))


def strength(evidence: Evidence) -> float:
    """The mean over all bets, to be compared with a threshold."""
    return fmean(evidence)


def suspicion(evidence: Evidence) -> float:
    """A number that rises after fewer values than `strength` and proves nothing: at most 1 if all
    values are 0, 2 if they stay at half of what is allowed, and without bound beyond that."""
    return max(share * now for share, now in zip(SHARES, evidence, strict=True))
