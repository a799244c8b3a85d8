"""What most of some measurements tell, whatever a few of them were."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate


def weighted_median(pairs: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight); 0 of none."""
    ascending = sorted(pairs)
    until = list(accumulate(weight for _, weight in ascending))
    return ascending[bisect_left(until, until[-1] / 2)][0] if ascending else 0.0


def most_of(values: Iterable[float]) -> float | None:
    """What two in three do not exceed; None of none."""
    ascending = sorted(values)
    return ascending[2 * (len(ascending) - 1) // 3] if ascending else None
