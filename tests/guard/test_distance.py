"""The distance that is computed from the most likely tokens, compared with the distance of the
whole distributions."""

from __future__ import annotations

from math import log
from random import Random

import pytest

from sglang_droidspeak.guard.plans import TOP, LogProbs, distance, total_variation

Probs = list[float]


def drawn(random: Random, size: int, sharpness: float) -> Probs:
    weights = [random.expovariate(1) ** sharpness for _ in range(size)]
    return [it / sum(weights) for it in weights]


def near(random: Random, probs: Probs, noise: float) -> Probs:
    weights = [it * (1 + noise * random.random()) for it in probs]
    return [it / sum(weights) for it in weights]


def known(probs: Probs) -> LogProbs:
    """Return the log-probabilities that a server reports: those of the TOP most likely tokens."""
    top = sorted(range(len(probs)), key=lambda it: -probs[it])[:TOP]
    return {it: log(probs[it]) for it in top}


def true_distance(one: Probs, other: Probs) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2


@pytest.mark.parametrize("sharpness", (1.0, 4.0, 8.0))
def test_it_is_never_above_the_true_one_and_none_of_what_is_the_same(sharpness):
    random = Random(f"{sharpness}")
    for size in (TOP, 60, 400):
        ours = drawn(random, size, sharpness)
        assert total_variation(known(ours), known(ours)) == 0
        for theirs in (drawn(random, size, sharpness), near(random, ours, 0.5)):
            assert (
                0
                <= total_variation(known(ours), known(theirs))
                <= true_distance(ours, theirs) + 1e-9
            )


def test_it_is_nearly_the_true_one_where_few_tokens_have_nearly_all():
    random = Random(3)
    for _ in range(20):
        ours, theirs = drawn(random, 500, 12.0), drawn(random, 500, 12.0)
        true = true_distance(ours, theirs)
        assert total_variation(known(ours), known(theirs)) > true - 0.05


def test_predictions_without_a_common_likely_token_are_far_apart():
    ours = {it: log(0.99 if it == 0 else 0.01 / TOP) for it in range(TOP)}
    theirs = {it + 100: value for it, value in ours.items()}
    assert total_variation(ours, theirs) > 0.98


def test_means_are_over_the_positions_that_both_have():
    a, b = {1: log(0.9), 2: log(0.1)}, {1: log(0.1), 2: log(0.9)}
    assert distance([a, a, a], [a, b]) == pytest.approx(0.4)
