"""Which plans are worth their work."""

import pytest

from cachetree.ids import Span
from profiles.stats.choice import frontier, grid


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
