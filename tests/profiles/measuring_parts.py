"""Steps that are made and taken at once."""

from __future__ import annotations

from collections.abc import Sequence

from cachetree.ids import Span
from profiles.compute.measuring import judging_steps, measure, sweep_steps
from profiles.compute.study import HELD_OUT, TRAIN, Bench
from profiles.data.documents import Document
from profiles.stats.measured import Candidate, Measured


def sweep(
    bench: Bench, documents: Sequence[Document], blocks: Sequence[Span], *, pruned: bool
) -> Measured:
    steps = sweep_steps(documents, blocks, bench.num_layers, pruned=pruned)
    return measure(bench, TRAIN, documents, steps)


def judge(
    bench: Bench,
    documents: Sequence[Document],
    candidates: Sequence[Candidate],
    split: str = HELD_OUT,
) -> Measured:
    steps = judging_steps(documents, candidates, bench.num_layers)
    return measure(bench, split, documents, steps)
