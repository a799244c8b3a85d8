"""Which plans are worth decoding, and which of them the gate will try. Pure.

KL to full prefill tells plans apart with a fraction of the questions that the metric needs, and a
mean of the metric may be luck. So what is decoded is on the frontier of work against KL, or against
the likelihood of the reference answers; and among plans that are as good as is asked for, closer to
full prefill is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Final, Generic, TypeVar

from cachetree import Span
from profiles.stats.frontier import frontier
from profiles.stats.measured import Candidate, Scores, Swept, spread

MOST_TRIED: Final = 12
"""Plans of a kind that are decoded, and that the gate tries, at most."""


P = TypeVar("P", Span, Candidate)
"""Their length are the layers that are computed anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[P]):
    """What the training split says."""

    frontier: list[P]
    """By size: where no other of at most that size is as good by the metric, or where none stays
    as close to full prefill."""
    order: tuple[P, ...]
    """What the gate will try, from most work to least: plans that are good enough, none of which
    another at as little work or less stays closer than; then smaller ones that are not, in case
    that was bad luck. Every one stays closer to full prefill than those after it in its part."""
    expected: P | None
    """What it will recommend, if held-out data are like these."""


def sensitive_first(layers: Sequence[Scores]) -> list[int]:
    """All layers by the KL that their KV alone costs; the most sensitive first."""
    return sorted(range(len(layers)), key=lambda it: -kl_of(layers[it]))


def shortlist(swept: Swept, most: int = MOST_TRIED) -> list[Span]:
    """Blocks that may be worth their work, by work; all layers are no plan."""
    smaller = {it: scores for it, scores in swept.blocks.items() if len(it) < len(swept.layers)}
    kl = {it: kl_of(scores) for it, scores in smaller.items()}
    likelihood = {it: -_nll_of(scores) for it, scores in smaller.items()}
    chosen = {*closest(smaller, most), *spread(frontier(likelihood, kl, len), most // 2)}
    return sorted(chosen, key=lambda it: (len(it), it.start))


def closest(plans: Mapping[P, Scores], most: int = MOST_TRIED) -> list[P]:
    """Of plans those that no other at as little work stays closer to full prefill than, by work."""
    kl = {it: kl_of(scores) for it, scores in plans.items()}
    return spread(frontier({it: -value for it, value in kl.items()}, kl, len), most)


def choose(
    plans: Mapping[P, Scores], full_prefill: float, tolerance: float, most: int = MOST_TRIED
) -> Choice[P]:
    """From plans smaller than all layers, whose answers to all training questions are known."""
    quality = {it: quality_of(scores) for it, scores in plans.items()}
    kl = {it: kl_of(scores) for it, scores in plans.items()}
    closeness = {it: -value for it, value in kl.items()}
    shown = {block for values in (quality, closeness) for block in frontier(values, kl, len)}
    good = {it: closeness[it] for it in plans if quality[it] >= (1 - tolerance) * full_prefill}
    near = spread(frontier(good, kl, len), most)
    least = len(near[0]) if near else inf
    below = {it: closeness[it] for it in plans if len(it) < least}
    order = [*spread(frontier(below, kl, len), most // 2), *near]
    return Choice(
        frontier=sorted({*shown, *order}, key=len),
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
