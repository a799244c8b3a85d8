"""How often probation errs, by simulation, with independent documents and with documents in
clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from sglang_droidspeak.guard.probation import Probation

ALLOWED = 0.05
NUM_PAIRS = 150
MOST = 1000
"""Number of documents after which a simulated pair is counted as undecided."""


def independent(random: Random, mean: float) -> Iterator[float]:
    while True:
        yield random.betavariate(2 * mean, 2 * (1 - mean))


def clustered(random: Random, mean: float) -> Iterator[float]:
    """Yield documents in clusters: about ten hard ones follow each other, and about twenty are
    answered as full prefill does."""
    while True:
        is_hard, num = random.random() < 1 / 3, 1 + int(random.expovariate(0.1))
        of_cluster = independent(random, 3 * mean)
        yield from (next(of_cluster) if is_hard else 0.0 for _ in range(num))


def ends(traffic: object, mean: float) -> tuple[Counter[str], list[int]]:
    """Return how the probation of many pairs ends, and after how many documents."""
    counts, nums = Counter[str](), []
    for seed in range(NUM_PAIRS):
        values = traffic(Random(seed), mean)  # type: ignore[operator]
        probation, num = Probation(), 0
        while not (probation.is_alarm or probation.is_over or num == MOST):
            probation, num = probation.after(next(values), ALLOWED), num + 1
        counts["off" if probation.is_alarm else "over" if probation.is_over else "open"] += 1
        nums.append(num)
    return counts, sorted(nums)


@pytest.mark.parametrize("traffic", [independent, clustered])
def test_a_pair_at_half_of_what_is_allowed_passes_without_an_alarm(traffic):
    counts, nums = ends(traffic, ALLOWED / 2)
    assert not counts["off"] and counts["over"] >= 0.98 * NUM_PAIRS
    assert nums[0] >= 69 and nums[NUM_PAIRS // 2] < 250


@pytest.mark.parametrize(("traffic", "most_wrong"), [(independent, 0.05), (clustered, 0.55)])
def test_errors_at_exactly_what_is_allowed(traffic, most_wrong):
    """Either end is an error if the mean is exactly the allowed one. Independent documents keep
    both errors rare."""
    counts, _ = ends(traffic, ALLOWED)
    assert counts["over"] <= most_wrong * NUM_PAIRS
    assert counts["off"] <= (0.01 if traffic is independent else 0.25) * NUM_PAIRS


@pytest.mark.parametrize(("traffic", "most_wrong"), [(independent, 0.0), (clustered, 0.15)])
def test_a_pair_at_twice_what_is_allowed_goes_off(traffic, most_wrong):
    counts, nums = ends(traffic, 2 * ALLOWED)
    assert counts["over"] <= most_wrong * NUM_PAIRS
    assert counts["off"] >= (1 - most_wrong) * NUM_PAIRS - counts["open"]
    assert nums[NUM_PAIRS // 2] < 150


def test_a_pair_that_answers_otherwise_is_off_within_a_few_documents():
    counts, nums = ends(independent, 0.4)
    assert counts == {"off": NUM_PAIRS} and nums[-1] < 40


@pytest.mark.parametrize(("allowed", "fewest"), [(0.02, 175), (0.05, 69), (0.1, 34)])
def test_so_many_equal_answers_end_probation(allowed, fewest):
    probation = Probation()
    for _ in range(fewest - 1):
        probation = probation.after(0.0, allowed)
    assert not probation.is_over and probation.after(0.0, allowed).is_over


def test_a_profile_from_few_data_allows_anything_and_ends_at_once():
    assert Probation().after(1.0, 1.02).is_alarm is False
    assert Probation().after(0.5, 1.02).is_over
