"""When requests come: the same seed gives the same times to every contender.

A process is drawn with one request a second in the mean; `at_rate` brings it to any rate, so that
two rates differ in nothing but the pace (common random numbers).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def poisson(num: int, seed: int) -> list[float]:
    """Seconds from the start, the first gap included."""
    return gamma(num, seed, cv=1.0)


def gamma(num: int, seed: int, cv: float) -> list[float]:
    """Gaps of a Gamma distribution with this coefficient of variation; above 1 they are bursts."""
    shape = 1 / cv**2
    gaps = np.random.default_rng(seed).gamma(shape, 1 / shape, num)
    return np.cumsum(gaps).tolist()


def at_rate(times_s: Sequence[float], per_s: float) -> list[float]:
    return [time / per_s for time in times_s]


def stepped(times_s: Sequence[float], per_s: float, factor: float) -> list[float]:
    """The second half of the requests comes `factor` times as fast as the first."""
    half = len(times_s) // 2
    turn = times_s[half - 1] if half else 0.0
    return [
        (time if index < half else turn + (time - turn) / factor) / per_s
        for index, time in enumerate(times_s)
    ]


def shuffled_rounds(num: int, num_documents: int, seed: int) -> list[int]:
    """Which document each request reads: all of them in one order, again and again.

    A cache that holds fewer of them and gives up the oldest never has one when it comes again.
    """
    order = np.random.default_rng(seed).permutation(num_documents)
    return np.resize(order, num).tolist()
