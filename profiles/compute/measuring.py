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

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from cachetree import Span
from cachetree.planning import EMap
from profiles.compute.journal import Entry
from profiles.compute.mixtures import Mixture
from profiles.compute.study import HELD_OUT, OWN, THEIRS, TRAIN, Bench, Study, longest_runs
from profiles.data.documents import Document, first_of_each_task
from profiles.stats.measured import Candidate, Judged, Score, Scores, Swept

NUM_SWEPT: Final = 12
"""Contexts of each task that tell blocks apart by their KL. On two real pairs the best block of a
size on any 12 of 24 contexts has 0.1 and 2 % more KL on all 24 than the one that is best there."""
NUM_SHOWN: Final = 8
"""Contexts of each task on which is measured what the gate does not ask about."""


def sweep(
    bench: Bench, documents: Sequence[Document], blocks: Sequence[Span], *, pruned: bool
) -> Swept:
    """Measure document after document: all of them and by the metric too, or, with `pruned`, those
    at `places_swept`, and nothing but full reuse by the metric."""
    num_layers = bench.num_layers
    from_start = by_start(blocks)
    mixtures = alone_and_reused(num_layers)
    references: list[Entry] = []
    found: dict[Span, Scores] = {block: [] for block in blocks}
    for index in places_swept(documents, pruned=pruned):
        study = Study(bench, TRAIN, index, documents[index], from_start)
        references.append(study.references(mixtures, [True] + [not pruned] * num_layers))
        for same in from_start.values():
            plans = [Candidate(runs=(block,)) for block in same]
            for plan, scores in study.compare(plans, is_decoded=not pruned).items():
                found[plan.block].append(scores)
    return Swept(
        sender=[entry.sender for entry in references],
        full_prefill=[entry.own for entry in references],
        full_reuse=[entry.scores[0] for entry in references],
        layers=[[entry.scores[1 + layer] for entry in references] for layer in range(num_layers)],
        blocks=found,
    )


def sweep_corrected(
    bench: Bench,
    documents: Sequence[Document],
    blocks: Sequence[Span],
    e_maps: Collection[EMap],
    *,
    pruned: bool,
) -> dict[Candidate, Scores]:
    """The blocks that begin where a map corrects E, on the documents that `sweep` takes, by their
    KL alone. The bench has the maps."""
    found: dict[Candidate, Scores] = {}
    from_start = by_start(blocks)
    for index in places_swept(documents, pruned=pruned):
        study = Study(bench, TRAIN, index, documents[index], {it.layer for it in e_maps})
        for e_map in e_maps:
            plans = [Candidate(runs=(it,), e_map=e_map) for it in from_start[e_map.layer]]
            for plan, scores in study.compare(plans, is_decoded=False).items():
                found.setdefault(plan, []).append(scores)
    return found


def by_start(blocks: Iterable[Span]) -> dict[int, list[Span]]:
    """Blocks that begin at the same layer, in the layers' order: they take one pass."""
    found: dict[int, list[Span]] = {}
    for block in sorted(blocks):
        found.setdefault(block.start, []).append(block)
    return found


def places_swept(documents: Sequence[Document], *, pruned: bool) -> list[int]:
    """Of the documents on which every block is measured: the first ones of each task, or all."""
    return first_of_each_task(documents, NUM_SWEPT if pruned else len(documents))


def alone_and_reused(num_layers: int) -> list[Mixture]:
    """Full reuse, then each layer whose KV alone is the sender's."""
    layers = range(num_layers)
    one_reused = (tuple(THEIRS if it == layer else OWN for it in layers) for layer in layers)
    return [(THEIRS,) * num_layers, *one_reused]


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
