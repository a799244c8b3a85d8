"""The distance between approximate and exact distributions, at the first positions of an answer.

Pure.

SGLang reports the most likely tokens of each side, and none of the others is more likely than the
last of them. Total variation is the most that the two sides give differently to any set of tokens.
So it has a lower bound: the sum of what one side gives more than the other can at most. The bound
is 0 if both are the same, and close if few tokens have nearly all of the probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from statistics import fmean
from typing import Final

TOP: Final = 20
"""Tokens that SGLang reports of each position."""
POSITIONS: Final = 8
"""Positions of an answer that are compared, from its first on."""

LogProbs = Mapping[int, float]
"""Log-probabilities of one position by token id: the most likely tokens, perhaps others too."""


def distance(served: Sequence[LogProbs], exact: Sequence[LogProbs]) -> float:
    """Mean total variation, 0 to 1, over as many positions as both have, at least one."""
    pairs = zip(served, exact, strict=False)
    return fmean(total_variation(ours, theirs) for ours, theirs in pairs)


def total_variation(served: LogProbs, exact: LogProbs) -> float:
    """A lower bound of the total variation between both."""
    ours, theirs = ({token: exp(it) for token, it in one.items()} for one in (served, exact))
    return max(_excess(ours, theirs), _excess(theirs, ours))


def _excess(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Probability that the first gives to its known tokens above what the second can at most."""
    most = sorted(other.values(), reverse=True)[:TOP][-1]
    return min(1.0, sum(max(0.0, it - other.get(token, most)) for token, it in one.items()))
