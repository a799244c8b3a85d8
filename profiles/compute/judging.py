"""Any plan, by the metric: what the training split's frontier is made of; the held-out split's
plans and what one could do instead of them.

for each context
    the sender's pass, the receiver's own pass ─► full prefill, full reuse
    for each run of layers: the receiver's layers from the sender's E at its first
    for each CacheBlend budget: its tokens at all layers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachetree import Span
from profiles.compute.study import HELD_OUT, THEIRS, Bench, Study, longest_runs
from profiles.data.documents import Document, first_of_each_task
from profiles.evidence import BaselineKind
from profiles.stats.measured import Candidate, Judged, Score, spread

NUM_SPLITS: Final = 3
NUM_SHOWN: Final = 8
"""Contexts of each task on which is measured what the gate does not ask about."""


def baselines(
    frontier: Sequence[Span], recommended: Span | None, ranking: Sequence[int]
) -> list[Candidate]:
    """Alternatives at the frontier's sizes; `ranking` has all layers, the most sensitive first."""
    num_layers = len(ranking)
    sizes = spread([len(block) for block in frontier if len(block) < num_layers])
    sizes = sorted({*sizes, *([len(recommended)] if recommended else [])})
    found = []
    for size in sizes:
        share = size / num_layers
        found.append(Candidate(kind=BaselineKind.CACHEBLEND, share=share))
        runs = critical_runs(ranking[:size])
        found.append(Candidate(kind=BaselineKind.CRITICAL_LAYERS, runs=runs))
    for parts in spread(range(2, len(recommended or ()) + 1), NUM_SPLITS):
        runs = split_runs(recommended, parts)
        found.append(Candidate(kind=BaselineKind.SPLIT_BLOCK, runs=runs))
    return found


def critical_runs(layers: Iterable[int]) -> tuple[Span, ...]:
    """Layers as runs, neighbours joined."""
    ordered = np.array(sorted(layers))
    return _spans(np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1))


def split_runs(block: Span, parts: int) -> tuple[Span, ...]:
    """A block in `parts` runs whose lengths differ by one at most, the longer ones first."""
    return _spans(np.array_split(np.arange(block.start, block.stop), parts))


def _spans(runs: Iterable[NDArray[np.int64]]) -> tuple[Span, ...]:
    return tuple(Span(int(it[0]), int(it[-1]) + 1) for it in runs)


def judge(
    bench: Bench,
    documents: Sequence[Document],
    candidates: Sequence[Candidate],
    split: str = HELD_OUT,
    others: Sequence[Candidate] = (),
) -> Judged:
    """Measure document after document, candidates by the metric; `others`, which the gate
    does not ask about, on some of the documents."""
    everything = [*candidates, *others]
    starts = {run.start for candidate in everything for run in candidate.runs}
    found: dict[Candidate, list[Sequence[Score]]] = {it: [] for it in everything}
    places = set(first_of_each_task(documents, NUM_SHOWN))
    references = []
    for index, document in enumerate(documents):
        study = Study(bench, split, index, document, starts)
        references.append(study.references([(THEIRS,) * bench.num_layers], [True]))
        for batch in batches(everything if index in places else candidates, bench.num_layers):
            for candidate, scores in study.compare(batch, is_decoded=True).items():
                found[candidate].append(scores)
    return Judged(
        sender=[entry.sender for entry in references],
        full_prefill=[entry.own for entry in references],
        full_reuse=[entry.scores[0] for entry in references],
        candidates=found,
    )


def batches(candidates: Iterable[Candidate], num_layers: int) -> list[list[Candidate]]:
    """As many together as need no more recomputed layers than the model has, nor are more."""
    found: list[list[Candidate]] = []
    for it in candidates:
        joined = [*found[-1], it] if found else [it]
        made = sum(len(run) for run, _ in longest_runs(joined))
        made += sum(num_layers for plan in joined if plan.share)
        if found and max(made, len(joined)) <= num_layers:
            found[-1] = joined
        else:
            found.append([it])
    return found
