"""Which plans there are, which are worth decoding, and which of them the gate will try. Pure.

KL to full prefill tells plans apart with a fraction of the questions that the metric needs, and a
mean of the metric may be luck. So what is decoded is on the frontier of work against KL; and among
plans that are as good as is asked for, closer to full prefill is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachetree import Span
from profiles.evidence import BaselineKind
from profiles.stats.gate import MOST_CONTEXTS, contexts_needed
from profiles.stats.measured import Candidate, Measured, Qualities, Scores, mean_of, spread

MOST_STARTS: Final = 16
"""Places where blocks begin, where nothing else is asked for: a pass over the prefix each, and the
blocks are as the square of them."""
MOST_TRIED: Final = 12
"""Plans of a kind that are decoded, and that the gate tries, at most."""
MOST_SHARE: Final = 0.9
"""Of all layers, that a plan worth trying recomputes at most. By predicted time, noise of the clock
would decide what is tried."""
NUM_SPLITS: Final = 3
"""Numbers of runs that the recommended block is split into."""


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
    qualities: Mapping[Candidate, float], kl: Mapping[Candidate, float]
) -> list[Candidate]:
    """By work, plans that beat all that take less. Of equally good ones at the same work the one
    that stays closest to full prefill (least KL) stands for all; then the first."""
    chosen: list[Candidate] = []
    for least in sorted({len(it) for it in qualities}):
        same = [it for it in qualities if len(it) == least]
        best = min(same, key=lambda it: (-qualities[it], kl[it]))
        if not chosen or qualities[best] > qualities[chosen[-1]]:
            chosen.append(best)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the training split says."""

    frontier: list[Candidate]
    """By size: where no other of at most that size is as good by the metric, or where none stays
    as close to full prefill."""
    order: tuple[Candidate, ...]
    """What the gate will try, from most work to least: plans that it is expected to prove, none of
    which another at as little work or less stays closer than; then smaller ones, in case that was
    bad luck. Every one stays closer to full prefill than those after it in its part."""
    expected: Candidate | None
    """What it will recommend, if held-out data are like these."""

    @property
    def best(self) -> tuple[Candidate, ...]:
        """The expected plan, and the one before it in the order; if none is expected, the first
        two."""
        last = 2 if self.expected is None else self.order.index(self.expected) + 1
        return self.order[max(0, last - 2) : last]


def neighbours(plans: Iterable[Candidate], num_layers: int) -> list[Candidate]:
    """Plans whose block begins or ends a layer beside one of these, by start and stop. A map
    corrects E at its own layer alone."""
    found = {}
    for it in plans:
        start, stop = it.block.start, it.block.stop
        for block in ((start - 1, stop), (start + 1, stop), (start, stop - 1), (start, stop + 1)):
            is_mapped = it.e_map is None or block[0] == start
            if is_mapped and 0 <= block[0] < block[1] <= num_layers:
                found[block, it.map_sha256] = replace(it, runs=(Span(*block),))
    return [found[it] for it in sorted(found)]


def sensitive_first(layers: Sequence[Scores]) -> list[int]:
    """All layers by the KL that their KV alone costs; the most sensitive first."""
    return sorted(range(len(layers)), key=lambda it: -kl_of(layers[it]))


def shortlist(swept: Measured, most: int = MOST_TRIED) -> list[Candidate]:
    """Blocks that may be worth their work, by work; nearly all layers are no plan."""
    most_layers = MOST_SHARE * len(swept.layers)
    smaller = {it: of for it, of in swept.candidates.items() if 0 < len(it) <= most_layers}
    return closest(smaller, most)


def closest(plans: Mapping[Candidate, Scores], most: int = MOST_TRIED) -> list[Candidate]:
    """Of plans those that no other at as little work stays closer to full prefill than, by work."""
    kl = {it: kl_of(scores) for it, scores in plans.items()}
    return spread(frontier({it: -value for it, value in kl.items()}, kl), most)


def choose(
    plans: Mapping[Candidate, Scores],
    full_prefill: Qualities,
    tasks: Sequence[Sequence[int]],
    tolerance: float,
    most: int = MOST_TRIED,
    most_contexts: int = MOST_CONTEXTS,
) -> Choice:
    """From plans smaller than all layers, whose answers to all training questions are known.

    `tasks` has the places of each task's contexts. As for the gate, a plan is as good as it is at
    its worst task, and it has to be proven there with so many contexts.
    """
    quality = {it: _kept(qualities_of(of), full_prefill, tasks) for it, of in plans.items()}
    kl = {it: kl_of(scores) for it, scores in plans.items()}
    closeness = {it: -value for it, value in kl.items()}
    shown = [it for values in (quality, closeness) for it in frontier(values, kl)]
    needed = {
        it: _needed(qualities_of(of), full_prefill, tasks, tolerance) for it, of in plans.items()
    }
    good = {it: closeness[it] for it in plans if needed[it] <= most_contexts}
    near = spread(frontier(good, kl), most)
    least = len(near[0]) if near else inf
    below = {it: closeness[it] for it in plans if len(it) < least}
    order = [*spread(frontier(below, kl), most // 2), *near]
    return Choice(
        frontier=sorted(dict.fromkeys([*shown, *order]), key=len),
        order=tuple(reversed(order)),
        expected=near[0] if near else None,
    )


def _kept(plan: Qualities, full: Qualities, tasks: Sequence[Sequence[int]]) -> float:
    """Share of full prefill's quality that a plan keeps, at the task at which that is least."""
    means = [[mean_of([of[it] for it in places]) for of in (plan, full)] for places in tasks]
    return round(min(ours / own if own else 1.0 for ours, own in means), 6)


def _needed(
    plan: Qualities, full: Qualities, tasks: Sequence[Sequence[int]], tolerance: float
) -> float:
    """Contexts of the task that needs most of them to prove the plan, if all are like these."""
    of_tasks = ([(full[it], plan[it]) for it in places] for places in tasks)
    both = [([own for own, _ in it], [ours for _, ours in it]) for it in of_tasks]
    return max(contexts_needed(own, ours, tolerance) or inf for own, ours in both)


def kl_of(scores: Scores) -> float:
    return mean_of([[score.kl for score in context] for context in scores])


def qualities_of(scores: Scores) -> list[list[float]]:
    """By context and question, all of which were answered."""
    return [[score.quality for score in context] for context in scores]


def baselines(
    frontier: Sequence[Candidate], recommended: Candidate | None, ranking: Sequence[int]
) -> list[Candidate]:
    """Alternatives at the frontier's sizes; `ranking` has all layers, the most sensitive first. A
    plan that corrects E is not split: there is a map for where it begins alone."""
    num_layers = len(ranking)
    sizes = spread([len(it) for it in frontier if len(it) < num_layers])
    sizes = sorted({*sizes, *([len(recommended)] if recommended else [])})
    found = []
    for size in sizes:
        share = size / num_layers
        found.append(Candidate(kind=BaselineKind.CACHEBLEND, share=share))
        runs = critical_runs(ranking[:size])
        found.append(Candidate(kind=BaselineKind.CRITICAL_LAYERS, runs=runs))
    if recommended is None or recommended.e_map is not None:
        return found
    for parts in spread(range(2, len(recommended) + 1), NUM_SPLITS):
        runs = split_runs(recommended.block, parts)
        found.append(Candidate(kind=BaselineKind.SPLIT_BLOCK, runs=runs))
    return found


def critical_runs(layers: Iterable[int]) -> tuple[Span, ...]:
    """Layers as runs, neighbours joined."""
    ordered = np.array(sorted(layers))
    return _spans(np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1))


def split_runs(block: Span, parts: int) -> tuple[Span, ...]:
    """A block in `parts` runs whose lengths differ by one at most, the longer ones first."""
    return _spans(np.array_split(np.arange(block.start, block.stop), parts))


def _spans(runs: Iterable[NDArray[np.int64]]) -> tuple[Span, ...]:
    return tuple(Span(int(it[0]), int(it[-1]) + 1) for it in runs)
