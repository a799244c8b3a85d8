"""The training split: every block of every document, from one prefix pass per starting layer.

    for each context
        the sender's pass: KV, and E at every starting layer
        the receiver's own pass ─► full prefill, full reuse, one layer reused, blocks [0, e)
        for each start s > 0: the receiver's layers s … L-1 over the sender's E ─► blocks [s, e)

That is L + 1 passes over a context at group 1, whatever the number of blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachetree import Span
from cachetree.planning import EMap
from profiles.compute.journal import Entry
from profiles.compute.mixtures import Mixture
from profiles.compute.study import FIRST_NEW, OWN, THEIRS, TRAIN, Bench, Study, block_mixture
from profiles.data.documents import Document, first_of_each_task
from profiles.stats.measured import Candidate, Score, Scores, Swept

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
    contexts: list[Context] = []
    for index in places_swept(documents, pruned=pruned):
        starts = {block.start for block in blocks}
        study = Study(bench, TRAIN, index, documents[index], starts)
        contexts.append(_measure(study, bench.num_layers, blocks, is_decoded=not pruned))
    first = [context.references for context in contexts]
    return Swept(
        sender=[entry.sender for entry in first],
        full_prefill=[entry.own for entry in first],
        full_reuse=[entry.scores[0] for entry in first],
        layers=[[entry.scores[1 + layer] for entry in first] for layer in range(bench.num_layers)],
        blocks=_scores_of(contexts, blocks),
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
    for index in places_swept(documents, pruned=pruned):
        study = Study(bench, TRAIN, index, documents[index], {it.layer for it in e_maps})
        for e_map in e_maps:
            from_start = [block for block in blocks if block.start == e_map.layer]
            ends = ",".join(str(block.stop) for block in from_start)
            step = f"start:{e_map.layer}+{e_map.sha256[:16]}:{ends}"
            entry = _from_start(study, step, from_start, e_map.sha256, is_decoded=False)
            for block, scores in zip(from_start, entry.scores, strict=True):
                found.setdefault(Candidate(runs=(block,), e_map=e_map), []).append(scores)
    return found


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
        entry = _from_start(study, f"start:{start}", from_start, "", is_decoded=is_decoded)
        found.update(zip(from_start, entry.scores, strict=True))
    return Context(references, found)


def _from_start(
    study: Study, step: str, blocks: Sequence[Span], e_map: str, *, is_decoded: bool
) -> Entry:
    """Blocks that begin at the same layer, from one pass."""
    longest = Span(blocks[0].start, max(block.stop for block in blocks))
    return study.compare(
        step,
        lambda: [study.passes.new(longest, e_map)],
        [block_mixture(block, study.num_layers, FIRST_NEW) for block in blocks],
        [is_decoded] * len(blocks),
    )


def _one_reused(layer: int, num_layers: int) -> Mixture:
    return tuple(THEIRS if it == layer else OWN for it in range(num_layers))


def _scores_of(contexts: Sequence[Context], blocks: Iterable[Span]) -> dict[Span, Scores]:
    return {block: [context.blocks[block] for context in contexts] for block in blocks}
