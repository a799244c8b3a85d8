"""How far what was served is from what an exact run says, at the first positions of an answer.

Pure.

Of each side the most likely tokens are known, by log-probability, and none of the others is more
likely than the last of them. So total variation, which is the most that the two give differently to
any set of tokens, is known from below: sum what one side gives more than the other can at most. It
is never above the true one, 0 where both are the same, and nearly the true one where few tokens
have nearly all of the probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from statistics import fmean
from typing import Final

TOP: Final = 20
"""Tokens that are known of each position."""
POSITIONS: Final = 8
"""Of an answer, from its first on."""
_HALVINGS: Final = 40

LogProbs = Mapping[int, float]
"""By token id: the most likely ones of one position, and perhaps less likely ones beside them."""


def distance(
    served: Sequence[LogProbs], exact: Sequence[LogProbs], temperature: float = 1.0
) -> float:
    """Mean total variation, 0 to 1, over as many positions as both have, at least one; `served` is
    at that temperature."""
    pairs = zip(served, exact, strict=False)
    return fmean(total_variation(ours, theirs, temperature) for ours, theirs in pairs)


def total_variation(served: LogProbs, exact: LogProbs, temperature: float = 1.0) -> float:
    """From below, between both at temperature 1.

    What was served at another one is known up to a factor: how likely all of its known tokens
    together are at temperature 1. Of all factors the one counts that brings both sides closest.
    """
    theirs = {token: exp(it) for token, it in exact.items()}
    if temperature == 1.0:
        ours = {token: exp(it) for token, it in served.items()}
        return max(_excess(ours, theirs), _excess(theirs, ours))
    best = max(served.values())
    weights = {token: exp(temperature * (it - best)) for token, it in served.items()}
    low, high = 0.0, 1.0 / sum(weights.values())
    for _ in range(_HALVINGS):  # One excess grows with the factor, and the other shrinks.
        factor = (low + high) / 2
        ours = {token: factor * it for token, it in weights.items()}
        if _excess(ours, theirs) < _excess(theirs, ours):
            low = factor
        else:
            high = factor
    ours = {token: high * it for token, it in weights.items()}
    return min(1.0, max(_excess(ours, theirs), _excess(theirs, ours)))


def _excess(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """What the first gives to its known tokens above what the second can at most."""
    most = sorted(other.values(), reverse=True)[:TOP][-1]
    return min(1.0, sum(max(0.0, it - other.get(token, most)) for token, it in one.items()))
