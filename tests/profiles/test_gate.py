"""The gate: intervals over contexts, and who passes."""

import random

import pytest

from cachetree.evidence import Interval
from cachetree.ids import Span
from cachetree.profile import Recipe
from profiles.gate import interval, is_within, loss, verdict

FULL = Interval(mean=0.8, low=0.75, high=0.85)


def test_an_interval_is_around_the_mean_of_all_questions():
    found = interval([[1.0, 1.0, 1.0], [0.0]])
    assert found.mean == 0.75
    assert found.low == 0.0 and found.high == 1.0


def test_equal_contexts_leave_nothing_open():
    assert interval([[0.5, 0.5]] * 4) == Interval(mean=0.5, low=0.5, high=0.5)


def test_questions_of_one_context_count_as_one_draw():
    rng = random.Random(1)
    contexts = [float(rng.random() < 0.5) for _ in range(20)]
    alone = interval([[it] for it in contexts])
    together = interval([[it] * 10 for it in contexts])
    assert together.high - together.low == pytest.approx(alone.high - alone.low, abs=0.05)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """95 % of 300 runs, give or take their scatter and what a bootstrap falls short by."""
    rng = random.Random(2)
    covered = 0
    for _ in range(300):
        found = interval([[float(rng.random() < 0.7) for _ in range(3)] for _ in range(40)])
        covered += found.low <= 0.7 <= found.high
    assert 0.91 <= covered / 300 <= 0.98


def test_a_loss_is_paired_by_question():
    full = [[1.0, 0.0], [0.0, 1.0]]
    assert loss(full, full) == Interval(mean=0.0, low=0.0, high=0.0)
    assert loss(full, [[0.0, 0.0], [0.0, 1.0]]).mean == 0.25


def test_the_whole_interval_has_to_be_within_the_tolerance():
    assert is_within(Interval(mean=0.01, low=0.0, high=0.04), 0.8, 0.05)
    assert not is_within(Interval(mean=0.01, low=0.0, high=0.041), 0.8, 0.05)


@pytest.mark.parametrize(
    ("lost", "passes", "says"),
    [
        (Interval(mean=0.0, low=-0.01, high=0.03), True, "lose 0.000 on held-out"),
        (Interval(mean=0.02, low=0.0, high=0.06), False, "may exceed 5% of full prefill's 0.800"),
        (Interval(mean=0.3, low=0.2, high=0.4), False, "more than 5% of full prefill's 0.800"),
    ],
)
def test_the_verdict_names_block_interval_and_bound(lost, passes, says):
    passed, reason = verdict(Recipe(block=Span(2, 5)), lost, FULL, 0.05)
    assert passed is passes
    assert says in reason and "layers [2, 5)" in reason and f"{lost.high:.3f}" in reason


def test_without_a_block_there_is_nothing_to_pass():
    passed, reason = verdict(None, None, FULL, 0.05)
    assert not passed
    assert "no block smaller than all layers" in reason


def test_a_receiver_that_answers_nothing_right_never_passes():
    zero = Interval(mean=0.0, low=0.0, high=0.0)
    assert not is_within(zero, 0.0, 0.05)
    for recipe in (Recipe(block=Span(2, 5)), None):
        passed, reason = verdict(recipe, zero, zero, 0.05)
        assert not passed and "answers nothing right" in reason
