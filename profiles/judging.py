"""Any plan, by the metric: the held-out split's frontier and what one could do instead of it.

for each context
    the sender's pass, the receiver's own pass ─► full prefill, full reuse
    for each run of layers: the receiver's layers from the sender's E at its first
    for each CacheBlend budget: its tokens at all layers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from cachetree.evidence import BaselineKind
from cachetree.ids import Span
from profiles.documents import Document
from profiles.examination import Score
from profiles.layered import PrefixKV
from profiles.mixtures import Mixture
from profiles.passes import DocumentPasses
from profiles.study import FIRST_NEW, THEIRS, Bench, Study

SPLIT: Final = "held_out"
MOST_SIZES: Final = 6
"""What there is of every size is measured at so many of them at most."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is recomputed: runs of layers, each from the sender's E, or a share of the tokens."""

    kind: BaselineKind | None = None
    """None for a plan of the frontier."""
    runs: tuple[Span, ...] = ()
    share: float = 0.0

    @property
    def name(self) -> str:
        if self.share:
            return f"tokens:{self.share:.4f}"
        return "layers:" + ",".join(f"{run.start}-{run.stop}" for run in self.runs)

    def recomputed_layers(self, num_layers: int) -> float:
        return self.share * num_layers or sum(len(run) for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """All of the held-out split, by context, then by question."""

    sender: list[Sequence[float]]
    full_prefill: list[Sequence[float]]
    full_reuse: list[Sequence[Score]]
    candidates: dict[Candidate, list[Sequence[Score]]]


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
    for parts in range(2, len(recommended or ()) + 1):
        runs = split_runs(recommended, parts)
        found.append(Candidate(kind=BaselineKind.SPLIT_BLOCK, runs=runs))
    return found


def spread(values: Sequence[T]) -> list[T]:
    """At most MOST_SIZES of them, evenly, the first and the last among them."""
    if len(values) <= MOST_SIZES:
        return list(values)
    step = (len(values) - 1) / (MOST_SIZES - 1)
    return [values[round(i * step)] for i in range(MOST_SIZES)]


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


def judge(
    bench: Bench,
    documents: Sequence[Document],
    candidates: Sequence[Candidate],
    split: str = SPLIT,
) -> Judged:
    """Measure document after document, every candidate by the metric."""
    starts = {run.start for candidate in candidates for run in candidate.runs}
    found: dict[Candidate, list[Sequence[Score]]] = {it: [] for it in candidates}
    references = []
    for index, document in enumerate(documents):
        study = Study(bench, split, index, document, starts)
        reuse: Mixture = (THEIRS,) * bench.num_layers
        references.append(study.references([reuse], [True]))
        runs = _Runs(study.passes, bench.num_layers)
        for candidate in candidates:
            entry = study.compare(
                candidate.name,
                lambda candidate=candidate, runs=runs: runs.sources(candidate),
                [_mixture(candidate, bench.num_layers)],
                [True],
            )
            found[candidate].append(entry.scores[0])
    return Judged(
        sender=[entry.sender for entry in references],
        full_prefill=[entry.own for entry in references],
        full_reuse=[entry.scores[0] for entry in references],
        candidates=found,
    )


class _Runs:
    """Recomputed layers of one document, kept for the next candidates as far as memory allows:
    no more of them at a time than the model has layers."""

    def __init__(self, passes: DocumentPasses, num_layers: int) -> None:
        self._passes, self._num_layers = passes, num_layers
        self._made: dict[Span, PrefixKV] = {}

    def sources(self, candidate: Candidate) -> list[PrefixKV]:
        if candidate.share:
            return [self._passes.blend(candidate.share)]
        serving = {run: self._serving(run) for run in candidate.runs}
        fresh = [run for run, made in serving.items() if made is None]
        if sum(map(len, [*self._made, *fresh])) > self._num_layers:
            kept = {made for made in serving.values() if made is not None}
            if sum(map(len, [*kept, *fresh])) > self._num_layers:
                kept, fresh = set(), list(candidate.runs)
            self._made = {made: kv for made, kv in self._made.items() if made in kept}
        for run in fresh:
            self._made[run] = self._passes.new(run)
        return [self._made[self._serving(run) or run] for run in candidate.runs]

    def _serving(self, run: Span) -> Span | None:
        """What was made from the same layer, and at least as far."""
        return next(
            (it for it in self._made if it.start == run.start and it.stop >= run.stop), None
        )


def _mixture(candidate: Candidate, num_layers: int) -> Mixture:
    if candidate.share:
        return (FIRST_NEW,) * num_layers
    reads = [THEIRS] * num_layers
    for i, run in enumerate(candidate.runs):
        for layer in run:
            reads[layer] = FIRST_NEW + i
    return tuple(reads)
