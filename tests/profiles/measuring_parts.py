"""Parts of the tests of measuring: a bench, and steps of a run that are made and run in one
call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from profiles.answerers import answerers
from profiles.compute.journal import temporary_journal
from profiles.compute.measuring import judging_steps, measure, sweep_steps
from profiles.compute.models import Pair
from profiles.compute.study import HELD_OUT, TRAIN, Bench
from profiles.data.documents import Document


@contextmanager
def bench_of(pair: Pair, documents: Sequence[Document], host_gb: float = 2.0) -> Iterator[Bench]:
    """Yield the bench of both models. Its journal is deleted afterwards."""
    sender, receiver = answerers(pair, documents, host_gb)
    with temporary_journal() as journal:
        yield Bench(sender=sender, receiver=receiver, journal=journal)


def sweep(bench, documents, blocks, *, pruned):
    steps = sweep_steps(documents, blocks, bench.num_layers, pruned=pruned)
    return measure(bench, TRAIN, documents, steps)


def judge(bench, documents, candidates, split=HELD_OUT):
    steps = judging_steps(documents, candidates, bench.num_layers)
    return measure(bench, split, documents, steps)
