"""Probation: the first comparisons of a plan that was inherited, and not measured for its pair.

Two test martingales over values in [0, 1], each a mean over some bets (Ville's inequality bounds
the probability that one ever reaches a number):

    against    *= 1 - bet + bet * x / allowed                grows if the mean is above allowed
    in favour  *= 1 - bet + bet * (1 - x) / (1 - allowed)    grows if the mean is below allowed

Take each value's mean, given the values before it. If it is at most `allowed`, the probability of
an alarm is at most 1 / `ALARM`. If it is at least `allowed`, the probability that probation ends
well is at most 1 / `ENOUGH`. Nothing is proven for ordinary traffic, which comes in clusters:
`tests/guard/test_probation.py` counts both errors in such traffic. Evidence in `plans` has a limit
per hour. This evidence has none, because a model in training is served only for minutes.
"""

from __future__ import annotations

from statistics import fmean
from typing import Final

import msgspec

BETS_AGAINST: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
BETS_IN_FAVOUR: Final = (0.5, 1.0)
ALARM: Final = 1000.0
"""Amount of evidence against a plan at which the plan is stopped."""
ENOUGH: Final = 20.0
"""Amount of evidence in favour of a plan at which its probation ends."""

MOST_ALLOWED: Final = 0.99
"""Largest allowed mean distance that probation uses. A profile from few data may allow 1 or more;
then evidence in favour could not grow."""


class Probation(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence about a plan on probation: a number for each of BETS_AGAINST and BETS_IN_FAVOUR."""

    against: tuple[float, ...] = (1.0,) * len(BETS_AGAINST)
    in_favour: tuple[float, ...] = (1.0,) * len(BETS_IN_FAVOUR)

    def after(self, x: float, allowed: float) -> Probation:
        """Return the evidence after one more document, at distance `x`."""
        allowed = min(allowed, MOST_ALLOWED)
        return Probation(
            against=_after(self.against, BETS_AGAINST, x / allowed),
            in_favour=_after(self.in_favour, BETS_IN_FAVOUR, (1 - x) / (1 - allowed)),
        )

    @property
    def is_alarm(self) -> bool:
        return fmean(self.against) >= ALARM

    @property
    def is_over(self) -> bool:
        return fmean(self.in_favour) >= ENOUGH


def _after(evidence: tuple[float, ...], bets: tuple[float, ...], odds: float) -> tuple[float, ...]:
    return tuple(
        before * (1 - bet + bet * odds) for before, bet in zip(evidence, bets, strict=True)
    )
