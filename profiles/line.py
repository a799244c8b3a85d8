"""Profile a line of models, each trained from the one before, with one choice of plans.

Each pair of consecutive models answers every question, as a task of its own. So a plan is chosen by
the task at which it is worst. It passes only if held-out contexts prove it at every task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec

from cachetree import ConfigError
from cachetree.checkpoint import ModelIdentity, read_weights, user_cache
from cachetree.planning import BlockQuality, Line
from profiles.compute.examination import Answerer
from profiles.compute.models import ModelSource, look_at_pair
from profiles.data.documents import by_task
from profiles.data.tasks import Task
from profiles.evidence import MeasuredProfile
from profiles.stats.artifact import Data, Findings, tv_bound
from profiles.stats.measured import Candidate


def line_of(sources: Sequence[ModelSource]) -> Line:
    """Return the line of these models, with the distances of consecutive models' weights. Raises
    ConfigError like `look_at_pair`, and if two models are the same, or if the tensors of two
    consecutive models have other names, types or shapes."""
    looked = [look_at_pair(*it) for it in pairwise(sources)]
    models = (looked[0][0].identity, *(ours.identity for _, ours in looked))
    by_model: dict[ModelIdentity, ModelSource] = {}
    for model, source in zip(models, sources, strict=True):
        if (same := by_model.setdefault(model, source)) is not source:
            raise ConfigError(
                f"{same} and {source} are the same model by content; name one of them"
            )
    names = tuple(it.name for it in sources)
    return Line(
        models=models,
        names=names if len({*names}) == len(names) else tuple(map(str, sources)),
        distances=tuple(_distances(sources)),
    )


def asked_of_each(data: Data, line: Line) -> Data:
    """Return each document once for every pair of the line. Copies of a document stay together."""
    pairs = [*pairwise(line.names)]
    documents = [
        replace(it, task=_of_pair(it.task, pair)) for it in data.documents for pair in pairs
    ]
    return replace(data, documents=documents)


def models_by_task(
    data: Data, line: Line, answering: Sequence[Answerer]
) -> dict[Task, tuple[Answerer, Answerer]]:
    """Return sender and receiver for each task of `asked_of_each`: one task of the data, asked of
    one pair of the line."""
    tasks = by_task(data.documents)
    both = zip(pairwise(line.names), pairwise(answering), strict=True)
    return {_of_pair(task, pair): models for pair, models in both for task in tasks}


def with_line(profile: MeasuredProfile, findings: Findings, line: Line) -> MeasuredProfile:
    """Return the profile with its line. Each plan has the drift guard's bound (`tv_bound`) of the
    pair at which it is farthest from full prefill."""

    def bounded(plan: BlockQuality) -> BlockQuality:
        if plan.tv_bound is None:
            return plan
        scores = findings.judged.candidates[Candidate(runs=(plan.block,))]
        judged = [*zip(findings.held_out.documents, scores, strict=False)]
        of_pairs = [
            [*zip(*(it for it in judged if it[0].task.name.endswith(_tag(pair))), strict=True)]
            for pair in pairwise(line.names)
        ]
        bound = max(tv_bound(documents, [*of]) for documents, of in of_pairs)
        return msgspec.structs.replace(plan, tv_bound=bound)

    blocks = tuple(map(bounded, profile.blocks))
    recommended = profile.recommended and blocks[0]
    return msgspec.structs.replace(profile, line=line, blocks=blocks, recommended=recommended)


def _distances(sources: Sequence[ModelSource]) -> Iterator[tuple[float, ...]]:
    weights = [read_weights(it.path, user_cache()).sketched(it.path) for it in sources]
    for (sender, theirs), (receiver, ours) in pairwise(zip(sources, weights, strict=True)):
        change = ours.distances_from(theirs)
        if change is None:
            raise ConfigError(
                f"{sender} and {receiver} have no distance: their tensors have other names, types "
                "or shapes; save both with the same program, in the type that is served"
            )
        yield change


def _of_pair(task: Task, pair: tuple[str, str]) -> Task:
    return replace(task, name=task.name + _tag(pair))


def _tag(pair: tuple[str, str]) -> str:
    return f" by {' → '.join(pair)}"
