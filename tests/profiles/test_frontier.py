"""The frontier, and that blocks are dropped only when they cannot be on it."""

import random
from statistics import fmean

import pytest

from cachetree.ids import Span
from profiles.stats.frontier import LEAST_QUESTIONS, Standing, frontier, grid, survivors


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
    by_block = {Span(*block): quality for block, quality in qualities.items()}
    blocks = frontier(by_block, dict.fromkeys(by_block, 0.1), len)
    assert blocks == [Span(*block) for block in expected]


def test_kl_decides_between_equals_and_then_the_first():
    qualities = {Span(0, 2): 0.9, Span(1, 3): 0.9, Span(2, 4): 0.9}
    kl = {Span(0, 2): 0.2, Span(1, 3): 0.1, Span(2, 4): 0.1}
    assert frontier(qualities, kl, len) == [Span(1, 3)]


def standing(*qualities: float, kl: float) -> Standing:
    return Standing(qualities * (LEAST_QUESTIONS // len(qualities)), kl)


def test_a_block_is_dropped_when_a_smaller_one_is_clearly_better_and_closer():
    good, bad = standing(1.0, 1.0, 0.9, kl=0.1), standing(0.0, 0.2, 0.1, kl=0.5)
    small, large = Span(3, 4), Span(0, 4)
    assert survivors({small: good, large: bad}) == {small}
    assert survivors({small: bad, large: good}) == {small, large}, "it needs fewer layers"
    closer = Standing(bad.qualities, 0.01)
    assert survivors({small: good, large: closer}) == {small, large}, "the fast measure disagrees"


def test_noise_and_few_questions_drop_nothing():
    noisy = standing(1.0, 0.0, 1.0, 1.0, kl=0.1), standing(1.0, 1.0, 0.0, 0.0, kl=0.5)
    assert len(survivors(dict(zip((Span(0, 1), Span(1, 2)), noisy, strict=True)))) == 2
    few = Standing([1.0] * (LEAST_QUESTIONS - 1), 0.1), Standing([0.0] * (LEAST_QUESTIONS - 1), 0.5)
    assert len(survivors(dict(zip((Span(0, 1), Span(1, 2)), few, strict=True)))) == 2


@pytest.mark.parametrize("seed", range(20))
def test_pruning_as_questions_come_in_keeps_the_frontier(seed):
    """Blocks of known chances; 24 contexts of 3 questions, dropped after each context."""
    rng = random.Random(seed)
    blocks = grid(8, 1)
    critical = rng.randrange(1, 6)
    chance = {
        it: min(1.0, 0.2 + 0.75 * (critical in it) * len(it) / 4 + rng.uniform(0, 0.1))
        for it in blocks
    }
    answers = {it: [float(rng.random() < chance[it]) for _ in range(72)] for it in blocks}
    kl = {it: 2.5 * (1.0 - chance[it]) + rng.uniform(0, 0.05) for it in blocks}
    alive = set(blocks)
    for num_questions in range(3, 72, 3):
        alive &= survivors({it: Standing(answers[it][:num_questions], kl[it]) for it in alive})
    whole = frontier({it: fmean(answers[it]) for it in blocks}, kl, len)
    assert frontier({it: fmean(answers[it]) for it in blocks if it in alive}, kl, len) == whole
    assert len(alive) < len(blocks)
