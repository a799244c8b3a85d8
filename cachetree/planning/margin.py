"""What most of some measurements tell, whatever a few were, and how much longer than predicted
things take."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

QUANTILE: Final = 0.9
"""One in ten of what was seen of late took longer than the prediction times the margin."""
MOST: Final = 1.5
"""No margin is larger: beyond it nothing would be tried that could show that it has changed."""
_NUM_KEPT: Final = 64


class Margin:
    """The `QUANTILE` of observed / predicted over the last observations, from 1 to `MOST`."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_NUM_KEPT)

    def add(self, observed_s: float, predicted_s: float) -> None:
        if predicted_s > 0:
            self._ratios.append(observed_s / predicted_s)

    @property
    def factor(self) -> float:
        """1 until something was predicted."""
        ratios = sorted(self._ratios)
        found = ratios[int(QUANTILE * (len(ratios) - 1))] if ratios else 1.0
        return min(max(found, 1.0), MOST)


def weighted_median(pairs: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight); 0 of none."""
    ascending = sorted(pairs)
    until = list(accumulate(weight for _, weight in ascending))
    return ascending[bisect_left(until, until[-1] / 2)][0] if ascending else 0.0


def most_of(values: Iterable[float]) -> float | None:
    """What two in three do not exceed; None of none."""
    ascending = sorted(values)
    return ascending[2 * (len(ascending) - 1) // 3] if ascending else None
