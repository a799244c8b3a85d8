"""Stages of a profiler's run, each with a forecast and a progress bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Final

from rich.console import Console

from cachetree import Span
from profiles.compute.fitting import fit_maps
from profiles.compute.journal import Entry
from profiles.compute.measuring import measure, screening_steps
from profiles.compute.study import (
    HELD_OUT,
    REFERENCES,
    TRAIN,
    Bench,
    DocumentPasses,
    Step,
    Study,
)
from profiles.data.documents import Document, by_task, key_of
from profiles.forecast import Forecast
from profiles.progress import shown
from profiles.settings import Settings
from profiles.stats.choice import Choice, closest, neighbours, qualities_of
from profiles.stats.gate import still_open
from profiles.stats.measured import FULL_REUSE, Candidate, Measured, Scores

MOST_REFINED: Final = 4
"""Largest number of the best plans' neighbours that are decoded after a coarse grid."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Measures with a pair's models, forecasts each step, and shows progress."""

    bench: Bench
    forecast: Forecast
    console: Console

    def measure(
        self, title: str, split: str, documents: Sequence[Document], steps: Sequence[Step]
    ) -> Measured:
        journal = self.bench.journal
        keys = [*map(key_of, documents)]
        earlier = {it for it in steps if journal.get(split, keys[it.place], it.name) is not None}
        seconds = self.forecast.steps(documents, steps, earlier)
        found_s = sum(it for step, it in zip(steps, seconds, strict=True) if step in earlier)
        each = iter(seconds)
        with shown(self.console, title, sum(seconds), found_s) as done:

            def tick(_: Entry, is_new: bool) -> None:
                done(next(each) * is_new)

            return measure(replace(self.bench, tick=tick), split, documents, steps)

    def judge(
        self,
        documents: Sequence[Document],
        plans: Sequence[Candidate],
        tolerance: float,
        most: int,
    ) -> Measured:
        """Judge plans in the gate's order, on one document after another. All plans run on the
        first document. After that, a plan runs until it is proven or hopeless. Full prefill and
        full reuse run as long as any plan does."""
        tasks = [*by_task(documents)]
        places = [tasks.index(it.task) for it in documents]
        entries: list[Entry] = []
        scores: dict[Candidate, Scores] = {it: [] for it in plans}
        seconds = [sum(self.forecast.steps([it], _each(plans))) for it in documents]
        journal = self.bench.journal
        earlier = [journal.get(HELD_OUT, key_of(it), REFERENCES) is not None for it in documents]
        found_s = sum(compress(seconds, earlier))
        with shown(self.console, "judging", sum(seconds), found_s) as done:
            for document, document_s, is_earlier in zip(documents, seconds, earlier, strict=True):
                full = [it.own for it in entries]
                known = [qualities_of(scores[it]) for it in plans]
                still = still_open(full, known, places, tolerance, most)
                asked = [plans[it] for it in still] if entries else plans
                if entries and not asked:
                    break
                starts = {it.block.start for it in asked}
                study = Study(self.bench.at(document), HELD_OUT, document, starts)
                first, *rest = map(study.measure, _each(asked))
                entries.append(first)
                for plan, entry in zip(asked, rest, strict=True):
                    scores[plan].append(entry.scores[0])
                done(document_s * (not is_earlier))
        return Measured(
            sender=[it.sender for it in entries],
            full_prefill=[it.own for it in entries],
            candidates={FULL_REUSE: [it.scores[0] for it in entries], **scores},
        )


def _each(plans: Sequence[Candidate]) -> list[Step]:
    """Return a document's steps: first full prefill and full reuse, then one step for each plan."""
    return [Step(0), *(Step(0, (it,)) for it in plans)]


def correct(
    watched: Watched,
    documents: Sequence[Document],
    fitted_on: Sequence[Document],
    blocks: Sequence[Span],
    settings: Settings,
) -> tuple[Watched, list[Candidate]]:
    """Fit maps of E on the documents `fitted_on`. Return `watched` with these maps, and the blocks
    that stay closest to full prefill with corrected E."""
    models = watched.bench.sender.model, watched.bench.receiver.model
    layers = sorted({it.start for it in blocks})
    fitting = watched.forecast.fitting(fitted_on)
    with shown(watched.console, "fitting", sum(fitting)) as done:

        def contexts() -> Iterator[DocumentPasses]:
            for document, seconds in zip(fitted_on, fitting, strict=True):
                yield DocumentPasses(*models, document.prefix, layers, layers)
                done(seconds)

        maps = fit_maps(contexts(), layers, models[1].dtype, models[1].device)
    bench = replace(watched.bench, corrections={name.sha256: it for name, it in maps.items()})
    watched = replace(watched, bench=bench)
    plans = [
        Candidate(runs=(it,), e_map=e_map)
        for e_map in maps
        for it in sorted(blocks)
        if it.start == e_map.layer
    ]
    steps = screening_steps(documents, plans, pruned=settings.pruned)
    screened = watched.measure("screening", TRAIN, documents, steps)
    return watched, closest({it: screened.candidates[it] for it in plans}, settings.plans)


def refine(
    watched: Watched,
    documents: Sequence[Document],
    choice: Choice,
    known: Sequence[Candidate],
    settings: Settings,
) -> list[Candidate]:
    """Measure by KL blocks that begin or end one layer earlier or later than a best plan's block.

    Return the new plans that stay closest to full prefill, at most `MOST_REFINED`.
    """
    near = neighbours(choice.best, watched.bench.num_layers)
    new = [it for it in near if it not in known]
    steps = screening_steps(documents, new, pruned=settings.pruned)
    screened = watched.measure("neighbours", TRAIN, documents, steps)
    return closest({it: screened.candidates[it] for it in new}, MOST_REFINED)
