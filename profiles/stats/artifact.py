"""Turn scores into a profile. Pure: everything has been measured already."""

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
"""Number of held-out contexts that must reach a length before servers use a profile up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Questions of one split, and their files."""

    files: tuple[DataFile, ...]
    documents: Sequence[Document]
    notes: Sequence[str] = ()
    """Sentences about the files that a reader of the profile should know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that was measured, and the two models."""

    sender: ModelIdentity
    receiver: ModelIdentity
    names: tuple[str, str]
    """Names of sender and receiver, for people."""
    first_difference: int
    train: Data
    held_out: Data
    costs: CostModel
    swept: Measured
    tried: Measured
    """Plans decoded on the training split."""
    choice: Choice
    judged: Measured
    """Plans judged on the held-out split."""
    controls: Mapping[Task, Controls]
    small: Baseline | None


def build(findings: Findings, tolerance: float, made: Making) -> MeasuredProfile:
    """Build the profile: the measurements, and the verdict that follows from them."""
    swept, judged, choice, trained = (
        findings.swept,
        findings.judged,
        findings.choice,
        findings.tried.candidates,
    )
    train, held_out = findings.train, findings.held_out
    split = split_of(held_out, judged, findings.controls)
    full = split.full_prefill
    points = {it: _point(it, findings, split, tolerance) for it in choice.frontier}
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
    all_layers = BlockQuality(start=0, stop=findings.costs.num_layers, quality=full.mean)
    return MeasuredProfile(
        version=VERSION,
        sender=findings.sender,
        receiver=findings.receiver,
        sender_name=findings.names[0],
        receiver_name=findings.names[1],
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
        first_difference=findings.first_difference,
        measured_tokens=longest_used(held_out.documents[:least], made.page_size),
        controls=controls_of(split),
        train=split_of(train, findings.tried),
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
        baselines=tuple(_baselines(findings, split)),
        costs=findings.costs,
        made=made,
        judged=_kept(findings),
    )


def data_digest(train: Data, held_out: Data) -> str:
    digests = [it.sha256 for it in (*train.files, *held_out.files)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def longest_used(documents: Sequence[Document], page_size: int) -> int:
    """Return the longest prompt length, in tokens of whole pages, that at least `NUM_REACHING`
    contexts reach. With fewer contexts, all of them have to reach it."""
    lengths: dict[str, int] = {}
    for document in documents:
        longest = len(document.prefix) + max(
            len(question.suffix) for question in document.questions
        )
        lengths[document.context] = max(longest, lengths.get(document.context, 0))
    *_, shortest = sorted(lengths.values(), reverse=True)[:NUM_REACHING]
    return ceil(shortest / page_size) * page_size


def best_of(
    choice: Choice, documents: Sequence[Document], judged: Measured, tolerance: float
) -> Candidate | None:
    """Return the plan that will be recommended: the last proven one in the gate's order. If no
    plan is proven, return the plan that the training split expected."""
    tasks = [*by_task(documents).values()]

    def passes(candidate: Candidate) -> bool:
        plan = qualities_of(judged.candidates[candidate])
        return is_within(losses_of(tasks, judged.full_prefill, plan, tolerance), tolerance)

    return [choice.expected, *takewhile(passes, choice.order)][-1]


def split_of(
    data: Data, judged: Measured, controls: Mapping[Task, Controls] | None = None
) -> Split:
    """Summarise a split: its data, and the quality of sender, full prefill and full reuse."""
    sender, full, reuse = judged.sender, judged.full_prefill, qualities_of(judged.full_reuse)
    documents, (prefix, suffix) = data.documents, mean_lengths(data.documents)
    lengths: dict[str, int] = {}
    for document in documents:
        lengths[document.context] = max(len(document.prefix), lengths.get(document.context, 0))
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
    """Return the loss of a plan at each task. `tasks` has the indices of each task's contexts.
    `plan` has qualities of the first contexts, which judged the plan."""
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


def _kept(findings: Findings) -> Judged:
    names = [*by_task(findings.held_out.documents)]
    plans = (qualities_of(findings.judged.candidates[it]) for it in findings.choice.order)
    return Judged(
        tasks=tuple(names.index(it.task) for it in findings.held_out.documents),
        full_prefill=tuple(map(tuple, findings.judged.full_prefill)),
        plans=tuple(tuple(map(tuple, it)) for it in plans),
    )


def contradiction(profile: MeasuredProfile, judged: Judged) -> str | None:
    """Say what in a profile's verdict contradicts its scores. None if nothing does."""
    if not _is_whole(profile, judged):
        return "the scores are not of all its plans, tasks, contexts and questions"
    places: dict[int, list[int]] = {}
    for place, task in enumerate(judged.tasks):
        places.setdefault(task, []).append(place)
    tasks = [places[it] for it in range(len(places))]
    plans = [profile.frontier[it] for it in profile.order]
    for plan, of in zip(plans, judged.plans, strict=True):
        losses = losses_of(tasks, judged.full_prefill, of, profile.tolerance)
        if losses != plan.tasks:
            return (
                f"the plan [{plan.start}, {plan.stop}) has {plan.tasks}, "
                f"and its scores give {losses}"
            )
    verdict_of_all = verdict(plans, profile.held_out, profile.tolerance)
    if verdict_of_all != (profile.passed, profile.reason):
        return f"it says {profile.reason!r}, and its plans give {verdict_of_all[1]!r}"
    served = [(it.block, it.e_map) for it in proven(plans, profile.tolerance)]
    for usable in profile.blocks:
        if len(usable.block) < profile.receiver.num_layers and (
            (usable.block, usable.e_map) not in served
        ):
            return f"[{usable.start}, {usable.stop}) is served, and its scores do not prove it"
    best = next((it for it in profile.blocks if (it.block, it.e_map) in served[-1:]), None)
    if profile.recommended != best:
        return f"it recommends {profile.recommended}, and its scores {best}"
    return None


def _is_whole(profile: MeasuredProfile, judged: Judged) -> bool:
    """True if the scores have the lengths that `_kept` gives them, and all indices exist."""
    num_questions = [len(it) for it in judged.full_prefill]
    asked = [[len(it) for it in plan] for plan in judged.plans]
    return (
        len(judged.tasks) == len(num_questions)
        and {*judged.tasks} == {*range(len(profile.held_out.tasks))}
        and all(num_questions)
        and len(asked) == len(profile.order)
        and all(it == num_questions[: len(it)] for it in asked)
        and {*profile.order} <= {*range(len(profile.frontier))}
    )


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


def _point(
    candidate: Candidate, findings: Findings, split: Split, tolerance: float
) -> FrontierPoint:
    scores, is_asked = findings.judged.candidates[candidate], candidate in findings.choice.order
    plan, full = qualities_of(scores), findings.judged.full_prefill
    documents = findings.held_out.documents if is_asked else _few(findings)
    tasks = by_task(findings.held_out.documents).values()
    return FrontierPoint(
        start=candidate.block.start,
        stop=candidate.block.stop,
        e_map=candidate.e_map,
        train_quality=mean_of(qualities_of(findings.tried.candidates[candidate])),
        held_out=interval_of(documents[: len(plan)], plan),
        tasks=losses_of(tasks, full, plan, tolerance) if is_asked else (),
        shown=None if is_asked else _shown(findings),
        fidelity=fidelity_of(scores),
        ttft_s=_seconds(candidate, findings.costs, split),
    )


def tv_bound(documents: Sequence[Document], held_out: Scores) -> float:
    """Return an upper bound on a plan's mean total variation from full prefill. The drift guard
    allows this distance beyond the noise between two exact prefills."""
    distances = [[it.tv for it in scores] for scores in held_out]
    return mean_bound(_by_context(documents[: len(held_out)], distances), DRIFT_ERROR_RATE)


def interval_of(documents: Sequence[Document], values: Qualities) -> Interval:
    """Return mean and interval over contexts, from values by document."""
    return interval(_by_context(documents, values))


def _by_context(documents: Sequence[Document], values: Qualities) -> Qualities:
    """Group values by context. A context of several tasks counts once in statistics."""
    by_context: dict[str, list[float]] = {}
    for document, of_document in zip(documents, values, strict=True):
        by_context.setdefault(document.context, []).extend(of_document)
    return [*by_context.values()]


def _baselines(findings: Findings, split: Split) -> Iterator[Baseline]:
    for candidate, scores in findings.judged.candidates.items():
        if candidate.kind is not None:
            yield Baseline(
                kind=candidate.kind,
                recomputed_layers=round(candidate.recomputed_layers(findings.costs.num_layers), 4),
                runs=tuple((run.start, run.stop) for run in candidate.runs),
                quality=interval_of(_few(findings), qualities_of(scores)),
                fidelity=fidelity_of(scores),
                ttft_s=_seconds(candidate, findings.costs, split),
                shown=_shown(findings),
            )
    if findings.small is not None:
        yield findings.small


def _shown(findings: Findings) -> Shown:
    places = first_of_each_task(findings.held_out.documents, NUM_SHOWN)
    full = mean_of(_at(places, findings.judged.full_prefill))
    return Shown(num_contexts=len({it.context for it in _few(findings)}), full_prefill=full)


def _few(findings: Findings) -> list[Document]:
    """Return the documents on which baselines are measured. Plans that the gate does not try are
    measured on them, too."""
    documents = findings.held_out.documents
    return [documents[it] for it in first_of_each_task(documents, NUM_SHOWN)]


def _seconds(candidate: Candidate, costs: CostModel, split: Split) -> float:
    """Return the predicted TTFT of a plan or baseline, at the split's mean lengths of prompts."""
    if not candidate.share:
        return costs.ttft_s(candidate.runs, *split.mean_lengths)
    compute_s = candidate.share * costs.layers_s(split.mean_lengths[0], costs.num_layers)
    return compute_s + costs.ttft_s((), *split.mean_lengths)


def fidelity_of(scores: Scores) -> Fidelity:
    return Fidelity(kl=kl_of(scores))
