"""From scores to a profile. Pure: everything has been measured already."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from cachetree import ModelIdentity, Span
from cachetree.planning import PROFILE_VERSION as VERSION
from cachetree.planning import BlockQuality
from profiles.data.documents import Document, by_task
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
from profiles.stats.choice import Choice, qualities_of, quality_of
from profiles.stats.gate import (
    DRIFT_ERROR_RATE,
    Qualities,
    contexts_needed,
    interval,
    loss_bound,
    mean_bound,
    proven,
    verdict,
)
from profiles.stats.measured import Candidate, Judged, Scores, Swept

T = TypeVar("T")


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
class Findings:
    """All that was measured, and of whom."""

    sender: ModelIdentity
    receiver: ModelIdentity
    first_difference: int
    costs: CostModel
    swept: Swept
    plans: Mapping[Candidate, Scores]
    """Those that were decoded on the training split."""
    tried: Judged
    """The same, with what the models do by themselves."""
    choice: Choice[Candidate]
    judged: Judged
    small: SmallModel | None


def build(
    found: Findings,
    train: Data,
    held_out: Data,
    tolerance: float,
    made: Making,
) -> MeasuredProfile:
    """The profile: what was measured, and the verdict that follows."""
    swept, tried, judged, choice = found.swept, found.tried, found.judged, found.choice
    split = split_of(held_out, judged.sender, judged.full_prefill, judged.full_reuse)
    full = split.full_prefill
    points = {}
    for it in choice.frontier:
        plan = qualities_of(judged.candidates[it])
        tasks: tuple[TaskLoss, ...] = ()
        if it in choice.order:
            tasks = losses_of(held_out.documents, judged.full_prefill, plan, tolerance)
        points[it] = _point(it, found.plans[it], judged, found.costs, split, tasks)
    plans = [points[it] for it in choice.order]
    passed, reason = verdict(plans, split, tolerance)
    usable = [
        _as_usable(point, judged.candidates[it])
        for it, point in zip(choice.order, proven(plans, tolerance), strict=False)
    ][::-1]
    all_layers = BlockQuality(start=0, stop=found.costs.num_layers, quality=full.mean)
    return MeasuredProfile(
        version=VERSION,
        sender=found.sender,
        receiver=found.receiver,
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
        first_difference=found.first_difference,
        measured_tokens=split.max_prefix_tokens,
        train=split_of(train, tried.sender, tried.full_prefill, tried.full_reuse),
        held_out=split,
        layers=tuple(_layer(layer, scores) for layer, scores in enumerate(swept.layers)),
        measured=tuple(
            _measured(it, found.plans.get(Candidate(runs=(it,)), swept.blocks[it]))
            for it in sorted(swept.blocks)
        ),
        frontier=tuple(points.values()),
        order=tuple(choice.frontier.index(it) for it in choice.order),
        baselines=tuple(_baselines(judged, found.small, found.costs, split)),
        costs=found.costs,
        made=made,
    )


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
            for task, places in by_task(data.documents).items()
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
    for places in by_task(documents).values():
        ours, theirs = _at(places, full), _at(places, plan)
        found.append(
            TaskLoss(
                quality=_mean(theirs),
                bound=loss_bound(ours, theirs),
                needed=contexts_needed(ours, theirs, tolerance),
            )
        )
    return tuple(found)


def _at(places: Iterable[int], values: Sequence[T]) -> list[T]:
    return [values[place] for place in places]


def _mean(values: Qualities) -> float:
    return round(fmean(_flat(values)), 6)


def _layer(layer: int, scores: Scores) -> LayerSensitivity:
    return LayerSensitivity(
        layer=layer,
        fidelity=_fidelity(scores),
        kl_by_context=tuple(round(fmean(it.kl for it in context), 6) for context in scores),
    )


def _measured(block: Span, scores: Scores) -> MeasuredBlock:
    answered = [score for score in _flat(scores) if score.quality is not None]
    is_known = len(answered) == len(_flat(scores))
    return MeasuredBlock(
        start=block.start,
        stop=block.stop,
        fidelity=_fidelity(scores),
        quality=quality_of(scores) if is_known else None,
        num_questions=len(answered),
    )


def _point(
    candidate: Candidate,
    trained: Scores,
    judged: Judged,
    costs: CostModel,
    split: Split,
    tasks: tuple[TaskLoss, ...],
) -> FrontierPoint:
    scores = judged.candidates[candidate]
    return FrontierPoint(
        start=candidate.block.start,
        stop=candidate.block.stop,
        e_map=candidate.e_map,
        train_quality=quality_of(trained),
        held_out=interval(qualities_of(scores)),
        tasks=tasks,
        fidelity=_fidelity(scores),
        ttft_s=_seconds(candidate, costs, split),
    )


def _as_usable(point: FrontierPoint, held_out: Scores) -> BlockQuality:
    return BlockQuality(
        start=point.start,
        stop=point.stop,
        quality=point.held_out.mean,
        e_map=point.e_map,
        tv_bound=tv_bound(held_out),
    )


def tv_bound(held_out: Scores) -> float:
    """What the drift guard allows a plan beside the noise of two exact runs."""
    distances = [[it.tv for it in context] for context in held_out]
    return mean_bound(distances, DRIFT_ERROR_RATE)


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


def _flat(contexts: Iterable[Sequence[T]]) -> list[T]:
    return [value for context in contexts for value in context]


def _digest(files: Iterable[DataFile]) -> str:
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
