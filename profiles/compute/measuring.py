"""Every block of some contexts by KL, and any plan by the metric, of the training split or of the
held-out one, and what one could do instead.

    for each context
        the sender's pass: KV, and E at every layer at which something starts
        the receiver's own pass ─► full prefill, full reuse, one layer reused, blocks [0, e)
        for each start s > 0: the receiver's layers from s over the sender's E ─► blocks [s, e)
        for each CacheBlend budget: its tokens at all layers

At group 1, every block of a context takes L + 1 passes, whatever the number of blocks.
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
"""Contexts of each task that tell blocks apart by their KL. On two real pairs the best block of a
size on any 12 of 24 contexts has 0.1 and 2 % more KL on all 24 than the one that is best there."""


def sweep_steps(
    documents: Sequence[Document], blocks: Iterable[Span], num_layers: int, *, pruned: bool
) -> list[Step]:
    """Each layer reused alone, and every block; by the metric too unless `pruned`."""
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
    """Candidates on the documents that tell blocks apart; those that begin with the same E, which
    are one after the other, take one pass."""
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
    """Candidates by the metric on all documents."""
    together = batches(candidates, num_layers)
    return [Step(place, plans) for place in range(len(documents)) for plans in ((), *together)]


def comparing_steps(
    documents: Sequence[Document], others: Sequence[Candidate], num_layers: int
) -> list[Step]:
    """What the gate does not ask about, by the metric on some of the documents."""
    shown = set(first_of_each_task(documents, NUM_SHOWN))
    return [it for it in judging_steps(documents, others, num_layers) if it.place in shown]


def measure(
    bench: Bench, split: str, documents: Sequence[Document], steps: Iterable[Step]
) -> Measured:
    """Take the steps, which are document after document."""
    references: list[Entry] = []
    found: dict[Candidate, list[Sequence[Score]]] = {FULL_REUSE: []}
    for place, of_document in groupby(steps, attrgetter("place")):
        asked = [*of_document]
        starts = {run.start for step in asked for it in step.plans for run in it.runs}
        study = Study(bench, split, documents[place], starts)
        for step in asked:
            entry = study.measure(step)
            if not step.plans:
                references.append(entry)
            for plan, scores in zip(step.plans or [FULL_REUSE], entry.scores, strict=True):
                found.setdefault(plan, []).append(scores)
    return Measured(
        sender=[entry.sender for entry in references],
        full_prefill=[entry.own for entry in references],
        candidates=found,
    )


def places_swept(documents: Sequence[Document], *, pruned: bool) -> list[int]:
    """Of the documents on which every block is measured: the first ones of each task, or all."""
    return first_of_each_task(documents, NUM_SWEPT if pruned else len(documents))


def batches(candidates: Iterable[Candidate], num_layers: int) -> list[tuple[Candidate, ...]]:
    """As many together as need no more recomputed layers than the model has, nor are more."""
    found: list[tuple[Candidate, ...]] = []
    for it in candidates:
        joined = (*found[-1], it) if found else (it,)
        made = sum(len(run) for run, _ in longest_runs(joined) if run.start)
        made += sum(num_layers for plan in joined if plan.share)
        if found and max(made, len(joined)) <= num_layers:
            found[-1] = joined
        else:
            found.append((it,))
    return found
