"""Times of requests: the same seed gives the same times to every contender.

Times are drawn at a mean rate of one request a second; `at_rate` scales them to any rate. So two
rates differ only in pace (common random numbers).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def poisson(num: int, seed: int) -> list[float]:
    """Draw arrival times in seconds from the start. The first gap is before the first request."""
    return gamma(num, seed, cv=1.0)


def gamma(num: int, seed: int, cv: float) -> list[float]:
    """Draw arrival times as `poisson` does, with gaps of a Gamma distribution. A coefficient of
    variation above 1 makes bursts."""
    shape = 1 / cv**2
    gaps = np.random.default_rng(seed).gamma(shape, 1 / shape, num)
    return np.cumsum(gaps).tolist()


def at_rate(times_s: Sequence[float], per_s: float) -> list[float]:
    return [time / per_s for time in times_s]


def stepped(times_s: Sequence[float], per_s: float, factor: float) -> list[float]:
    """Scale times to a rate of `per_s`, and to `factor` times this rate from the middle on."""
    half = len(times_s) // 2
    turn = times_s[half - 1] if half else 0.0
    return [
        (time if index < half else turn + (time - turn) / factor) / per_s
        for index, time in enumerate(times_s)
    ]


def shuffled_rounds(num: int, num_documents: int, seed: int) -> list[int]:
    """Draw the document of each request: all documents in one random order, again and again.

    So a cache that has room for fewer documents and drops the oldest never has the next document.
    """
    order = np.random.default_rng(seed).permutation(num_documents)
    return np.resize(order, num).tolist()
