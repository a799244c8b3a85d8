"""The training split: every block of every document, from one prefix pass per starting layer.

    for each context
        the sender's pass: KV, and E at every starting layer
        the receiver's own pass ─► full prefill, full reuse, one layer reused, blocks [0, e)
        for each start s > 0: the receiver's layers s … L-1 over the sender's E ─► blocks [s, e)

That is L + 1 passes over a context at group 1, whatever the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachetree import Span
from profiles.compute.fitting import NO_FITS, Fits
from profiles.compute.journal import Entry
from profiles.compute.judging import first_of_each_task
from profiles.compute.mixtures import Mixture
from profiles.compute.study import FIRST_NEW, OWN, THEIRS, Bench, Study, block_mixture
from profiles.data import Document
from profiles.stats import Score, Scores, Swept

SPLIT: Final = "train"
NUM_SWEPT: Final = 12
"""Contexts of each task that tell blocks apart by their KL. On two real pairs the best block of a
size on any 12 of 24 contexts has 0.1 and 2 % more KL on all 24 than the one that is best there."""


def sweep(
    bench: Bench,
    documents: Sequence[Document],
    blocks: Sequence[Span],
    *,
    pruned: bool,
    fits: Fits = NO_FITS,
) -> Swept:
    """Measure document after document: all of them and by the metric too, or, with `pruned`, those
    at `places_swept`, and nothing but full reuse by the metric. `fits` are given both E of each."""
    contexts: list[Context] = []
    for index in places_swept(documents, pruned=pruned):
        starts = {block.start for block in blocks}
        study = Study(bench, SPLIT, index, documents[index], starts, fits.layers)
        contexts.append(_measure(study, bench.num_layers, blocks, is_decoded=not pruned))
        fits.add(study.passes)
    first = [context.references for context in contexts]
    return Swept(
        sender=[entry.sender for entry in first],
        full_prefill=[entry.own for entry in first],
        full_reuse=[entry.scores[0] for entry in first],
        layers=[[entry.scores[1 + layer] for entry in first] for layer in range(bench.num_layers)],
        blocks=_scores_of(contexts, blocks),
    )


@dataclass(frozen=True, slots=True)
class Context:
    """One document's entries."""

    references: Entry
    blocks: Mapping[Span, Sequence[Score]]


def places_swept(documents: Sequence[Document], *, pruned: bool) -> list[int]:
    """Of the documents on which every block is measured: the first ones of each task, or all."""
    return first_of_each_task(documents, NUM_SWEPT if pruned else len(documents))


def _measure(study: Study, num_layers: int, blocks: Sequence[Span], *, is_decoded: bool) -> Context:
    reuse: Mixture = (THEIRS,) * num_layers
    one_reused = [_one_reused(layer, num_layers) for layer in range(num_layers)]
    from_0 = [block for block in blocks if block.start == 0]
    references = study.references(
        [reuse, *one_reused, *(block_mixture(block, num_layers, OWN) for block in from_0)],
        [True] + [is_decoded] * (num_layers + len(from_0)),
    )
    found = dict(zip(from_0, references.scores[1 + num_layers :], strict=True))
    for start in sorted({block.start for block in blocks} - {0}):
        from_start = [block for block in blocks if block.start == start]
        entry = study.compare(
            f"start:{start}",
            lambda start=start: [study.passes.new(Span(start, num_layers))],
            [block_mixture(block, num_layers, FIRST_NEW) for block in from_start],
            [is_decoded] * len(from_start),
        )
        found.update(zip(from_start, entry.scores, strict=True))
    return Context(references, found)


def _one_reused(layer: int, num_layers: int) -> Mixture:
    return tuple(THEIRS if it == layer else OWN for it in range(num_layers))


def _scores_of(contexts: Sequence[Context], blocks: Iterable[Span]) -> dict[Span, Scores]:
    return {block: [context.blocks[block] for context in contexts] for block in blocks}
