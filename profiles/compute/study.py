"""One document: its questions over its prefix passes, step by step, kept in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from cachetree import Span
from cachetree.corrections import Correction
from profiles.compute.examination import Answerer, Examination
from profiles.compute.journal import Entry, Journal
from profiles.compute.mixtures import Mixture
from profiles.compute.passes import DocumentPasses
from profiles.data.documents import Document
from profiles.stats.measured import Candidate, Score

TRAIN: Final = "train"
HELD_OUT: Final = "held_out"
"""Splits, as journals name them."""

THEIRS: Final = 0
"""PrefixKV in every mixture: the sender's KV."""
OWN: Final = 1
"""The receiver's own."""
FIRST_NEW: Final = 2
"""What plans add comes after the two."""

REFERENCES: Final = "references"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Both models, and where results are kept."""

    sender: Answerer
    receiver: Answerer
    journal: Journal
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Maps of E by digest, for plans that name one."""
    tick: Callable[[Entry, bool], None] = lambda entry, is_new: None
    """Called after each step, with whether it was measured just now or found in the journal."""

    @property
    def num_layers(self) -> int:
        return self.receiver.model.num_layers


class Study:
    """Measures one document of one split. Nothing is computed that the journal has."""

    def __init__(
        self,
        bench: Bench,
        split: str,
        index: int,
        document: Document,
        e_layers: Collection[int],
    ) -> None:
        self._bench, self._document, self._split, self._index = bench, document, split, index
        models = bench.sender.model, bench.receiver.model
        self._passes = DocumentPasses(
            *models, document.prefix, e_layers, corrections=bench.corrections
        )
        self._examination: Examination | None = None

    def references(self, mixtures: Sequence[Mixture], decoded: Sequence[bool]) -> Entry:
        """What both models answer by themselves, and mixtures of the sender's and the own KV.

        The first step: the others compare with its answers.
        """
        if (found := self._found(REFERENCES)) is not None:
            return found
        began, before = time.monotonic(), self._passes.count
        sender, receiver, document = self._bench.sender, self._bench.receiver, self._document
        theirs = sender.answer(document, self._passes.theirs)
        answers = receiver.answer(document, self._passes.own)
        examination = self._examine(answers)
        sources = [self._passes.theirs, self._passes.own]
        return self._put(
            REFERENCES,
            began,
            before,
            answers=tuple(answers),
            own=tuple(examination.qualities),
            sender=tuple(sender.quality(document, i, it) for i, it in enumerate(theirs)),
            scores=tuple(examination.examine(sources, mixtures, decoded)),
        )

    def compare(
        self, plans: Sequence[Candidate], *, is_decoded: bool
    ) -> dict[Candidate, Sequence[Score]]:
        """Plans together: what they begin with in common is recomputed once."""
        step = ";".join(it.name for it in plans)
        if not is_decoded:
            step = f"kl;{step}"
        entry = self._found(step)
        if entry is None:
            began, before = time.monotonic(), self._passes.count
            references = self._bench.journal.get(self._split, self._index, REFERENCES)
            if references is None:
                raise ValueError("the references of a document come before its other steps")
            examination = self._examination or self._examine(references.answers)
            theirs, own = self._passes.theirs, self._passes.own
            made = [self._passes.new(run, e_map) for run, e_map in longest_runs(plans)]
            made += [self._passes.blend(it.share) for it in plans if it.share]
            mixtures = mixtures_of(plans, self._bench.num_layers)
            scores = examination.examine([theirs, own, *made], mixtures, [is_decoded] * len(plans))
            entry = self._put(step, began, before, scores=tuple(scores))
        return dict(zip(plans, entry.scores, strict=True))

    def _examine(self, answers: Sequence[tuple[int, ...]]) -> Examination:
        own = self._passes.own
        self._examination = Examination(self._bench.receiver, self._document, own, answers)
        return self._examination

    def _found(self, step: str) -> Entry | None:
        entry = self._bench.journal.get(self._split, self._index, step)
        if entry is not None:
            self._bench.tick(entry, False)
        return entry

    def _put(self, step: str, began: float, before: int, **found: object) -> Entry:
        entry = Entry(
            split=self._split,
            document=self._index,
            step=step,
            passes=self._passes.count - before,
            seconds=round(time.monotonic() - began, 4),
            **found,
        )
        self._bench.journal.put(entry)
        self._bench.tick(entry, True)
        return entry


def longest_runs(plans: Iterable[Candidate]) -> list[tuple[Span, str]]:
    """Runs to recompute, with the digest of the map of their E, if any: of those that begin with
    the same E the longest, from which the others are taken."""
    stops: dict[tuple[int, str], int] = {}
    for it in plans:
        for run in it.runs:
            begin = run.start, it.map_sha256
            stops[begin] = max(run.stop, stops.get(begin, 0))
    return [(Span(start, stop), e_map) for (start, e_map), stop in stops.items()]


def mixtures_of(plans: Sequence[Candidate], num_layers: int) -> list[Mixture]:
    """Of plans whose sources are, from `FIRST_NEW` on, `longest_runs` and then every blend."""
    runs = [(run.start, e_map) for run, e_map in longest_runs(plans)]
    places = count(FIRST_NEW + len(runs))
    mixtures: list[Mixture] = []
    for it in plans:
        reads = [next(places) if it.share else THEIRS] * num_layers
        for run in it.runs:
            source = FIRST_NEW + runs.index((run.start, it.map_sha256))
            reads[run.start : run.stop] = [source] * len(run)
        mixtures.append(tuple(reads))
    return mixtures
