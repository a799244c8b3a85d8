"""Choice of the plans that the gate tries. Luck in the metric neither adds nor removes a plan."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from cachetree.ids import Span
from cachetree.planning import EMap
from profiles.stats.choice import (
    MOST_TRIED,
    choose,
    closest,
    frontier,
    grid,
    neighbours,
    sensitive_first,
    shortlist,
)
from profiles.stats.measured import Candidate, Measured, Score, Scores

FULL = 0.916
OWN = [[FULL] * 3] * 12
"""Qualities of full prefill."""
TASK = [range(12)]


def scores(kl: float, quality: float | None = None) -> Scores:
    score = Score(kl=kl, tv=0.0, quality=quality)
    return [(score,) * 3] * 12


def plan(start: int, stop: int) -> Candidate:
    return Candidate(runs=(Span(start, stop),))


def plans_of(measured: Mapping[tuple[int, int], tuple[float, float]]) -> dict[Candidate, Scores]:
    """Return plans with their scores, from the KL divergence and the quality of each block."""
    return {plan(*it): scores(*values) for it, values in measured.items()}


def order_of(measured: Mapping[tuple[int, int], tuple[float, float]]) -> list[tuple[int, int]]:
    order = choose(plans_of(measured), OWN, TASK, 0.05).order
    return [(it.block.start, it.block.stop) for it in order]


def test_a_lucky_plan_does_not_drive_out_one_that_equals_full_prefill():
    """The numbers follow a real pair. [5, 30) has the best mean, by luck. [0, 25) takes as much
    work, and [3, 24) takes less; both hardly differ from full prefill."""
    measured = {
        (15, 25): (0.143, 0.876),
        (10, 25): (0.070, 0.933),
        (3, 24): (0.004, 0.916),
        (0, 25): (0.002, 0.916),
        (5, 30): (0.050, 0.950),
    }
    assert order_of(measured) == [(0, 25), (3, 24), (10, 25), (15, 25)]


def test_bad_plans_wait_until_all_good_ones_have_passed():
    measured = {(1, 2): (0.3, 0.5), (1, 4): (0.2, 0.8), (1, 5): (0.01, 0.7), (0, 6): (0.1, 0.9)}
    assert order_of(measured) == [(0, 6), (1, 5), (1, 4), (1, 2)]
    choice = choose(plans_of(measured), OWN, TASK, 0.05)
    assert choice.expected == plan(0, 6)
    bad = {it: values for it, values in measured.items() if it != (0, 6)}
    assert choose(plans_of(bad), OWN, TASK, 0.05).expected is None
    assert order_of(bad) == [(1, 5), (1, 4), (1, 2)], "for a reason that has numbers"


def mixed(kl: float, *contexts: tuple[int, int, float]) -> Scores:
    """Return the scores of groups of contexts. A group has a number of contexts, questions per
    context, and a quality."""
    return [
        (Score(kl=kl, tv=0.0, quality=quality),) * questions
        for size, questions, quality in contexts
        for _ in range(size)
    ]


def test_a_plan_that_loses_much_of_a_small_task_waits_until_the_others_have_passed():
    """It loses 40 % of a task with a tenth of the questions, which is 3.6 % of all."""
    own, tasks = [[1.0]] * 330, [range(300), range(300, 330)]
    lossy, sound = plan(0, 8), plan(2, 6)
    measured = {
        lossy: mixed(0.01, (300, 1, 1.0), (30, 1, 0.6)),
        sound: mixed(0.02, (300, 1, 1.0), (30, 1, 1.0)),
    }
    choice = choose(measured, own, tasks, 0.05)
    assert choice.order == (sound,) and choice.expected == sound
    alone = choose({lossy: measured[lossy]}, own, tasks, 0.05)
    assert alone.order == (lossy,) and alone.expected is None


def test_a_context_with_many_questions_counts_as_one():
    own = [[1.0] * 40, *[[1.0]] * 119]
    measured = {
        plan(0, 4): mixed(0.1, (1, 40, 0.0), (119, 1, 1.0)),
        plan(1, 4): mixed(0.2, (1, 40, 1.0), (119, 1, 0.9)),
    }
    assert choose(measured, own, [range(120)], 0.05).expected == plan(0, 4)


def test_a_plan_that_more_contexts_than_there_will_be_could_prove_is_not_expected_to_pass():
    """The plan loses 4 %, all of it in a few contexts. This is within the tolerance."""
    own, lossy, sound = [[1.0]] * 100, plan(2, 6), plan(0, 8)
    measured = {lossy: mixed(0.02, (4, 1, 0.0), (96, 1, 1.0)), sound: mixed(0.01, (100, 1, 1.0))}
    choice = choose(measured, own, [range(100)], 0.05)
    assert choice.expected == sound and choice.order == (sound, lossy)
    assert choose(measured, own, [range(100)], 0.05, most_contexts=9000).expected == lossy


def test_blocks_of_more_than_nine_layers_in_ten_are_not_tried():
    layers = {Candidate(alone=i): scores(0.01) for i in range(10)}
    blocks = {plan(0, 10): scores(0.0), plan(0, 9): scores(0.1), plan(2, 6): scores(0.2)}
    swept = Measured(sender=[], full_prefill=[], candidates=layers | blocks)
    assert shortlist(swept) == [plan(2, 6), plan(0, 9)]
    wide = {Candidate(alone=i): scores(0.01) for i in range(30)}
    swept = Measured(sender=[], full_prefill=[], candidates=wide | {plan(0, 28): scores(0.1)})
    assert shortlist(swept) == []


@pytest.mark.parametrize("seed", range(20))
def test_luck_changes_nothing_about_what_is_tried_first(seed):
    """The KL divergence follows the true loss, and the metric is noisy. The first plan is the
    closest one."""
    rng = random.Random(seed)
    measured = {
        (start, 20): (0.3 * (start / 20) ** 2 + 0.001, FULL + rng.uniform(-0.02, 0.04))
        for start in range(1, 20)
    }
    order = order_of(measured)
    assert order[0] == (1, 20)
    kl = [measured[it][0] for it in order]
    assert kl == sorted(kl) and len(order) <= MOST_TRIED


def swept_of(blocks: Mapping[tuple[int, int], float]) -> Measured:
    """Return the measurements of a sweep, from the KL divergence of each block of a model with six
    layers."""
    layers = {Candidate(alone=i): scores(0.01 * kl) for i, kl in enumerate((3, 9, 1, 2, 0, 4))}
    return Measured(
        sender=[(0.1,) * 3] * 12,
        full_prefill=[(FULL,) * 3] * 12,
        candidates=layers | {plan(*it): scores(kl) for it, kl in blocks.items()},
    )


@pytest.mark.parametrize("most", [2, 4])
def test_no_more_plans_are_decoded_and_tried_than_asked_for(most):
    """Up to half as many more plans, which are not good enough, may be tried in addition."""
    kl = {(start, 20): (start / 20) ** 2 + 0.01 for start in range(1, 20)}
    assert len(shortlist(swept_of(kl), most)) == most
    quality = {it: (value, FULL if it[0] < 12 else 0.5) for it, value in kl.items()}
    choice = choose(plans_of(quality), OWN, TASK, 0.05, most)
    assert len([it for it in choice.order if it.block.start < 12]) == most
    assert len(choice.order) == most + most // 2
    assert choice.expected == plan(11, 20)


def test_shortlist_has_only_close_blocks():
    blocks = {(1, 2): 0.5, (3, 4): 0.6, (4, 5): 0.7, (1, 3): 0.55, (0, 3): 0.2, (0, 6): 0.0}
    assert shortlist(swept_of(blocks)) == [plan(1, 2), plan(0, 3)]


def test_only_the_closest_plan_of_a_size_is_tried_if_no_smaller_one_is_closer():
    kl = {(1, 4): 0.3, (2, 5): 0.2, (3, 5): 0.4, (0, 4): 0.25, (0, 5): 0.1}
    scored = {plan(*it): scores(value) for it, value in kl.items()}
    assert closest(scored) == [plan(3, 5), plan(2, 5), plan(0, 5)]
    assert closest(scored, 2) == [plan(3, 5), plan(0, 5)]


def test_neighbours_begin_or_end_one_layer_beside_a_plan():
    blocks = [(it.block.start, it.block.stop) for it in neighbours([plan(0, 2), plan(2, 4)], 4)]
    assert blocks == [(0, 1), (0, 3), (1, 2), (1, 4), (2, 3), (3, 4)]
    mapped = replace(plan(1, 2), e_map=EMap(layer=1, dtype="float32", sha256="ab"))
    assert [it.block for it in neighbours([mapped], 4)] == [Span(1, 3)], "its map is of layer 1"
    widest = [it.block for it in neighbours([plan(0, 28)], 32)]
    assert Span(0, 27) in widest and Span(0, 29) not in widest, "more than nine layers in ten"
    assert Span(0, 4) not in [it.block for it in neighbours([plan(0, 3)], 4)]


def test_the_best_two_are_the_expected_plan_and_the_one_before_it():
    measured = {(0, 6): (0.1, FULL), (1, 5): (0.2, FULL), (2, 4): (0.3, FULL), (3, 4): (0.4, 0.1)}
    best = choose(plans_of(measured), OWN, TASK, 0.05).best
    assert best == (plan(1, 5), plan(2, 4))
    alone = {(0, 6): (0.1, FULL), (1, 5): (0.2, 0.1)}
    assert choose(plans_of(alone), OWN, TASK, 0.05).best == (plan(0, 6),), "none is before it"
    bad = {it: (kl, 0.1) for it, (kl, _) in measured.items()}
    assert choose(plans_of(bad), OWN, TASK, 0.05).best == (plan(0, 6), plan(1, 5))


def test_layers_are_ranked_by_their_kl():
    assert sensitive_first(swept_of({}).layers) == [1, 5, 0, 3, 2, 4]


def test_plans_of_one_size_are_in_the_same_order_in_every_run():
    """The better plan comes first, then the closer one, in whatever order Python iterates over the
    names."""
    for number in range(20):
        e_map = EMap(layer=3, dtype="float32", sha256=f"{number:064x}")
        better = plan(1, 3)
        closer = Candidate(runs=(Span(3, 5),), e_map=e_map)
        measured = {closer: scores(0.1, 0.5), better: scores(0.2, 0.6)}
        choice = choose(measured, OWN, TASK, 0.05)
        assert choice.frontier == [better, closer]


def test_the_grid_has_every_block_once():
    blocks = grid(12, 1)
    assert len(blocks) == len(set(blocks)) == 12 * 13 // 2
    assert all(len(block) for block in blocks)


def test_a_coarse_grid_ends_at_the_last_layer():
    assert grid(5, 2) == [
        Span(0, 2), Span(0, 4), Span(0, 5), Span(2, 4), Span(2, 5), Span(4, 5)
    ]  # fmt: skip
    assert grid(3, 8) == [Span(0, 3)]


@pytest.mark.parametrize(
    ("qualities", "expected"),
    [
        ({(1, 2): 0.5, (1, 3): 0.9, (0, 3): 1.0}, [(1, 2), (1, 3), (0, 3)]),
        ({(1, 2): 0.5, (1, 3): 0.5, (0, 3): 1.0}, [(1, 2), (0, 3)]),  # no better than a smaller one
        ({(1, 2): 0.9, (1, 3): 0.7, (0, 3): 0.9}, [(1, 2)]),
        ({(0, 1): 0.2, (1, 2): 0.6, (2, 3): 0.4}, [(1, 2)]),  # the best of its size
    ],
)
def test_a_block_is_on_the_frontier_where_it_beats_all_smaller_ones(qualities, expected):
    by_plan = {plan(*block): quality for block, quality in qualities.items()}
    plans = frontier(by_plan, dict.fromkeys(by_plan, 0.1))
    assert plans == [plan(*block) for block in expected]


def test_kl_decides_between_equals_and_then_the_first():
    kl = {plan(0, 2): 0.2, plan(1, 3): 0.1, plan(2, 4): 0.1}
    assert frontier(dict.fromkeys(kl, 0.9), kl) == [plan(1, 3)]
