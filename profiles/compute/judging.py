"""Any plan, by the metric: what the training split's frontier is made of; the held-out split's
plans and what one could do instead of them.

for each context
    the sender's pass, the receiver's own pass ─► full prefill, full reuse
    for each run of layers: the receiver's layers from the sender's E at its first
    for each CacheBlend budget: its tokens at all layers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachetree import Span
from profiles.compute.layered import PrefixKV
from profiles.compute.mixtures import Mixture
from profiles.compute.passes import DocumentPasses
from profiles.compute.study import FIRST_NEW, HELD_OUT, THEIRS, Bench, Study
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
    runs: list[Span] = []
    for layer in sorted(layers):
        if runs and runs[-1].stop == layer:
            runs[-1] = Span(runs[-1].start, layer + 1)
        else:
            runs.append(Span(layer, layer + 1))
    return tuple(runs)


def split_runs(block: Span, parts: int) -> tuple[Span, ...]:
    """A block in `parts` runs whose lengths differ by one at most, the longer ones first."""
    length, longer = divmod(len(block), parts)
    runs, start = [], block.start
    for i in range(parts):
        stop = start + length + (i < longer)
        runs.append(Span(start, stop))
        start = stop
    return tuple(runs)


def num_steps(
    documents: Sequence[Document],
    candidates: Sequence[Candidate],
    others: Sequence[Candidate],
    num_layers: int,
) -> int:
    """Calls of the bench's tick in all."""
    alone, together = (len(_batches(it, num_layers)) for it in (candidates, [*candidates, *others]))
    num_shown = len(first_of_each_task(documents, NUM_SHOWN))
    return len(documents) * (1 + alone) + num_shown * (together - alone)


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
        reuse: Mixture = (THEIRS,) * bench.num_layers
        references.append(study.references([reuse], [True]))
        for batch in _batches(everything if index in places else candidates, bench.num_layers):
            entry = study.compare(
                batch.name,
                lambda batch=batch, passes=study.passes: batch.sources(passes),
                batch.mixtures(bench.num_layers),
                [True] * len(batch.candidates),
            )
            for candidate, scores in zip(batch.candidates, entry.scores, strict=True):
                found[candidate].append(scores)
    return Judged(
        sender=[entry.sender for entry in references],
        full_prefill=[entry.own for entry in references],
        full_reuse=[entry.scores[0] for entry in references],
        candidates=found,
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Candidates that are measured together."""

    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        return ";".join(it.name for it in self.candidates)

    @property
    def made(self) -> list[tuple[Span, str]]:
        """Runs to recompute, with the map of their E; what others begin with is taken from the
        longest."""
        stops: dict[tuple[int, str], int] = {}
        for it in self.candidates:
            for run in it.runs:
                begin = run.start, _map_of(it)
                stops[begin] = max(run.stop, stops.get(begin, 0))
        return [(Span(start, stop), e_map) for (start, e_map), stop in stops.items()]

    @property
    def is_blend(self) -> bool:
        return bool(self.candidates[0].share)

    def sources(self, passes: DocumentPasses) -> list[PrefixKV]:
        if self.is_blend:
            return [passes.blend(self.candidates[0].share)]
        return [passes.new(run, e_map) for run, e_map in self.made]

    def mixtures(self, num_layers: int) -> list[Mixture]:
        if self.is_blend:
            return [(FIRST_NEW,) * num_layers]
        places = {(run.start, e_map): FIRST_NEW + i for i, (run, e_map) in enumerate(self.made)}
        return [_mixture(it, places, num_layers) for it in self.candidates]


def _batches(candidates: Iterable[Candidate], num_layers: int) -> list[_Batch]:
    """As many together as need no more recomputed layers than the model has, nor are more."""
    batches: list[_Batch] = []
    for it in candidates:
        joined = _Batch((*batches[-1].candidates, it)) if batches else _Batch((it,))
        fits = max(sum(len(run) for run, _ in joined.made), len(joined.candidates)) <= num_layers
        if batches and fits and not it.share and not batches[-1].is_blend:
            batches[-1] = joined
        else:
            batches.append(_Batch((it,)))
    return batches


def _map_of(it: Candidate) -> str:
    return "" if it.e_map is None else it.e_map.sha256


def _mixture(it: Candidate, places: Mapping[tuple[int, str], int], num_layers: int) -> Mixture:
    reads = [THEIRS] * num_layers
    for run in it.runs:
        for layer in run:
            reads[layer] = places[run.start, _map_of(it)]
    return tuple(reads)
