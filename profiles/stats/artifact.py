"""From scores to a profile. Pure: everything has been measured already."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from typing import Final, TypeVar

from cachetree import ModelIdentity, Span
from cachetree.planning import PROFILE_VERSION as VERSION
from cachetree.planning import BlockQuality
from profiles.data.documents import Document, by_task, first_of_each_task, mean_lengths
from profiles.data.tasks import Task
from profiles.evidence import (
    Baseline,
    Controls,
    CostModel,
    DataFile,
    Fidelity,
    FrontierPoint,
    Interval,
    Judged,
    LayerSensitivity,
    Making,
    MeasuredBlock,
    MeasuredProfile,
    Shown,
    Split,
    TaskLoss,
    TaskScores,
)
from profiles.stats.choice import Choice, kl_of, qualities_of
from profiles.stats.gate import (
    DRIFT_ERROR_RATE,
    contexts_needed,
    controls_of,
    interval,
    is_within,
    loss_bound,
    mean_bound,
    proven,
    verdict,
)
from profiles.stats.measured import (
    NUM_SHOWN,
    Candidate,
    Measured,
    Qualities,
    Scores,
    mean_of,
)

T = TypeVar("T")

NUM_REACHING: Final = 20
"""Held-out contexts that reach the length up to which servers use a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """One split's questions, and where they came from."""

    files: tuple[DataFile, ...]
    documents: Sequence[Document]
    notes: Sequence[str] = ()
    """What is to be known about the files, of both splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that was measured, and of whom."""

    sender: ModelIdentity
    receiver: ModelIdentity
    names: tuple[str, str]
    """Of the two, for a person."""
    first_difference: int
    train: Data
    held_out: Data
    costs: CostModel
    swept: Measured
    tried: Measured
    """On the training split."""
    choice: Choice
    judged: Measured
    """On the held-out one."""
    controls: Mapping[Task, Controls]
    small: Baseline | None


def build(found: Findings, tolerance: float, made: Making) -> MeasuredProfile:
    """The profile: what was measured, and the verdict that follows."""
    swept, judged, choice, trained = found.swept, found.judged, found.choice, found.tried.candidates
    train, held_out = found.train, found.held_out
    split = split_of(held_out, judged, found.controls)
    full = split.full_prefill
    points = {it: _point(it, found, split, tolerance) for it in choice.frontier}
    plans = [points[it] for it in choice.order]
    passed, reason = verdict(plans, split, tolerance)
    served = proven(plans, tolerance)
    usable = [
        BlockQuality(
            start=point.start,
            stop=point.stop,
            quality=point.held_out.mean,
            e_map=point.e_map,
            tv_bound=tv_bound(held_out.documents, judged.candidates[it]),
        )
        for it, point in zip(choice.order, served, strict=False)
    ][::-1]
    least = min((len(judged.candidates[it]) for it in choice.order[: len(served)]), default=None)
    all_layers = BlockQuality(start=0, stop=found.costs.num_layers, quality=full.mean)
    return MeasuredProfile(
        version=VERSION,
        sender=found.sender,
        receiver=found.receiver,
        sender_name=found.names[0],
        receiver_name=found.names[1],
        metric="+".join(sorted({it.task.metric.value for it in held_out.documents})),
        data_sha256=data_digest(train, held_out),
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
        measured_tokens=longest_used(held_out.documents[:least], made.page_size),
        controls=controls_of(split),
        train=split_of(train, found.tried),
        held_out=split,
        layers=tuple(
            LayerSensitivity(
                layer=layer,
                fidelity=fidelity_of(scores),
                kl_by_context=tuple(kl_of([context]) for context in scores),
            )
            for layer, scores in enumerate(swept.layers)
        ),
        measured=tuple(
            _measured(it, trained.get(Candidate(runs=(it,)), swept.blocks[it]))
            for it in swept.blocks
        ),
        frontier=tuple(points.values()),
        order=tuple(choice.frontier.index(it) for it in choice.order),
        baselines=tuple(_baselines(found, split)),
        costs=found.costs,
        made=made,
        judged=_kept(found),
    )


def data_digest(train: Data, held_out: Data) -> str:
    digests = [it.sha256 for it in (*train.files, *held_out.files)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def longest_used(documents: Sequence[Document], page_size: int) -> int:
    """Tokens of a prompt, in whole pages, that `NUM_REACHING` contexts reach; all of them if they
    are fewer."""
    lengths: dict[str, int] = {}
    for it in documents:
        longest = len(it.prefix) + max(len(question.suffix) for question in it.questions)
        lengths[it.context] = max(longest, lengths.get(it.context, 0))
    *_, shortest = sorted(lengths.values(), reverse=True)[:NUM_REACHING]
    return ceil(shortest / page_size) * page_size


def best_of(
    choice: Choice, documents: Sequence[Document], judged: Measured, tolerance: float
) -> Candidate | None:
    """The plan that will be recommended; where none is proven, the one that was expected to be."""
    tasks = [*by_task(documents).values()]

    def passes(it: Candidate) -> bool:
        plan = qualities_of(judged.candidates[it])
        return is_within(losses_of(tasks, judged.full_prefill, plan, tolerance), tolerance)

    return [choice.expected, *takewhile(passes, choice.order)][-1]


def split_of(
    data: Data, judged: Measured, controls: Mapping[Task, Controls] | None = None
) -> Split:
    """What the models do by themselves."""
    sender, full, reuse = judged.sender, judged.full_prefill, qualities_of(judged.full_reuse)
    documents, (prefix, suffix) = data.documents, mean_lengths(data.documents)
    lengths: dict[str, int] = {}
    for it in documents:
        lengths[it.context] = max(len(it.prefix), lengths.get(it.context, 0))
    return Split(
        files=data.files,
        contexts=tuple(lengths),
        tasks=tuple(
            TaskScores(
                name=task.name,
                metric=task.metric.value,
                num_contexts=len(places),
                num_questions=sum(len(documents[i].questions) for i in places),
                sender=mean_of(_at(places, sender)),
                full_prefill=mean_of(_at(places, full)),
                full_reuse=mean_of(_at(places, reuse)),
                controls=(controls or {}).get(task),
            )
            for task, places in by_task(documents).items()
        ),
        num_questions=sum(len(it.questions) for it in documents),
        mean_prefix_tokens=prefix,
        max_prefix_tokens=max(len(it.prefix) for it in documents),
        prefix_tokens=tuple(lengths.values()),
        mean_suffix_tokens=suffix,
        sender=interval_of(documents, sender),
        full_prefill=interval_of(documents, full),
        full_reuse=interval_of(documents, reuse),
    )


def losses_of(
    tasks: Iterable[Sequence[int]], full: Qualities, plan: Qualities, tolerance: float
) -> tuple[TaskLoss, ...]:
    """What a plan loses at each task, by the places of the task's contexts; it was judged on the
    first ones of all."""
    asked = [[it for it in places if it < len(plan)] for places in tasks]
    return tuple(_loss(_at(it, full), _at(it, plan), tolerance) for it in asked)


def _loss(full: Qualities, plan: Qualities, tolerance: float) -> TaskLoss:
    if not plan:
        return TaskLoss(quality=0.0, bound=1.0, needed=None, num_contexts=0, full_prefill=0.0)
    return TaskLoss(
        quality=mean_of(plan),
        bound=loss_bound(full, plan),
        needed=contexts_needed(full, plan, tolerance),
        num_contexts=len(plan),
        full_prefill=mean_of(full),
    )


def _kept(found: Findings) -> Judged:
    names = [*by_task(found.held_out.documents)]
    plans = (qualities_of(found.judged.candidates[it]) for it in found.choice.order)
    return Judged(
        tasks=tuple(names.index(it.task) for it in found.held_out.documents),
        full_prefill=tuple(map(tuple, found.judged.full_prefill)),
        plans=tuple(tuple(map(tuple, it)) for it in plans),
    )


def contradiction(profile: MeasuredProfile, judged: Judged) -> str | None:
    """What of a profile's verdict does not follow from its scores; None if all of it does."""
    places: dict[int, list[int]] = {}
    for place, task in enumerate(judged.tasks):
        places.setdefault(task, []).append(place)
    tasks = [places[it] for it in range(len(places))]
    plans = [profile.frontier[it] for it in profile.order]
    for it, of in zip(plans, judged.plans, strict=True):
        found = losses_of(tasks, judged.full_prefill, of, profile.tolerance)
        if found != it.tasks:
            return f"the plan [{it.start}, {it.stop}) has {it.tasks}, and its scores give {found}"
    verdict_of_all = verdict(plans, profile.held_out, profile.tolerance)
    if verdict_of_all != (profile.passed, profile.reason):
        return f"it says {profile.reason!r}, and its plans give {verdict_of_all[1]!r}"
    served = {(it.block, it.e_map) for it in proven(plans, profile.tolerance)}
    for it in profile.blocks:
        if len(it.block) < profile.receiver.num_layers and (it.block, it.e_map) not in served:
            return f"[{it.start}, {it.stop}) is served, and its scores do not prove it"
    return None


def _at(places: Iterable[int], values: Sequence[T]) -> list[T]:
    return [values[place] for place in places]


def _measured(block: Span, scores: Scores) -> MeasuredBlock:
    is_known = all(score.quality is not None for context in scores for score in context)
    return MeasuredBlock(
        start=block.start,
        stop=block.stop,
        fidelity=fidelity_of(scores),
        quality=mean_of(qualities_of(scores)) if is_known else None,
    )


def _point(it: Candidate, found: Findings, split: Split, tolerance: float) -> FrontierPoint:
    scores, is_asked = found.judged.candidates[it], it in found.choice.order
    plan, full = qualities_of(scores), found.judged.full_prefill
    documents = found.held_out.documents if is_asked else _few(found)
    tasks = by_task(found.held_out.documents).values()
    return FrontierPoint(
        start=it.block.start,
        stop=it.block.stop,
        e_map=it.e_map,
        train_quality=mean_of(qualities_of(found.tried.candidates[it])),
        held_out=interval_of(documents[: len(plan)], plan),
        tasks=losses_of(tasks, full, plan, tolerance) if is_asked else (),
        shown=None if is_asked else _shown(found),
        fidelity=fidelity_of(scores),
        ttft_s=_seconds(it, found.costs, split),
    )


def tv_bound(documents: Sequence[Document], held_out: Scores) -> float:
    """What the drift guard allows a plan beside the noise of two exact runs."""
    distances = [[it.tv for it in scores] for scores in held_out]
    return mean_bound(_by_context(documents[: len(held_out)], distances), DRIFT_ERROR_RATE)


def interval_of(documents: Sequence[Document], values: Qualities) -> Interval:
    """Of values by document."""
    return interval(_by_context(documents, values))


def _by_context(documents: Sequence[Document], values: Qualities) -> Qualities:
    """A context that several tasks have is one draw."""
    found: dict[str, list[float]] = {}
    for document, of_document in zip(documents, values, strict=True):
        found.setdefault(document.context, []).extend(of_document)
    return [*found.values()]


def _baselines(found: Findings, split: Split) -> Iterator[Baseline]:
    for candidate, scores in found.judged.candidates.items():
        if candidate.kind is not None:
            yield Baseline(
                kind=candidate.kind,
                recomputed_layers=round(candidate.recomputed_layers(found.costs.num_layers), 4),
                runs=tuple((run.start, run.stop) for run in candidate.runs),
                quality=interval_of(_few(found), qualities_of(scores)),
                fidelity=fidelity_of(scores),
                ttft_s=_seconds(candidate, found.costs, split),
                shown=_shown(found),
            )
    if found.small is not None:
        yield found.small


def _shown(found: Findings) -> Shown:
    places = first_of_each_task(found.held_out.documents, NUM_SHOWN)
    full = mean_of(_at(places, found.judged.full_prefill))
    return Shown(num_contexts=len({it.context for it in _few(found)}), full_prefill=full)


def _few(found: Findings) -> list[Document]:
    """On which is measured what the gate does not ask about."""
    documents = found.held_out.documents
    return [documents[it] for it in first_of_each_task(documents, NUM_SHOWN)]


def _seconds(candidate: Candidate, costs: CostModel, split: Split) -> float:
    """Predicted TTFT at the split's mean lengths."""
    if not candidate.share:
        return costs.ttft_s(candidate.runs, *split.mean_lengths)
    compute_s = candidate.share * costs.layers_s(split.mean_lengths[0], costs.num_layers)
    return compute_s + costs.ttft_s((), *split.mean_lengths)


def fidelity_of(scores: Scores) -> Fidelity:
    return Fidelity(kl=kl_of(scores))
