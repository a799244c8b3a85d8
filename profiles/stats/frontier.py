"""Which plans are worth their work, and which blocks need no more measuring. Pure.

A plan is on the frontier where no other at as little work or less is as good. Of equally good ones
at the same work the one that stays closest to full prefill (least KL) stands for all; then the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Final, TypeVar

from cachetree import Span

Plan = TypeVar("Plan")

CONFIDENCE: Final = 3.0
"""Standard errors by which a block has to be worse before it is dropped."""
LEAST_QUESTIONS: Final = 12
"""A standard error from fewer says little."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One block so far: quality of each question in order, and the mean KL to full prefill."""

    qualities: Sequence[float]
    kl: float


def grid(num_layers: int, group: int) -> list[Span]:
    """Every non-empty block whose ends are multiples of `group`, or the last layer."""
    ends = [*range(0, num_layers, group), num_layers]
    return [Span(start, stop) for start in ends for stop in ends if start < stop]


def survivors(blocks: Mapping[Span, Standing]) -> frozenset[Span]:
    """Blocks that may still be on the frontier once all questions have been answered.

    A block is dropped where another one of as many layers or fewer is better by more than the
    noise allows, paired by question, and stays closer to full prefill too.
    """
    left = set()
    leader: Span | None = None
    for size in sorted({len(block) for block in blocks}):
        ranked = sorted((it for it in blocks if len(it) == size), key=lambda it: _rank(it, blocks))
        candidates = [ranked[0]] if leader is None else [leader, ranked[0]]
        leader = min(candidates, key=lambda it: _rank(it, blocks))
        left.update(it for it in ranked if not _is_beaten(blocks[it], blocks[leader]))
    return frozenset(left)


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


def _rank(block: Span, blocks: Mapping[Span, Standing]) -> tuple[float, float, int]:
    return -fmean(blocks[block].qualities), blocks[block].kl, block.start


def _is_beaten(block: Standing, leader: Standing) -> bool:
    if len(block.qualities) < LEAST_QUESTIONS or leader.kl >= block.kl:
        return False
    gains = [a - b for a, b in zip(leader.qualities, block.qualities, strict=True)]
    return fmean(gains) > CONFIDENCE * stdev(gains) / sqrt(len(gains))
