"""Choose which plans are worth decoding, and which of them the gate will try. Pure.

A plan's work is the number of layers that it recomputes. KL to full prefill tells plans apart with
a fraction of the questions that the metric needs. A mean of the metric may also be luck. So we
decode only plans on the frontier of work against KL: no plan with as little work has less KL. Among
plans that are good enough by the metric, a plan with less KL is better.
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
"""Largest number of different layers at which blocks start, if the user gives no `--group`. Each of
these layers costs one more pass over a context. The number of blocks grows with the square."""
MOST_TRIED: Final = 12
"""Largest number of plans, with corrected E or without, that are decoded and tried by the gate."""
MOST_SHARE: Final = 0.9
"""Largest share of all layers that a plan worth trying recomputes. A limit by predicted time would
depend on the noise of the clock."""
NUM_SPLITS: Final = 3
"""Largest number of baselines that split the recommended block into several runs of layers. They
differ in the number of runs."""


def default_group(num_layers: int) -> int:
    """Return the default of `--group`: blocks may start at layers that are multiples of it.

    >>> [default_group(it) for it in (12, 16, 30, 32, 80)]
    [1, 1, 2, 2, 5]
    """
    return ceil(num_layers / MOST_STARTS)


def grid(num_layers: int, group: int) -> list[Span]:
    """Make every non-empty block that starts at a multiple of `group`, and stops at another
    multiple or at the last layer."""
    ends = [*range(0, num_layers, group), num_layers]
    return [Span(start, stop) for start in ends for stop in ends if start < stop]


def frontier(
    qualities: Mapping[Candidate, float], kl: Mapping[Candidate, float]
) -> list[Candidate]:
    """Choose plans with more quality than all plans with less work, sorted by work. If plans with
    the same work have equal quality, choose the one with the least KL, or else the first."""
    chosen: list[Candidate] = []
    for least in sorted({len(it) for it in qualities}):
        same = [it for it in qualities if len(it) == least]
        best = min(same, key=lambda it: (-qualities[it], kl[it]))
        if not chosen or qualities[best] > qualities[chosen[-1]]:
            chosen.append(best)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Plans chosen by the training split."""

    frontier: list[Candidate]
    """Plans by size. Among plans of at most its size, each is the best by the metric, or the
    closest to full prefill."""
    order: tuple[Candidate, ...]
    """Plans that the gate will try, from most work to least. First come plans that are expected to
    pass. Smaller plans follow, in case their bad result was luck. Within each of the two groups,
    plans with more work are closer to full prefill."""
    expected: Candidate | None
    """Plan that the gate will recommend if held-out data are like the training data."""

    @property
    def best(self) -> tuple[Candidate, ...]:
        """Return the expected plan, and the plan before it in `order`. If no plan is expected,
        return the first two plans of `order`."""
        last = 2 if self.expected is None else self.order.index(self.expected) + 1
        return self.order[max(0, last - 2) : last]


def neighbours(plans: Iterable[Candidate], num_layers: int) -> list[Candidate]:
    """Return plans that begin or end one layer earlier or later than one of `plans`, sorted by
    start and stop. A map corrects E only at its own layer, so a plan with a map keeps its start.
    Blocks of more than `MOST_SHARE` of the layers are left out."""
    plan_at = {}
    for plan in plans:
        start, stop = plan.block.start, plan.block.stop
        for block in ((start - 1, stop), (start + 1, stop), (start, stop - 1), (start, stop + 1)):
            is_mapped = plan.e_map is None or block[0] == start
            is_block = 0 <= block[0] < block[1] <= num_layers
            if is_mapped and is_block and block[1] - block[0] <= MOST_SHARE * num_layers:
                plan_at[block, plan.map_sha256] = replace(plan, runs=(Span(*block),))
    return [plan_at[it] for it in sorted(plan_at)]


def sensitive_first(layers: Sequence[Scores]) -> list[int]:
    """Return all layers, sorted by KL if only this layer's KV is the sender's, largest first."""
    return sorted(range(len(layers)), key=lambda it: -kl_of(layers[it]))


def shortlist(swept: Measured, most: int = MOST_TRIED) -> list[Candidate]:
    """Choose at most `most` blocks that no other block with as little work beats by KL, sorted by
    work. Blocks of more than `MOST_SHARE` of the layers are left out."""
    most_layers = MOST_SHARE * len(swept.layers)
    smaller = {it: of for it, of in swept.candidates.items() if 0 < len(it) <= most_layers}
    return closest(smaller, most)


def closest(plans: Mapping[Candidate, Scores], most: int = MOST_TRIED) -> list[Candidate]:
    """Choose plans that no plan with as little work beats by KL, sorted by work."""
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
    """Choose the plans that the gate tries. All of `plans` recompute fewer than all layers, and
    have answered all training questions.

    `tasks` has the indices of each task's contexts. As in the gate, a plan's worst task decides. A
    plan is expected to pass if `most_contexts` contexts like these would prove it at that task.
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
    """Share of full prefill's quality that a plan keeps at the task at which it keeps least."""
    means = [[mean_of([of[it] for it in places]) for of in (plan, full)] for places in tasks]
    return round(min(ours / own if own else 1.0 for ours, own in means), 6)


def _needed(
    plan: Qualities, full: Qualities, tasks: Sequence[Sequence[int]], tolerance: float
) -> float:
    """Return how many contexts like these would prove the plan, at the task that needs most."""
    of_tasks = ([(full[it], plan[it]) for it in places] for places in tasks)
    both = [([own for own, _ in it], [ours for _, ours in it]) for it in of_tasks]
    return max(contexts_needed(own, ours, tolerance) or inf for own, ours in both)


def kl_of(scores: Scores) -> float:
    return mean_of([[score.kl for score in context] for context in scores])


def qualities_of(scores: Scores) -> list[list[float]]:
    """Qualities by context and question, if all questions were answered."""
    return [[score.quality for score in context] for context in scores]


def baselines(
    frontier: Sequence[Candidate], recommended: Candidate | None, ranking: Sequence[int]
) -> list[Candidate]:
    """Make baselines that recompute as many layers as plans of the frontier do. `ranking` has all
    layers, the most sensitive first. A recommended plan that corrects E is not split: its map fits
    only E at the plan's first layer."""
    num_layers = len(ranking)
    sizes = spread([len(it) for it in frontier if len(it) < num_layers])
    sizes = sorted({*sizes, *([len(recommended)] if recommended else [])})
    alternatives = []
    for size in sizes:
        share = size / num_layers
        alternatives.append(Candidate(kind=BaselineKind.CACHEBLEND, share=share))
        runs = critical_runs(ranking[:size])
        alternatives.append(Candidate(kind=BaselineKind.CRITICAL_LAYERS, runs=runs))
    if recommended is None or recommended.e_map is not None:
        return alternatives
    for parts in spread(range(2, len(recommended) + 1), NUM_SPLITS):
        runs = split_runs(recommended.block, parts)
        alternatives.append(Candidate(kind=BaselineKind.SPLIT_BLOCK, runs=runs))
    return alternatives


def critical_runs(layers: Iterable[int]) -> tuple[Span, ...]:
    """Join neighbouring layers into runs of layers."""
    ordered = np.array(sorted(layers))
    return _spans(np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1))


def split_runs(block: Span, parts: int) -> tuple[Span, ...]:
    """Split a block into `parts` runs. Their lengths differ by at most one layer; longer runs are
    first."""
    return _spans(np.array_split(np.arange(block.start, block.stop), parts))


def _spans(runs: Iterable[NDArray[np.int64]]) -> tuple[Span, ...]:
    return tuple(Span(int(it[0]), int(it[-1]) + 1) for it in runs)
