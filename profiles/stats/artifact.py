"""From scores to a profile. Pure: everything has been measured already."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final, TypeVar

from cachetree import ModelIdentity, Span
from cachetree.planning import PROFILE_VERSION as VERSION
from cachetree.planning import BlockQuality, Recipe
from profiles.evidence import (
    Baseline,
    BaselineKind,
    CostModel,
    DataFile,
    Fidelity,
    FrontierPoint,
    LayerSensitivity,
    Making,
    MeasuredBlock,
    MeasuredProfile,
    Split,
    TaskLoss,
    TaskScores,
)
from profiles.stats.frontier import frontier
from profiles.stats.gate import Qualities, contexts_needed, interval, loss_bound, proven, verdict
from profiles.stats.measured import Candidate, Judged, Score, Scores, Swept, spread

if TYPE_CHECKING:
    from profiles.data import Document, Task

MOST_CLOSER: Final = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the training split says."""

    frontier: list[Recipe]
    """Of every kind: blocks, refreshed layers alone, and both together."""
    order: tuple[Recipe, ...]
    """What the gate will try, from most work to least, all of it smaller than all layers: plans
    that no plan of any kind beats at as little work, and before them some that take more work and
    stay closer to full prefill. Where those were lucky, these are left to pass."""
    expected: Recipe | None
    """What it will recommend, if held-out data are like these."""
    best_blocks: list[Span]
    """Of each size, the smallest first."""
    ranking: list[int]
    """Layers by the quality that their KV alone costs, then by KL; the most sensitive first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """One split's questions, and where they came from."""

    files: tuple[DataFile, ...]
    documents: Sequence[Document]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """A smaller model on the held-out split, by full prefill."""

    qualities: list[Sequence[float]]
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whom a profile is about."""

    sender: ModelIdentity
    receiver: ModelIdentity
    first_difference: int
    costs: CostModel


def choose(swept: Swept, tolerance: float) -> Choice:
    """By the plans whose answers to all questions are known."""
    known = {
        recipe: scores
        for recipe, scores in _scores(swept).items()
        if all(score.quality is not None for score in _flat(scores))
    }
    qualities = {recipe: _quality(scores) for recipe, scores in known.items()}
    kl = {recipe: _fidelity(scores).kl for recipe, scores in known.items()}
    kinds: dict[tuple[bool, bool], dict[Recipe, float]] = {}
    for recipe, quality in qualities.items():
        kind = bool(len(recipe.block)), bool(recipe.refreshed)
        kinds.setdefault(kind, {})[recipe] = quality
    found = [it for kind in kinds.values() for it in frontier(kind, kl, _work)]
    num_layers = len(swept.layers)
    smaller = {it: quality for it, quality in qualities.items() if len(it.block) < num_layers}
    floor = (1 - tolerance) * fmean(_flat(swept.full_prefill))
    order = frontier(smaller, kl, _work)
    closer = frontier(
        {it: -kl[it] for it, quality in smaller.items() if quality >= floor}, kl, _work
    )
    order += spread([it for it in closer if it.work > order[-1].work], MOST_CLOSER)
    found = sorted({*found, *order}, key=_work)
    blocks = sorted(
        (it for it in known if not it.refreshed),
        key=lambda it: (len(it.block), -qualities[it], kl[it]),
    )
    best: dict[int, Span] = {}
    for it in blocks:
        best.setdefault(len(it.block), it.block)
    return Choice(
        frontier=found,
        order=tuple(reversed(order)),
        expected=next((it for it in order if qualities[it] >= floor), None),
        best_blocks=list(best.values()),
        ranking=sorted(
            range(num_layers),
            key=lambda it: (_quality(swept.layers[it]), -_fidelity(swept.layers[it]).kl),
        ),
    )


def build(
    subject: Subject,
    train: Data,
    held_out: Data,
    swept: Swept,
    judged: Judged,
    *,
    choice: Choice,
    small: SmallModel | None,
    tolerance: float,
    made: Making,
) -> MeasuredProfile:
    """The profile: what was measured, and the verdict that follows."""
    split = split_of(held_out, judged.sender, judged.full_prefill, judged.full_reuse)
    full = split.full_prefill
    scores = _scores(swept)
    points = {}
    for it in choice.frontier:
        plan = qualities_of(judged.candidates[Candidate(runs=it.runs)])
        tasks: tuple[TaskLoss, ...] = ()
        if it in choice.order:
            tasks = losses_of(held_out.documents, judged.full_prefill, plan, tolerance)
        points[it] = _point(it, scores[it], judged, subject.costs, split, tasks)
    plans = [points[it] for it in choice.order]
    passed, reason = verdict(plans, split, tolerance)
    usable = [_as_usable(it) for it in reversed(proven(plans, tolerance))]
    all_layers = BlockQuality(start=0, stop=subject.costs.num_layers, quality=full.mean)
    return MeasuredProfile(
        version=VERSION,
        sender=subject.sender,
        receiver=subject.receiver,
        metric="+".join(sorted({it.task.metric.value for it in held_out.documents})),
        data_sha256=_digest([*train.files, *held_out.files]),
        num_questions=split.num_questions,
        sender_quality=split.sender.mean,
        full_prefill_quality=full.mean,
        full_reuse_quality=split.full_reuse.mean,
        tolerance=tolerance,
        blocks=(*usable, all_layers),
        recommended=usable[0] if usable else None,
        passed=passed,
        reason=reason,
        first_difference=subject.first_difference,
        train=split_of(train, swept.sender, swept.full_prefill, swept.full_reuse),
        held_out=split,
        layers=tuple(_layer(layer, scores) for layer, scores in enumerate(swept.layers)),
        measured=tuple(
            _measured(Recipe(block=block), swept.blocks[block]) for block in sorted(swept.blocks)
        ),
        refreshes=tuple(_measured(recipe, it) for recipe, it in swept.refreshed.items()),
        frontier=tuple(points.values()),
        order=tuple(choice.frontier.index(it) for it in choice.order),
        baselines=tuple(_baselines(judged, small, subject.costs, split)),
        costs=subject.costs,
        made=made,
    )


def _work(recipe: Recipe) -> float:
    return recipe.work


def _scores(swept: Swept) -> dict[Recipe, Scores]:
    return {**{Recipe(block=it): found for it, found in swept.blocks.items()}, **swept.refreshed}


def split_of(data: Data, sender: Qualities, full_prefill: Qualities, full_reuse: Scores) -> Split:
    """What the models do by themselves."""
    reuse = qualities_of(full_reuse)
    questions = [question for it in data.documents for question in it.questions]
    return Split(
        files=data.files,
        contexts=tuple(it.context for it in data.documents),
        tasks=tuple(
            TaskScores(
                name=task.name,
                metric=task.metric.value,
                num_contexts=len(places),
                num_questions=sum(len(data.documents[i].questions) for i in places),
                sender=_mean(_at(places, sender)),
                full_prefill=_mean(_at(places, full_prefill)),
                full_reuse=_mean(_at(places, reuse)),
            )
            for task, places in _by_task(data.documents).items()
        ),
        num_questions=len(questions),
        mean_prefix_tokens=round(fmean(len(it.prefix) for it in data.documents), 2),
        max_prefix_tokens=max(len(it.prefix) for it in data.documents),
        mean_suffix_tokens=round(fmean(len(it.suffix) for it in questions), 2),
        sender=interval(sender),
        full_prefill=interval(full_prefill),
        full_reuse=interval(reuse),
    )


def losses_of(
    documents: Sequence[Document], full: Qualities, plan: Qualities, tolerance: float
) -> tuple[TaskLoss, ...]:
    """What a plan loses at each task."""
    found = []
    for places in _by_task(documents).values():
        ours, theirs = _at(places, full), _at(places, plan)
        found.append(
            TaskLoss(
                quality=_mean(theirs),
                bound=loss_bound(ours, theirs),
                needed=contexts_needed(ours, theirs, tolerance),
            )
        )
    return tuple(found)


def _by_task(documents: Sequence[Document]) -> dict[Task, list[int]]:
    """Places of the documents."""
    found: dict[Task, list[int]] = {}
    for place, document in enumerate(documents):
        found.setdefault(document.task, []).append(place)
    return found


def _at(places: Iterable[int], values: Sequence[T]) -> list[T]:
    return [values[place] for place in places]


def _mean(values: Qualities) -> float:
    return round(fmean(_flat(values)), 6)


def _layer(layer: int, scores: Scores) -> LayerSensitivity:
    return LayerSensitivity(
        layer=layer,
        quality=_quality(scores),
        fidelity=_fidelity(scores),
        kl_by_context=tuple(round(fmean(it.kl for it in context), 6) for context in scores),
        quality_by_context=tuple(round(fmean(it), 6) for it in qualities_of(scores)),
    )


def _measured(recipe: Recipe, scores: Scores) -> MeasuredBlock:
    answered = [score for score in _flat(scores) if score.quality is not None]
    is_known = len(answered) == len(_flat(scores))
    return MeasuredBlock(
        start=recipe.block.start,
        stop=recipe.block.stop,
        refreshed=recipe.refreshed,
        fidelity=_fidelity(scores),
        quality=_quality(scores) if is_known else None,
        num_questions=len(answered),
    )


def _point(
    recipe: Recipe,
    trained: Scores,
    judged: Judged,
    costs: CostModel,
    split: Split,
    tasks: tuple[TaskLoss, ...],
) -> FrontierPoint:
    candidate = Candidate(runs=recipe.runs)
    scores = judged.candidates[candidate]
    return FrontierPoint(
        start=recipe.block.start,
        stop=recipe.block.stop,
        refreshed=recipe.refreshed,
        train_quality=_quality(trained),
        held_out=interval(qualities_of(scores)),
        tasks=tasks,
        fidelity=_fidelity(scores),
        ttft_s=_seconds(candidate, costs, split),
    )


def _as_usable(point: FrontierPoint) -> BlockQuality:
    return BlockQuality(
        start=point.start,
        stop=point.stop,
        refreshed=point.refreshed,
        quality=point.held_out.mean,
    )


def _baselines(
    judged: Judged, small: SmallModel | None, costs: CostModel, split: Split
) -> Iterable[Baseline]:
    for candidate, scores in judged.candidates.items():
        if candidate.kind is None:
            continue
        yield Baseline(
            kind=candidate.kind,
            recomputed_layers=round(candidate.recomputed_layers(costs.num_layers), 4),
            runs=tuple((run.start, run.stop) for run in candidate.runs),
            quality=interval(qualities_of(scores)),
            fidelity=_fidelity(scores),
            ttft_s=_seconds(candidate, costs, split),
        )
    if small is not None:
        num_prefix, num_suffix = round(split.mean_prefix_tokens), round(split.mean_suffix_tokens)
        share = small.ttft_s / costs.full_prefill_s(num_prefix, num_suffix)
        yield Baseline(
            kind=BaselineKind.SMALL_MODEL,
            recomputed_layers=round(share * costs.num_layers, 4),
            runs=(),
            quality=interval(small.qualities),
            fidelity=None,
            ttft_s=small.ttft_s,
        )


def _seconds(candidate: Candidate, costs: CostModel, split: Split) -> float:
    """Predicted TTFT at the split's mean lengths."""
    num_prefix, num_suffix = round(split.mean_prefix_tokens), round(split.mean_suffix_tokens)
    if not candidate.share:
        return costs.ttft_s(candidate.runs, num_prefix, num_suffix)
    compute_s = candidate.share * costs.layers_s(num_prefix, costs.num_layers)
    return compute_s + costs.ttft_s((), num_prefix, num_suffix)


def _fidelity(scores: Scores) -> Fidelity:
    flat = _flat(scores)
    return Fidelity(
        kl=round(fmean(it.kl for it in flat), 6),
        agreement=round(fmean(it.agreement for it in flat), 6),
        own_nll=round(fmean(it.own_nll for it in flat), 6),
        reference_nll=round(fmean(it.reference_nll for it in flat), 6),
    )


def _quality(scores: Scores) -> float:
    return _mean(qualities_of(scores))


def qualities_of(scores: Scores) -> list[list[float]]:
    """By context and question; every question has been answered."""
    return [[_answered(score) for score in context] for context in scores]


def _answered(score: Score) -> float:
    if score.quality is None:
        raise ValueError("a question of this mixture was not answered")
    return score.quality


def _flat(contexts: Iterable[Sequence[T]]) -> list[T]:
    return [value for context in contexts for value in context]


def _digest(files: Iterable[DataFile]) -> str:
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
