"""One document: its questions over its prefix passes, step by step, kept in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachetree import Span
from cachetree.corrections import Correction
from profiles.compute.examination import Answerer, Examination
from profiles.compute.journal import Entry, Journal
from profiles.compute.layered import PrefixKV
from profiles.compute.mixtures import Mixture
from profiles.compute.passes import DocumentPasses
from profiles.data.documents import Document

TRAIN: Final = "train"
HELD_OUT: Final = "held_out"
"""Splits, as journals name them."""

THEIRS: Final = 0
"""PrefixKV in every mixture: the sender's KV."""
OWN: Final = 1
"""The receiver's own."""
FIRST_NEW: Final = 2
"""What steps add comes after the two."""

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
        self.passes = DocumentPasses(
            *models, document.prefix, e_layers, corrections=bench.corrections
        )
        self._examination: Examination | None = None

    @property
    def num_layers(self) -> int:
        return self._bench.num_layers

    def references(self, mixtures: Sequence[Mixture], decoded: Sequence[bool]) -> Entry:
        """What both models answer by themselves, and mixtures of the sender's and the own KV.

        The first step: the others compare with its answers.
        """
        if (found := self._found(REFERENCES)) is not None:
            return found
        began, before = time.monotonic(), self.passes.count
        sender, receiver, document = self._bench.sender, self._bench.receiver, self._document
        theirs = sender.answer(document, self.passes.theirs)
        answers = receiver.answer(document, self.passes.own)
        examination = self._examine(answers)
        sources = [self.passes.theirs, self.passes.own]
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
        self,
        step: str,
        new: Callable[[], list[PrefixKV]],
        mixtures: Sequence[Mixture],
        decoded: Sequence[bool],
    ) -> Entry:
        """Mixtures that read sources which this step makes, numbered from `FIRST_NEW`."""
        if (found := self._found(step)) is not None:
            return found
        began, before = time.monotonic(), self.passes.count
        references = self._bench.journal.get(self._split, self._index, REFERENCES)
        if references is None:
            raise ValueError("the references of a document come before its other steps")
        examination = self._examination or self._examine(references.answers)
        sources = [self.passes.theirs, self.passes.own, *new()]
        scores = examination.examine(sources, mixtures, decoded)
        return self._put(step, began, before, scores=tuple(scores))

    def _examine(self, answers: Sequence[tuple[int, ...]]) -> Examination:
        own = self.passes.own
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
            passes=self.passes.count - before,
            seconds=round(time.monotonic() - began, 4),
            **found,
        )
        self._bench.journal.put(entry)
        self._bench.tick(entry, True)
        return entry


def block_mixture(block: Span, num_layers: int, new: int) -> Mixture:
    """The sender's KV outside of a block, the source `new` in it."""
    return tuple(new if layer in block else THEIRS for layer in range(num_layers))
