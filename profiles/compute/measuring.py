"""Measure plans and baselines on the documents of one split: every block by KL, chosen plans also
by the data set's metric.

    for each context
      the sender's pass: KV, and E at every layer at which a block starts
      the receiver's own pass ─► full prefill, full reuse, one layer reused, blocks [0, e)
      for each start s > 0: the receiver's layers from s over the sender's E ─► blocks [s, e)
      for each CacheBlend share: the tokens that it recomputes at each layer

With `--group 1`, all blocks of a context together take L + 1 passes over it, for L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from cachetree import Span
from profiles.compute.journal import Entry
from profiles.compute.study import Bench, Step, Study, longest_runs
from profiles.data.documents import Document, first_of_each_task
from profiles.stats.measured import FULL_REUSE, NUM_SHOWN, Candidate, Measured, Score

NUM_SWEPT: Final = 12
"""Number of contexts of each task on which blocks are compared by KL. This is enough: we chose the
best block of a size on 12 of 24 contexts of two real pairs. Over all 24, the chosen block had 0.1 %
and 2 % more KL than the best block."""


def sweep_steps(
    documents: Sequence[Document], blocks: Iterable[Span], num_layers: int, *, pruned: bool
) -> list[Step]:
    """Return the steps (measurements on one document) that measure, by KL, every block, and the
    reuse of each single layer. Unless `pruned`, they also measure by the metric."""
    alone = [Candidate(alone=layer) for layer in range(num_layers)]
    return screening_steps(
        documents,
        [*alone, *(Candidate(runs=(it,)) for it in sorted(blocks))],
        pruned=pruned,
        is_decoded=not pruned,
    )


def screening_steps(
    documents: Sequence[Document],
    candidates: Sequence[Candidate],
    *,
    pruned: bool,
    is_decoded: bool = False,
) -> list[Step]:
    """Return the steps that measure candidates on the documents on which all blocks are compared.
    Consecutive candidates that begin with the same E share a step."""
    begins = groupby(candidates, lambda it: (it.runs and it.runs[0].start, it.map_sha256))
    together = [tuple(same) for _, same in begins]
    return [
        Step(place, plans, is_decoded or not plans)
        for place in places_swept(documents, pruned=pruned)
        for plans in ((), *together)
    ]


def judging_steps(
    documents: Sequence[Document],
    candidates: Sequence[Candidate],
    num_layers: int,
) -> list[Step]:
    """Return the steps that measure candidates by the metric on all documents."""
    together = batches(candidates, num_layers)
    return [Step(place, plans) for place in range(len(documents)) for plans in ((), *together)]


def comparing_steps(
    documents: Sequence[Document], others: Sequence[Candidate], num_layers: int
) -> list[Step]:
    """Return the steps that measure plans which the gate does not judge, on some documents."""
    shown = set(first_of_each_task(documents, NUM_SHOWN))
    return [it for it in judging_steps(documents, others, num_layers) if it.place in shown]


def measure(
    bench: Bench, split: str, documents: Sequence[Document], steps: Iterable[Step]
) -> Measured:
    """Measure a split's documents. The steps of one document must follow each other."""
    references: list[Entry] = []
    by_plan: dict[Candidate, list[Sequence[Score]]] = {FULL_REUSE: []}
    for place, of_document in groupby(steps, attrgetter("place")):
        asked = [*of_document]
        starts = {run.start for step in asked for it in step.plans for run in it.runs}
        study = Study(bench.at(documents[place]), split, documents[place], starts)
        for step in asked:
            entry = study.measure(step)
            if not step.plans:
                references.append(entry)
            for plan, scores in zip(step.plans or [FULL_REUSE], entry.scores, strict=True):
                by_plan.setdefault(plan, []).append(scores)
    return Measured(
        sender=[entry.sender for entry in references],
        full_prefill=[entry.own for entry in references],
        candidates=by_plan,
    )


def places_swept(documents: Sequence[Document], *, pruned: bool) -> list[int]:
    """Return the indices of the documents on which every block is measured: the first documents of
    each task if `pruned`, else all."""
    return first_of_each_task(documents, NUM_SWEPT if pruned else len(documents))


def batches(candidates: Iterable[Candidate], num_layers: int) -> list[tuple[Candidate, ...]]:
    """Split candidates into groups that are measured together. A group recomputes at most
    `num_layers` layers in all, and has at most `num_layers` candidates."""
    groups: list[tuple[Candidate, ...]] = []
    for candidate in candidates:
        joined = (*groups[-1], candidate) if groups else (candidate,)
        made = sum(len(run) for run, _ in longest_runs(joined) if run.start)
        made += sum(num_layers for plan in joined if plan.share)
        if groups and max(made, len(joined)) <= num_layers:
            groups[-1] = joined
        else:
            groups.append((candidate,))
    return groups
