"""What a profile's numbers say when they are put together. Pure functions of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from cachetree.evidence import (
    Baseline,
    BaselineKind,
    FrontierPoint,
    LayerSensitivity,
    MeasuredBlock,
    MeasuredProfile,
)
from cachetree.ids import Span
from cachetree.planning.profile import PROJECTION, Recipe

CRITICAL_SHARE: Final = 0.25
CRITICAL_LOSS: Final = 0.01
"""A layer is critical if it loses this share of the largest loss, and this much quality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Whether the contexts agree on which layers matter, by KL."""

    layers: tuple[int, ...]
    """The most affected on average: as many as are critical, at least one, at most a quarter."""
    share: float
    """Of the as many layers most affected on a context, how many are those; its mean."""
    num_contexts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What the recommended plan saves, at the held-out split's mean lengths."""

    recipe: Recipe
    quality: float
    loss: float
    ttft_s: float
    full_prefill_s: float
    ratio: float
    """Predicted TTFT by full prefill's; below 1 it saves time."""


def num_layers(profile: MeasuredProfile) -> int:
    return profile.receiver.num_layers


def lengths(profile: MeasuredProfile) -> tuple[int, int]:
    """Mean tokens of prefix and suffix on the held-out split, for which TTFTs are predicted."""
    split = profile.held_out
    return round(split.mean_prefix_tokens), round(split.mean_suffix_tokens)


def full_prefill_s(profile: MeasuredProfile) -> float:
    return profile.costs.full_prefill_s(*lengths(profile))


def full_reuse_s(profile: MeasuredProfile) -> float:
    return profile.costs.ttft_s((), *lengths(profile))


def ttft_ratio(profile: MeasuredProfile, ttft_s: float) -> float:
    """A TTFT by full prefill's."""
    full_s = full_prefill_s(profile)
    return ttft_s / full_s if full_s else 1.0


def blocks(profile: MeasuredProfile) -> tuple[FrontierPoint, ...]:
    """The frontier without plans that refresh layers."""
    return tuple(it for it in profile.frontier if not it.refreshed)


def recommended(profile: MeasuredProfile) -> Recipe | None:
    """The recommended plan, if it leaves something to reuse."""
    found = profile.recommended
    if found is None or len(found.block) >= num_layers(profile):
        return None
    return found.recipe


def recommended_block(profile: MeasuredProfile) -> Span | None:
    """The recommended plan, if it is a block and nothing else."""
    found = recommended(profile)
    return None if found is None or found.refreshed else found.block


def point_of(profile: MeasuredProfile, recipe: Recipe) -> FrontierPoint | None:
    return next((it for it in profile.frontier if it.recipe == recipe), None)


def judged(profile: MeasuredProfile) -> FrontierPoint | None:
    """What the verdict is about: the recommended plan, or else the first that was tried."""
    if profile.recommended is not None:
        return point_of(profile, profile.recommended.recipe)
    return next((profile.frontier[place] for place in profile.order), None)


def saving(profile: MeasuredProfile) -> Saving | None:
    """None where nothing smaller than all layers is recommended."""
    recipe, measured = recommended(profile), profile.recommended
    if recipe is None or measured is None:
        return None
    point = point_of(profile, recipe)
    ttft_s = point.ttft_s if point else profile.costs.ttft_s(recipe.runs, *lengths(profile))
    return Saving(
        recipe=recipe,
        quality=measured.quality,
        loss=profile.full_prefill_quality - measured.quality,
        ttft_s=ttft_s,
        full_prefill_s=full_prefill_s(profile),
        ratio=ttft_ratio(profile, ttft_s),
    )


def moved_share(profile: MeasuredProfile, recipe: Recipe) -> float:
    """Bytes of KV and E that a plan loads where sender and receiver share no pool, of all KV's."""
    all_kv, _ = profile.costs.moved_bytes(())
    return sum(profile.costs.moved_bytes(recipe.runs)) / all_kv


def loss_of(profile: MeasuredProfile, layer: LayerSensitivity) -> float:
    """Quality that this layer alone costs, on the training split."""
    return profile.train.full_prefill.mean - layer.quality


def critical_loss(profile: MeasuredProfile) -> float:
    """Loss from which a layer is critical."""
    largest = max((loss_of(profile, it) for it in profile.layers), default=0.0)
    return max(CRITICAL_SHARE * largest, CRITICAL_LOSS)


def critical_layers(profile: MeasuredProfile) -> tuple[int, ...]:
    least = critical_loss(profile) - 1e-9
    return tuple(it.layer for it in profile.layers if loss_of(profile, it) >= least)


def agreement(profile: MeasuredProfile) -> Agreement:
    """How far each context's order of the layers is the order of all contexts."""
    by_layer = {it.layer: it.kl_by_context for it in profile.layers}
    num_contexts = min(map(len, by_layer.values()), default=0)
    if not num_contexts:
        return Agreement(layers=(), share=0.0, num_contexts=0)
    size = max(1, min(len(critical_layers(profile)), len(by_layer) // 4))
    chosen = set(sorted(by_layer, key=lambda layer: -fmean(by_layer[layer]))[:size])
    shares = []
    for context in range(num_contexts):
        order = sorted(by_layer, key=lambda layer: -by_layer[layer][context])
        shares.append(len(chosen & set(order[:size])) / size)
    return Agreement(layers=tuple(sorted(chosen)), share=fmean(shares), num_contexts=num_contexts)


def within_tolerance(profile: MeasuredProfile) -> tuple[MeasuredBlock, ...]:
    """Blocks smaller than all layers that are good enough on the training split."""
    floor = profile.train.full_prefill.mean * (1.0 - profile.tolerance)
    return tuple(
        it
        for it in profile.measured
        if it.quality is not None and it.quality >= floor and len(it.block) < num_layers(profile)
    )


def in_all(blocks: Sequence[MeasuredBlock]) -> tuple[int, ...]:
    """Layers that every one of the blocks recomputes."""
    if not blocks:
        return ()
    return tuple(range(max(it.start for it in blocks), min(it.stop for it in blocks)))


def best_alternative(profile: MeasuredProfile, recipe: Recipe) -> Baseline | None:
    """The best baseline of this receiver at no more compute, by held-out quality."""
    max_layers = len(recipe.block) + PROJECTION * len(recipe.refreshed)
    affordable = [
        it
        for it in profile.baselines
        if it.kind is not BaselineKind.SMALL_MODEL and it.recomputed_layers <= max_layers + 1e-6
    ]
    return max(affordable, key=lambda it: it.quality.mean, default=None)


def gap_of(point: FrontierPoint) -> float:
    """How much better a block looked on the training split than it is on the held-out one."""
    return point.train_quality - point.held_out.mean


def worst_gap(profile: MeasuredProfile) -> FrontierPoint | None:
    """The point whose two qualities are furthest apart, either way."""
    return max(blocks(profile), key=lambda it: abs(gap_of(it)), default=None)


def time_errors(profile: MeasuredProfile) -> tuple[float, ...]:
    """|predicted - measured| / measured of every held-out plan."""
    return tuple(
        abs(it.predicted_s - it.measured_s) / it.measured_s
        for it in profile.costs.held_out
        if it.measured_s
    )


def longest_prefix(profile: MeasuredProfile) -> int:
    """Prefix tokens up to which the cost model has been seen to hold, or been used."""
    seen = [it.num_tokens for it in profile.costs.held_out]
    return max([*profile.costs.fitted_on, *seen, lengths(profile)[0], 1])
