"""How much longer than predicted things take."""

from __future__ import annotations

from collections import deque
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
