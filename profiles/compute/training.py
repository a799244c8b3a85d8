"""The training split: every block of every document, from one prefix pass per starting layer.

    for each context
        the sender's pass: KV, and E at every starting layer
        the receiver's own pass ─► full prefill, full reuse, one layer reused, blocks [0, e)
        for each start s > 0: the receiver's layers s … L-1 over the sender's E ─► blocks [s, e)

That is L + 1 passes over a context at group 1, whatever the number of blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from cachetree import Span
from cachetree.planning import EMap
from profiles.compute.journal import Entry
from profiles.compute.mixtures import Mixture
from profiles.compute.study import OWN, THEIRS, TRAIN, Bench, Study
from profiles.data.documents import Document, first_of_each_task
from profiles.stats.measured import Candidate, Scores, Swept

NUM_SWEPT: Final = 12
"""Contexts of each task that tell blocks apart by their KL. On two real pairs the best block of a
size on any 12 of 24 contexts has 0.1 and 2 % more KL on all 24 than the one that is best there."""


def sweep(
    bench: Bench,
    documents: Sequence[Document],
    blocks: Sequence[Span],
    *,
    pruned: bool,
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
