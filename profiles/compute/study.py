"""One document: its KV and E, made at the first use, and its questions over them, step by step.

Every prefix pass is counted, and every step is kept in the journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Final

from torch import Tensor

from cachetree import Span
from cachetree.corrections import Correction
from profiles.compute.examination import Answerer, Examination
from profiles.compute.journal import Entry, Journal
from profiles.compute.layered import KV, LayeredModel, Prefix, PrefixKV
from profiles.compute.mixtures import Mixture
from profiles.data.documents import Document, Tokens, key_of
from profiles.data.tasks import Task
from profiles.stats.measured import FULL_REUSE, Candidate

TRAIN: Final = "train"
HELD_OUT: Final = "held_out"
"""Names of the two splits in journals."""

THEIRS: Final = 0
"""Index of the sender's KV in every mixture."""
OWN: Final = 1
"""Index of the receiver's own KV."""
FIRST_NEW: Final = 2
"""Index of the first source beyond the sender's and the receiver's own KV. Plans add these
sources."""

REFERENCES: Final = "references"
FILTERED: Final = 0.25
"""The first filter of a blend keeps this share of tokens more than the mean; the last filter keeps
as many fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Both models, and where results are kept."""

    sender: Answerer
    receiver: Answerer
    journal: Journal
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Maps of E by digest, for plans that name a map."""
    answers: dict[str, list[Tokens]] = field(default_factory=dict)
    """The receiver's own answers, by document. Another pair with the same receiver may have made
    them."""
    pairs: Mapping[Task, tuple[Answerer, Answerer]] = field(default_factory=dict)
    """Sender and receiver by task, for the pairs of a line. Other tasks have the bench's own."""
    tick: Callable[[Entry, bool], None] = lambda entry, is_new: None
    """Function that is called after each step. Its second argument is True if the step was measured
    now, False if the journal had it."""

    @property
    def num_layers(self) -> int:
        return self.receiver.model.num_layers

    def at(self, document: Document) -> Bench:
        """Return the bench with the models that answer a document."""
        sender, receiver = self.pairs.get(document.task, (self.sender, self.receiver))
        return replace(self, sender=sender, receiver=receiver)

    def judged(self, split: str, document: Document) -> Document:
        """Return a measured document with the answers that judge it."""
        references = self.journal.get(split, key_of(document), REFERENCES)
        return (
            document
            if references is None
            else self.receiver.judged_by(references.answers, document)
        )


@dataclass
class DocumentPasses:
    """Passes of sender and receiver over one prefix. The results stay in host memory."""

    sender: LayeredModel
    receiver: LayeredModel
    ids: Sequence[int]
    e_layers: Collection[int]
    """Layers at which the sender's E is kept."""
    own_e_layers: Collection[int] = ()
    """Layers at which the receiver's E is kept."""
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Maps of E by digest."""
    count: int = field(default=0, init=False)
    """Prefix passes made so far."""

    @property
    def theirs(self) -> tuple[KV, ...]:
        """The sender's KV."""
        return self._sent.kv

    @property
    def own(self) -> tuple[KV, ...]:
        """The receiver's KV. It is a recompute of all layers from the receiver's own embeddings."""
        return self._received.kv

    def e_of_both(self, layer: int) -> tuple[Tensor, Tensor]:
        """The sender's E and the receiver's, at a layer at which both are kept."""
        return self._sent.e[layer], self._received.e[layer]

    def new(self, layers: Span, e_map: str = "") -> PrefixKV:
        """Compute the receiver's KV of `layers` from the sender's E at the first. The map with
        digest `e_map`, if any, corrects that E. Other layers are None."""
        if layers.start == 0:
            return self.own
        e = self._sent.e[layers.start]
        if e_map:
            e = e.to(self.receiver.device)
            e = self.corrections[e_map].to(e.device, e.dtype)(e[0])[None]
        self.count += 1
        return self.receiver.recompute(e, layers)

    def blend(self, share: float) -> PrefixKV:
        """Return the sender's KV with tokens recomputed as CacheBlend does it, for a share of a
        prefill's compute."""
        self.count += 1
        num_kept = tokens_kept(share, len(self.ids), self.receiver.num_layers)
        return self.receiver.blend(self.ids, num_kept, self.theirs)

    @cached_property
    def _received(self) -> Prefix:
        self.count += 1
        return self.receiver.prefix(self.ids, self.own_e_layers)

    @cached_property
    def _sent(self) -> Prefix:
        self.count += 1
        return self.sender.prefix(self.ids, self.e_layers)


@dataclass(frozen=True, slots=True)
class Step:
    """A unit of measurement: some plans on one document."""

    place: int
    """The document's place in its split."""
    plans: tuple[Candidate, ...] = ()
    """Plans that are measured together, so that a layer that several of them recompute is
    recomputed once. Empty in a document's first step, which measures both models' own answers and
    full reuse."""
    is_decoded: bool = True
    """True if answers get a quality."""

    @property
    def name(self) -> str:
        if not self.plans:
            return REFERENCES
        return ";".join(["" if self.is_decoded else "kl", *(it.name for it in self.plans)])


@dataclass
class Study:
    """Measure one document of one split. Steps that the journal has are not measured again."""

    bench: Bench
    split: str
    document: Document
    e_layers: Collection[int]
    _examination: Examination | None = field(default=None, init=False)

    @cached_property
    def _key(self) -> str:
        return key_of(self.document)

    @cached_property
    def _passes(self) -> DocumentPasses:
        models, maps = (self.bench.sender.model, self.bench.receiver.model), self.bench.corrections
        return DocumentPasses(*models, self.document.prefix, self.e_layers, corrections=maps)

    def measure(self, step: Step) -> Entry:
        """Return the journal's entry for the step. If there is none, measure the step now."""
        journal = self.bench.journal
        entry = journal.get(self.split, self._key, step.name)
        if is_new := entry is None:
            began, before = time.monotonic(), self._passes.count
            measured = self._try(step) if step.plans else self._refer()
            entry = Entry(
                split=self.split,
                document=self._key,
                step=step.name,
                passes=self._passes.count - before,
                seconds=round(time.monotonic() - began, 4),
                **measured,
            )
            journal.put(entry)
        self.bench.tick(entry, is_new)
        return entry

    def _refer(self) -> dict[str, object]:
        sender, receiver, document = self.bench.sender, self.bench.receiver, self.document
        theirs = sender.answer(document, self._passes.theirs)
        if (answers := self.bench.answers.get(self._key)) is None:
            answers = receiver.answer(document, self._passes.own)
            self.bench.answers[self._key] = answers
        examination = self._examine(answers)
        reuse = mixtures_of([FULL_REUSE], self.bench.num_layers)
        return {
            "answers": tuple(answers),
            "own": tuple(examination.qualities),
            "sender": tuple(
                sender.quality(examination.document, i, it) for i, it in enumerate(theirs)
            ),
            "scores": tuple(examination.examine([self._passes.theirs], reuse, is_decoded=True)),
        }

    def _try(self, step: Step) -> dict[str, object]:
        references = self.bench.journal.get(self.split, self._key, REFERENCES)
        assert references is not None, "the references of a document come before its other steps"
        examination = self._examination or self._examine(references.answers)
        sources = [self._passes.theirs, self._passes.own]
        sources += [self._passes.new(run, e_map) for run, e_map in longest_runs(step.plans)]
        sources += [self._passes.blend(it.share) for it in step.plans if it.share]
        mixtures = mixtures_of(step.plans, self.bench.num_layers)
        scores = examination.examine(sources, mixtures, is_decoded=step.is_decoded)
        return {"scores": tuple(scores)}

    def _examine(self, answers: Sequence[tuple[int, ...]]) -> Examination:
        own = self._passes.own
        self._examination = Examination(self.bench.receiver, self.document, own, answers)
        return self._examination


def longest_runs(plans: Iterable[Candidate]) -> list[tuple[Span, str]]:
    """Return the runs to recompute, each with the digest of the map of its E, if any. If several
    runs begin with the same E, only the longest is returned: the other runs are parts of it."""
    stops: dict[tuple[int, str], int] = {}
    for plan in plans:
        for run in plan.runs:
            begin = run.start, plan.map_sha256
            stops[begin] = max(run.stop, stops.get(begin, 0))
    return [(Span(start, stop), e_map) for (start, e_map), stop in stops.items()]


def mixtures_of(plans: Sequence[Candidate], num_layers: int) -> list[Mixture]:
    """Return the mixture of each plan: for every layer, the index of a source. The indices are
    `THEIRS` and `OWN`, then from `FIRST_NEW` on one for each of the `longest_runs`, then one for
    each blend."""
    runs = [(run.start, e_map) for run, e_map in longest_runs(plans)]
    places = count(FIRST_NEW + len(runs))
    mixtures: list[Mixture] = []
    for plan in plans:
        reads = [next(places) if plan.share else THEIRS] * num_layers
        if plan.alone is not None:
            reads = [OWN] * num_layers
            reads[plan.alone] = THEIRS
        for run in plan.runs:
            source = FIRST_NEW + runs.index((run.start, plan.map_sha256))
            reads[run.start : run.stop] = [source] * len(run)
        mixtures.append(tuple(reads))
    return mixtures


def tokens_kept(share: float, num_tokens: int, num_layers: int) -> list[int]:
    """Return how many tokens each layer recomputes, if a share of the work of all layers over all
    tokens is allowed. The first layer recomputes all tokens. The later layers recompute fewer and
    fewer: from a quarter above their mean to a quarter below."""
    mean = max(0.0, share * num_layers - 1) / max(1, num_layers - 1)
    slope = min(FILTERED, (1 - mean) / mean) if mean else 0.0
    steps = [1 - 2 * i / max(1, num_layers - 2) for i in range(num_layers - 1)]
    return [num_tokens, *(round(num_tokens * mean * (1 + slope * it)) for it in steps)]
