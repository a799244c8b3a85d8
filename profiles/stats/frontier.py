"""Which plans are worth their work. Pure.

A plan is on the frontier where no other at as little work or less is as good. Of equally good ones
at the same work the one that stays closest to full prefill (least KL) stands for all; then the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Final, TypeVar

from cachetree import Span

Plan = TypeVar("Plan")


MOST_STARTS: Final = 16
"""Places where blocks begin, where nothing else is asked for: a pass over the prefix each, and the
blocks are as the square of them."""


def default_group(num_layers: int) -> int:
    """Layers between two starts of blocks.

    >>> [default_group(it) for it in (12, 16, 30, 32, 80)]
    [1, 1, 2, 2, 5]
    """
    return ceil(num_layers / MOST_STARTS)


def grid(num_layers: int, group: int) -> list[Span]:
    """Every non-empty block whose ends are multiples of `group`, or the last layer."""
    ends = [*range(0, num_layers, group), num_layers]
    return [Span(start, stop) for start in ends for stop in ends if start < stop]


def frontier(
    qualities: Mapping[Plan, float], kl: Mapping[Plan, float], work: Callable[[Plan], float]
) -> list[Plan]:
    """By work; from plans of the same work the best one, where it beats all that take less."""
    chosen: list[Plan] = []
    for least in sorted({work(it) for it in qualities}):
        same = [it for it in qualities if work(it) == least]
        best = min(same, key=lambda it: (-qualities[it], kl[it]))
        if not chosen or qualities[best] > qualities[chosen[-1]]:
            chosen.append(best)
    return chosen
