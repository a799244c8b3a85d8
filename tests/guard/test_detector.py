"""The detector compared with its definition, and how soon and how rarely it raises an alarm.

The simulations are seeded. Their bounds hold with the error rates that stand beside them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random
from statistics import fmean

import pytest

from sglang_droidspeak.guard.plans import (
    HOUR,
    NO_EVIDENCE,
    SHARES,
    limited,
    observed,
    strength,
    suspicion,
)

ARL = 100_000
ALLOWED = 0.05


def values(mean: float, random: Random, concentration: float = 2.0) -> Iterator[float]:
    """Draw from a beta distribution. With a smaller concentration, large values are rarer and
    larger."""
    while True:
        yield random.betavariate(concentration * mean, concentration * (1 - mean))


def delay(drawn: Iterator[float], most: int) -> int:
    """Return the number of observations until the alarm, or `most` if there was none."""
    evidence = NO_EVIDENCE
    for num, x in enumerate(itertools.islice(drawn, most), 1):
        evidence = observed(evidence, x, ALLOWED)
        if strength(evidence) >= ARL:
            return num
    return most


def test_evidence_is_the_published_recursion():
    """M_n = (M_{n-1} + 1) L_n is the sum over every possible beginning of the products after it."""
    random = Random(1)
    drawn = [random.random() for _ in range(30)]
    evidence = NO_EVIDENCE
    for x in drawn:
        evidence = observed(evidence, x, 0.3)
    for share, of_share in zip(SHARES, evidence, strict=True):
        factors = [1 + share / 0.3 * (x - 0.3) for x in drawn]
        expected = sum(math.prod(factors[start:]) for start in range(len(drawn)))
        assert of_share == pytest.approx(expected)
    assert strength(evidence) == pytest.approx(fmean(evidence))


def test_at_the_allowed_mean_evidence_grows_by_one_on_average():
    """The average is over all sequences of a distribution with that mean, so the result is
    exact."""
    chances = {0.0: 0.75, 0.2: 0.0, 1.0: 0.25}
    for length in (1, 2, 6):
        mean = 0.0
        for sequence in itertools.product(chances, repeat=length):
            evidence = NO_EVIDENCE
            for x in sequence:
                evidence = observed(evidence, x, 0.25)
            mean += math.prod(chances[x] for x in sequence) * strength(evidence)
        assert mean == pytest.approx(length)


def test_twenty_thousand_healthy_observations_raise_nothing():
    """One plan is the measured block [2, 5): mean 0.002, and nine in ten below 0.005. Another has
    half of the allowed mean. By the bound on the average run, 20,000 observations raise an alarm
    with probability 0.2 at most."""
    for mean, concentration in ((0.002, 50.0), (0.02, 2.0), (ALLOWED / 2, 0.5)):
        drawn = values(mean, Random(f"{mean}"), concentration)
        assert delay(drawn, 20_000) == 20_000, mean


@pytest.mark.parametrize("draw", ("beta", "all or nothing"))
def test_at_the_edge_of_what_is_allowed_alarms_are_as_rare_as_stated(draw):
    """There are 100 runs of 2,000 observations with the allowed mean. Each raises an alarm with
    probability 0.02 at most, so more than 10 do with less than 0.0001."""
    alarms = 0
    for seed in range(100):
        random = Random(seed)
        drawn = (
            values(ALLOWED, random)
            if draw == "beta"
            else (float(random.random() < ALLOWED) for _ in itertools.count())
        )
        alarms += delay(drawn, 2_000) < 2_000
    assert alarms <= 10


@pytest.mark.parametrize(("mean", "most"), ((0.10, 600), (0.26, 45), (0.83, 12)))
def test_a_risen_mean_is_found_soon(mean, most):
    """The allowed mean is 0.05. A risen mean of 0.26 is that of a block that is one layer short,
    and 0.83 is that of full reuse. Of twenty runs, all but one raise the alarm in time."""
    delays = sorted(delay(values(mean, Random(seed)), 10 * most) for seed in range(20))
    assert delays[18] <= most


def test_suspicion_rises_after_fewer_values_than_strength():
    """Suspicion settles if values stay below the allowed mean, and soon grows if they do not."""
    for share, limit in ((0.0, 1.0), (0.5, 2.0)):
        evidence = NO_EVIDENCE
        for _ in range(10_000):
            evidence = observed(evidence, share * ALLOWED, ALLOWED)
            assert suspicion(evidence) < limit
    evidence = observed(observed(NO_EVIDENCE, 3 * ALLOWED, ALLOWED), 3 * ALLOWED, ALLOWED)
    assert suspicion(evidence) > 2 and strength(evidence) < 10


def test_an_hour_adds_a_bounded_share_of_evidence():
    began = tuple(10.0 for _ in SHARES)
    evidence = began
    for _ in range(100):
        evidence = limited(observed(evidence, 1.0, ALLOWED), began)
    assert evidence == (HOUR * 11,) * len(SHARES)
