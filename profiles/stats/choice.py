"""Which plans are worth decoding, and which of them the gate will try. Pure.

KL to full prefill tells plans apart with a fraction of the questions that the metric needs, and a
mean of the metric may be luck. So what is decoded is on the frontier of work against KL, or against
the likelihood of the reference answers; and among plans that are as good as is asked for, closer to
full prefill is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from statistics import fmean
from typing import Final

from cachetree import EMPTY_SPAN, Span
from cachetree.planning import Recipe
from profiles.stats.frontier import frontier
from profiles.stats.measured import Scores, Swept, spread

MOST_TRIED: Final = 12
"""Plans of a kind that are decoded, and that the gate tries, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the training split says."""

    frontier: list[Recipe]
    """By work: where no other of its kind (blocks, refreshed layers alone, both together) at as
    little work or less is as good by the metric, or where none stays as close to full prefill."""
    order: tuple[Recipe, ...]
    """What the gate will try, from most work to least: plans that are good enough, none of which
    another at as little work or less stays closer than; then smaller ones that are not, in case
    that was bad luck. Every one stays closer to full prefill than those after it in its part."""
    expected: Recipe | None
    """What it will recommend, if held-out data are like these."""


def sensitive_first(layers: Sequence[Scores]) -> list[int]:
    """All layers by the KL that their KV alone costs; the most sensitive first."""
    return sorted(range(len(layers)), key=lambda it: -kl_of(layers[it]))


def shortlist(swept: Swept) -> list[Recipe]:
    """Blocks that may be worth their work, by work; all layers are no plan."""
    smaller = {it: scores for it, scores in swept.blocks.items() if len(it) < len(swept.layers)}
    kl = {it: kl_of(scores) for it, scores in smaller.items()}
    likelihood = {it: -_nll_of(scores) for it, scores in smaller.items()}
    near = frontier({it: -value for it, value in kl.items()}, kl, len)
    chosen = {*spread(near, MOST_TRIED), *spread(frontier(likelihood, kl, len))}
    return [Recipe(block=it) for it in sorted(chosen, key=lambda it: (len(it), it.start))]


def refreshing(swept: Swept, first_difference: int) -> list[Recipe]:
    """Plans with refreshed layers that are worth decoding. There are 2^L sets of layers, so only

        the k most sensitive layers refreshed, k = 2, 4, 8, … and all that differ
        the closest block of each size up to half of the model, with as many other layers refreshed

    Layers below the first that differs are the receiver's own already.
    """
    num_layers = len(swept.layers)
    closest: dict[int, Span] = {}
    for it in sorted(swept.blocks, key=lambda it: (len(it), kl_of(swept.blocks[it]))):
        closest.setdefault(len(it), it)
    return recipes(closest.values(), sensitive_first(swept.layers)[:num_layers], first_difference)


def recipes(
    best_blocks: Iterable[Span], ranking: Sequence[int], first_difference: int
) -> list[Recipe]:
    """`best_blocks` have one of each size; `ranking` has all layers, the most sensitive first."""
    differing = [layer for layer in ranking if layer >= first_difference]
    blocks = [it for it in best_blocks if 1 < len(it) <= len(ranking) // 2]
    found = []
    for block in (EMPTY_SPAN, *spread(blocks)):
        others = [layer for layer in differing if layer not in block]
        for number in _numbers(len(others)):
            found.append(Recipe(block=block, refreshed=tuple(sorted(others[:number]))))
    return found


def _numbers(total: int) -> list[int]:
    """2, 4, 8, … and the total; a single layer is a block."""
    doubling = takewhile(lambda it: it < total, (2**i for i in range(1, total)))
    return [*doubling, *([total] if total > 1 else [])]


def choose(plans: Mapping[Recipe, Scores], full_prefill: float, tolerance: float) -> Choice:
    """From plans smaller than all layers, whose answers to all training questions are known."""
    quality = {it: quality_of(scores) for it, scores in plans.items()}
    kl = {it: kl_of(scores) for it, scores in plans.items()}
    closeness = {it: -value for it, value in kl.items()}
    kinds: dict[tuple[bool, bool], list[Recipe]] = {}
    for it in plans:
        kinds.setdefault((bool(len(it.block)), bool(it.refreshed)), []).append(it)
    shown = {
        plan
        for kind in kinds.values()
        for values in (quality, closeness)
        for plan in frontier({it: values[it] for it in kind}, kl, _work)
    }
    good = {it: closeness[it] for it in plans if quality[it] >= (1 - tolerance) * full_prefill}
    near = spread(frontier(good, kl, _work), MOST_TRIED)
    least = near[0].work if near else inf
    below = {it: closeness[it] for it in plans if it.work < least}
    order = [*spread(frontier(below, kl, _work)), *near]
    return Choice(
        frontier=sorted({*shown, *order}, key=_work),
        order=tuple(reversed(order)),
        expected=near[0] if near else None,
    )


def kl_of(scores: Scores) -> float:
    return fmean(score.kl for context in scores for score in context)


def _nll_of(scores: Scores) -> float:
    return fmean(score.reference_nll for context in scores for score in context)


def quality_of(scores: Scores) -> float:
    """Mean of the metric."""
    return round(fmean(value for context in qualities_of(scores) for value in context), 6)


def qualities_of(scores: Scores) -> list[list[float]]:
    """By context and question; ValueError where one has not been answered."""
    return [[_answered(score.quality) for score in context] for context in scores]


def _answered(quality: float | None) -> float:
    if quality is None:
        raise ValueError("a question of this mixture was not answered")
    return quality


def _work(recipe: Recipe) -> float:
    return recipe.work
