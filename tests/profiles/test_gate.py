"""The gate: bounds that hold for any number of contexts, and which plans pass.

Rates are measured in seeded simulations, in which the true loss is known.
"""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from cachetree.ids import Span
from profiles.evidence import (
    Fidelity,
    FrontierPoint,
    Interval,
    Split,
    TaskLoss,
    TaskScores,
    read_measured,
)
from profiles.stats.gate import (
    DRIFT_ERROR_RATE,
    ERROR_RATE,
    contexts_lacking,
    contexts_needed,
    interval,
    is_within,
    loss_bound,
    mean_bound,
    proven,
    verdict,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = (6, 12, 24, 60, 200)
NUM_RUNS = 200
SCATTER = 2 * (ERROR_RATE * (1 - ERROR_RATE) / NUM_RUNS) ** 0.5
"""Two standard deviations of a measured rate of ERROR_RATE over NUM_RUNS runs."""
TOLERANCE = 0.05
NUM_QUESTIONS = 3

Sample = tuple[list[list[float]], list[list[float]]]
"""Qualities of full prefill, and qualities of a plan."""
World = Callable[[np.random.Generator, int], Sample]


def rare(share: float) -> World:
    """World in which a plan loses everything on a share of the contexts, and nothing on the
    others."""

    def draw(rng: np.random.Generator, size: int) -> Sample:
        is_right = np.repeat(rng.random(size)[:, None] >= share, NUM_QUESTIONS, 1)
        return [[1.0] * NUM_QUESTIONS] * size, is_right.astype(float).tolist()

    return draw


def dense(share: float) -> World:
    """World in which every question loses or wins something, and the quality of full prefill varies
    too."""

    def draw(rng: np.random.Generator, size: int) -> Sample:
        full = rng.choice([0.0, 0.5, 0.8], (size, NUM_QUESTIONS), p=[0.2, 0.3, 0.5])
        factors = rng.uniform(0.8 - share, 1.2 - share, full.shape)
        return full.tolist(), (full * factors).tolist()

    return draw


def uneven(share: float, most: int, large: float) -> World:
    """World in which a share `large` of the contexts has `most` questions, and the others one. A
    share `share` of all contexts is lost, and all of these are large."""

    def draw(rng: np.random.Generator, size: int) -> Sample:
        is_large = rng.random(size) < large
        lost = is_large & (rng.random(size) < share / large)
        full = [[1.0] * (most if it else 1) for it in is_large]
        plan = [[float(not it)] * len(ours) for it, ours in zip(lost, full, strict=True)]
        return full, plan

    return draw


def rate(world: World, size: int, happens: Callable[[Sample], bool]) -> float:
    rng = np.random.default_rng(7)
    return sum(happens(world(rng, size)) for _ in range(NUM_RUNS)) / NUM_RUNS


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("world", "truth"),
    [
        (rare(0.08), 0.08),
        (rare(0.051), 0.051),
        (dense(0.06), 0.06),
        (uneven(0.06, 6, 1 / 3), 0.06),
        (uneven(0.06, 40, 1 / 3), 0.06),
        (uneven(0.06, 40, 0.06), 0.06),
    ],
    ids=["rare", "just too rare", "dense", "uneven", "very uneven", "rare and large"],
)
def test_the_bound_covers_the_true_loss_as_often_as_it_says(world, truth, size):
    """A pair that loses more than the tolerance passes no more often than the error rate."""
    assert rate(world, size, lambda it: loss_bound(*it) < truth) <= ERROR_RATE + SCATTER


def test_a_context_weighs_as_much_however_many_questions_it_has():
    full, plan = [[1.0]] * 120, [[1.0]] * 119
    bounds = {
        loss_bound([*full[1:], [1.0] * number], [*plan, [0.0] * number]) for number in (1, 3, 40)
    }
    assert len(bounds) == 1


@pytest.mark.parametrize("size", [100, 300])
def test_rare_contexts_with_many_questions_have_the_usual_bound(size):
    """Three contexts in a hundred have forty questions, and all of these contexts are lost."""
    world = uneven(0.03, 40, 0.03)
    assert rate(world, size, lambda it: loss_bound(*it) < 0.03) <= ERROR_RATE + SCATTER
    assert rate(world, size, lambda it: loss_bound(*it) < 0.12) >= 0.5, "and it is of use"


@pytest.mark.parametrize("share", [0.03, 0.3])
def test_a_mean_is_below_its_bound_as_often_as_it_says(share):
    """A known share of a hundred contexts is completely lost."""
    rng, bounds = np.random.default_rng(3), []
    for _ in range(NUM_RUNS):
        drawn = (rng.random(100) < share).astype(float)
        bounds.append(mean_bound([[x, x] for x in drawn], DRIFT_ERROR_RATE))
    assert sum(it < share for it in bounds) <= 2 * DRIFT_ERROR_RATE * NUM_RUNS
    assert np.median(bounds) < share + 0.2, "and it is of use"


def test_a_mean_of_nothing_has_a_bound_by_the_number_of_contexts():
    bounds = [mean_bound([[0.0]] * size, DRIFT_ERROR_RATE) for size in (1, 24, 96, 400)]
    assert bounds == sorted(bounds, reverse=True)
    assert 0.04 < bounds[2] < 0.07


@pytest.mark.parametrize("size", SIZES)
def test_pair_without_loss_passes_from_some_number_of_contexts_on(size):
    bound = loss_bound([[1.0] * NUM_QUESTIONS] * size, [[1.0] * NUM_QUESTIONS] * size)
    assert (bound <= TOLERANCE) is (size >= 71)


def test_the_bound_is_of_use():
    """The bound falls towards the true loss. A good pair passes with a number of contexts that a
    user can have."""
    for size, most in ((60, 0.07), (120, 0.035), (200, 0.02)):
        assert loss_bound(*rare(0.0)(np.random.default_rng(0), size)) <= most
    assert rate(rare(0.01), 400, lambda it: loss_bound(*it) <= TOLERANCE) >= 0.9
    assert rate(dense(0.01), 200, lambda it: loss_bound(*it) <= TOLERANCE) >= 0.85


def many(rng: np.random.Generator, losses: list[float], size: int) -> list[float]:
    """Return the bounds of plans on the same contexts, each plan with its true loss."""
    full = [[1.0] * NUM_QUESTIONS] * size
    return [loss_bound(full, rare(it)(rng, size)[1]) for it in losses]


@pytest.mark.parametrize("num_good", [0, 3])
def test_any_of_many_bad_plans_passes_at_most_at_the_error_rate(num_good):
    """This holds for any number of bad plans, whatever passes before them. With so few contexts,
    each one passes alone if none of its contexts shows the loss."""
    losses = [0.0] * num_good + [0.0505] * 20
    rng = np.random.default_rng(11)
    wrong = alone = 0
    for _ in range(100):
        plans = [point_of(Span(0, 11), it) for it in many(rng, losses, 75)]
        wrong += len(proven(plans, TOLERANCE)) > num_good
        alone += any(is_within(it.tasks, TOLERANCE) for it in plans[num_good:])
    assert wrong / 100 <= ERROR_RATE
    assert alone / 100 > 4 * ERROR_RATE, "each judged for itself: luck has twenty chances"


def test_the_number_of_contexts_that_a_pair_needs_is_enough_and_not_far_from_it():
    for world in (rare(0.0), rare(0.01), dense(0.01)):
        full, plan = world(np.random.default_rng(3), 100)
        needed = contexts_needed(full, plan, TOLERANCE)
        assert needed is not None

        def passes(size: int, full=full, plan=plan) -> bool:
            places = [i % 100 for i in range(size)]
            return loss_bound([full[i] for i in places], [plan[i] for i in places]) <= TOLERANCE

        assert passes(-(-needed // 100) * 100)
        assert not passes(int(0.8 * needed))
    assert contexts_needed(*rare(0.0)(np.random.default_rng(3), 5), TOLERANCE) == 71
    assert contexts_needed(*rare(1.0)(np.random.default_rng(3), 5), TOLERANCE) is None
    assert contexts_needed([[1.0]] * 5, [[1 - TOLERANCE]] * 5, TOLERANCE) is None


def test_half_of_the_contexts_of_the_documented_trial_can_prove_a_plan():
    page = (EXAMPLES.parent / "docs/profiles.md").read_text()
    (num_contexts,) = map(int, re.findall(r"(\d+) contexts with one question each", page))
    (tolerance,) = map(float, re.findall(r"--plans 2 --tolerance (\S+)", page))
    assert loss_bound([[0.9]] * (num_contexts // 2), [[0.9]] * (num_contexts // 2)) <= tolerance
    assert f"accepts a loss of {100 * tolerance:.0f} %" in page


def test_twice_the_tolerance_needs_half_as_many_contexts():
    needed = [contexts_needed([[1.0]], [[1.0]], it * TOLERANCE) for it in (1, 2, 4)]
    assert needed == pytest.approx([needed[0], needed[0] / 2, needed[0] / 4], abs=1)


def test_the_number_of_contexts_is_what_the_mixture_of_bets_needs_and_none_more():
    full, plan = [[0.9]] * 100, [[0.9]] * 98 + [[0.0]] * 2
    needed = contexts_needed(full, plan, TOLERANCE)
    spread, lossy = [[0.9]] * 50, [[0.0], *[[0.9]] * 49]
    assert needed is not None

    def bound(blocks: int) -> float:
        return loss_bound(spread * blocks, lossy * blocks)

    assert bound(-(-needed // 50)) <= TOLERANCE < bound(needed // 50 - 1)
    assert needed == 324


def test_luck_makes_no_plan_need_fewer_contexts_than_one_that_loses_nothing():
    """A plan that is better than full prefill on these contexts would otherwise seem to need a
    handful."""
    full = [[0.25]] * 40
    lucky, equal = (contexts_needed(full, it, TOLERANCE) for it in ([[0.9]] * 40, full))
    assert lucky == equal and equal > 250


@pytest.mark.parametrize("tolerance", [0.01, 0.05, 0.2, 0.5])
def test_one_context_never_passes(tolerance):
    assert loss_bound([[1.0] * 50], [[1.0] * 50]) > tolerance


def test_a_plan_that_is_better_than_full_prefill_may_be_shown_to_lose_nothing():
    assert loss_bound([[0.5]] * 200, [[0.9]] * 200) == 0.0


def test_an_interval_is_around_the_mean_of_contexts():
    around = interval([[1.0, 1.0, 1.0], [0.0]])
    assert around.mean == 0.5
    assert around.low == 0.0 and around.high == 1.0


def test_equal_contexts_leave_nothing_open():
    assert interval([[0.5, 0.5]] * 4) == Interval(mean=0.5, low=0.5, high=0.5)


def test_questions_of_one_context_count_as_one_draw():
    contexts = np.random.default_rng(1).random(20) < 0.5
    alone = interval([[float(it)] for it in contexts])
    together = interval([[float(it)] * 10 for it in contexts])
    assert together == alone


def test_an_interval_is_the_same_each_time_and_is_rounded_outward_of_nothing():
    contexts = np.random.default_rng(4).random((30, 3)).tolist()
    around = interval(contexts)
    assert around == interval(contexts)
    assert [round(it, 6) for it in (around.mean, around.low, around.high)] == [
        around.mean,
        around.low,
        around.high,
    ]


def test_an_interval_of_many_contexts_fits_beside_the_weights():
    """All samples together would take 400 MB."""
    tracemalloc.start()
    try:
        interval([[1.0]] * 5000)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_the_interval_leaves_out_as_much_on_either_side():
    """The interval reaches 1.96 deviations to either side of the mean of many draws."""
    contexts = np.random.default_rng(5).random((400, 1)).tolist()
    around, deviation = interval(contexts), np.std(contexts) / 400**0.5
    assert (around.mean - around.low) / deviation == pytest.approx(1.96, abs=0.05)
    assert (around.high - around.mean) / deviation == pytest.approx(1.96, abs=0.05)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """95 % of 300 runs, give or take their scatter and what a bootstrap falls short by."""
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(300):
        around = interval((rng.random((40, 3)) < 0.7).astype(float).tolist())
        covered += around.low <= 0.7 <= around.high
    assert 0.91 <= covered / 300 <= 0.98


def split_of(*tasks: TaskScores) -> Split:
    whole = Interval(mean=0.8, low=0.7, high=0.9)
    return Split(
        files=(),
        contexts=("00",) * sum(it.num_contexts for it in tasks),
        tasks=tasks,
        num_questions=1,
        mean_prefix_tokens=1.0,
        max_prefix_tokens=1,
        mean_suffix_tokens=1.0,
        sender=whole,
        full_prefill=whole,
        full_reuse=whole,
    )


TASK = TaskScores(
    name="facts",
    metric="f1",
    num_contexts=90,
    num_questions=90,
    sender=0.1,
    full_prefill=0.8,
    full_reuse=0.2,
)


def point_of(block, bound, *, quality=0.9, needed=None):
    """Return a plan that the gate has judged at one task."""
    return FrontierPoint(
        start=block.start,
        stop=block.stop,
        train_quality=quality,
        held_out=Interval(mean=quality, low=quality, high=quality),
        tasks=(TaskLoss(quality=quality, bound=bound, needed=needed),),
        fidelity=Fidelity(kl=1.0),
        ttft_s=0.01,
    )


GOOD = point_of(Span(2, 5), 0.034, quality=0.79)
SHORT = point_of(Span(2, 5), 0.061, quality=0.79, needed=120)
BAD = point_of(Span(2, 5), 0.4, quality=0.6)
SHORT_TASK = TaskLoss(quality=0.79, bound=0.061, needed=3001)


def test_reason_speaks_of_the_contexts_that_judged_the_plan():
    """On all 90 held-out contexts together, full prefill has 0.800."""
    lost = TaskLoss(quality=0.79, bound=0.061, needed=120, num_contexts=30, full_prefill=0.82)
    _, reason = verdict([replace(SHORT, tasks=(lost,))], split_of(TASK), TOLERANCE)
    assert "where full prefill has 0.820 on" in reason and "could show it, not 30" in reason
    better = replace(lost, full_prefill=0.9)
    _, reason = verdict([replace(SHORT, tasks=(better,))], split_of(TASK), TOLERANCE)
    assert "could show it" not in reason, "it loses more than is accepted"


FINDING = (
    "the plan [2, 5) has 0.790 where full prefill has 0.800 on held-out questions, so that with "
    "95% confidence it loses {} of that at most; 5% is accepted"
)
NOTHING_PASSED = "no plan smaller than all layers passed: "


def test_the_verdict_names_the_plan_its_loss_and_what_is_accepted():
    reached = verdict([GOOD, BAD], split_of(TASK), TOLERANCE)
    assert reached == (True, FINDING.format("3.4%"))


def test_no_bound_that_is_too_large_is_told_as_if_it_were_accepted():
    _, reason = verdict([point_of(Span(2, 5), 0.0504)], split_of(TASK), TOLERANCE)
    assert "it loses 5.1% of that at most; 5% is accepted" in reason
    _, reason = verdict([GOOD], split_of(TASK), 0.035)
    assert "it loses 3.4% of that at most; 3.5% is accepted" in reason


def test_a_plan_that_loses_exactly_what_is_accepted_passes():
    assert is_within(point_of(Span(2, 5), TOLERANCE).tasks, TOLERANCE)


def test_the_verdict_says_how_many_contexts_are_needed():
    passed, reason = verdict([SHORT], split_of(TASK), TOLERANCE)
    assert not passed
    lost = NOTHING_PASSED + FINDING.format("6.1%")
    assert reason == f"{lost}; about 120 such contexts could show it, not 90"
    passed, reason = verdict([BAD, GOOD], split_of(TASK), TOLERANCE)
    assert not passed, "what comes after a failure is not tried"
    assert "40.0%" in reason and "such contexts" not in reason


def test_a_number_of_contexts_beyond_reach_is_said_in_words():
    _, reason = verdict([replace(SHORT, tasks=(SHORT_TASK,))], split_of(TASK), TOLERANCE)
    assert reason.endswith("; no amount of data that you will have could show it")


@pytest.mark.parametrize(("quality", "is_told"), [(0.759, False), (0.95 * 0.8, True)])
def test_more_contexts_are_asked_for_only_where_the_loss_itself_is_accepted(quality, is_told):
    plan = point_of(Span(2, 5), 0.061, quality=quality, needed=120)
    _, reason = verdict([plan], split_of(TASK), TOLERANCE)
    assert ("such contexts" in reason) == is_told


@pytest.mark.parametrize(
    ("other", "lacking"),
    [
        (TaskLoss(quality=0.8, bound=0.04, needed=60), 120),
        (TaskLoss(quality=0.8, bound=0.055, needed=100), 120),
        (TaskLoss(quality=0.7, bound=0.06, needed=None), None),
        (TaskLoss(quality=0.7, bound=0.06, needed=500), None),
    ],
)
def test_more_contexts_lack_only_where_no_task_shows_a_loss(other, lacking):
    plan = replace(SHORT, tasks=(*SHORT.tasks, other))
    assert contexts_lacking(plan, split_of(TASK, TASK), TOLERANCE) == lacking


def test_every_task_is_asked():
    other = replace(TASK, name="code", full_prefill=0.5)
    split = split_of(TASK, other)
    assert verdict([replace(GOOD, tasks=GOOD.tasks * 2)], split, TOLERANCE)[0]
    mixed = replace(GOOD, tasks=(*GOOD.tasks, TaskLoss(quality=0.3, bound=0.5, needed=None)))
    passed, reason = verdict([mixed], split, TOLERANCE)
    assert not passed
    assert "of code" in reason and "0.300" in reason


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/*.json")), ids=lambda it: it.stem)
def test_a_shipped_profile_has_the_verdict_of_its_evidence(file):
    profile = read_measured(file)
    reached = verdict(
        [profile.frontier[place] for place in profile.order], profile.held_out, profile.tolerance
    )
    assert reached == (profile.passed, profile.reason)


def test_without_a_plan_there_is_nothing_to_pass():
    passed, reason = verdict([], split_of(TASK), TOLERANCE)
    assert not passed
    assert reason == "no plan smaller than all layers was measured on all training questions"


def test_a_receiver_that_answers_nothing_right_never_passes():
    assert loss_bound([[0.0]] * 200, [[0.0]] * 200) == loss_bound([[0.0]], [[1.0]]) == 1.0
    split = split_of(TASK, replace(TASK, name="code", full_prefill=0.0))
    for plans in ([], [GOOD]):
        passed, reason = verdict(plans, split, TOLERANCE)
        assert not passed
        assert reason == (
            "the receiver alone answers nothing right on held-out questions of code, so no loss "
            "can be judged; check data, template and metric"
        )
