"""Measure one document in steps: each step is one measurement. Its KV and E are computed at their
first use.

Every pass over a prefix is counted, and every step's result goes to the journal.
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
"""Names of the two splits, training and held-out, in journals."""

THEIRS: Final = 0
"""Index of the sender's KV among the KV sources of every mixture."""
OWN: Final = 1
"""Index of the receiver's own KV among the KV sources of every mixture."""
FIRST_NEW: Final = 2
"""Index of the first recomputed KV among the KV sources of every mixture."""

REFERENCES: Final = "references"
FILTERED: Final = 0.25
"""CacheBlend recomputes at most this share more tokens at layer 1 than on average over layers 1 to
the last, and as many fewer at the last layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Both models of a pair, and the journal that keeps their results."""

    sender: Answerer
    receiver: Answerer
    journal: Journal
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Maps that correct E. Keys are digests."""
    answers: dict[str, list[Tokens]] = field(default_factory=dict)
    """The receiver's answers by full prefill. Keys are documents. Another pair with the same
    receiver may have made them."""
    pairs: Mapping[Task, tuple[Answerer, Answerer]] = field(default_factory=dict)
    """Models by task, for a line of models. Other tasks use `sender` and `receiver`."""
    tick: Callable[[Entry, bool], None] = lambda entry, is_new: None
    """Function that is called after each step. Its second argument is True if the step was measured
    now, and False if the journal had its result."""

    @property
    def num_layers(self) -> int:
        return self.receiver.model.num_layers

    def at(self, document: Document) -> Bench:
        """Return the bench with the sender and receiver of this document's task."""
        sender, receiver = self.pairs.get(document.task, (self.sender, self.receiver))
        return replace(self, sender=sender, receiver=receiver)

    def judged(self, split: str, document: Document) -> Document:
        """Return a document with the answers that judge it: the data's own, or full prefill's."""
        references = self.journal.get(split, key_of(document), REFERENCES)
        return (
            document
            if references is None
            else self.receiver.judged_by(references.answers, document)
        )


@dataclass
class DocumentPasses:
    """KV and E of one prefix from both models, computed at their first use, in host memory."""

    sender: LayeredModel
    receiver: LayeredModel
    ids: Sequence[int]
    e_layers: Collection[int]
    """Layers at which the sender's E is kept."""
    own_e_layers: Collection[int] = ()
    """Layers at which the receiver's E is kept."""
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Maps that correct E. Keys are digests."""
    count: int = field(default=0, init=False)
    """Number of passes over the prefix so far."""

    @property
    def theirs(self) -> tuple[KV, ...]:
        """The sender's KV of the prefix."""
        return self._sent.kv

    @property
    def own(self) -> tuple[KV, ...]:
        """The receiver's own KV of the prefix, from its own embeddings."""
        return self._received.kv

    def e_of_both(self, layer: int) -> tuple[Tensor, Tensor]:
        """E of the sender and E of the receiver at a layer at which both are kept."""
        return self._sent.e[layer], self._received.e[layer]

    def new(self, layers: Span, e_map: str = "") -> PrefixKV:
        """Compute the receiver's KV of `layers` from the sender's E at the first of them. The map
        with digest `e_map`, if stated, corrects E. All other layers are None."""
        if layers.start == 0:
            return self.own
        e = self._sent.e[layers.start]
        if e_map:
            e = e.to(self.receiver.device)
            e = self.corrections[e_map].to(e.device, e.dtype)(e[0])[None]
        self.count += 1
        return self.receiver.recompute(e, layers)

    def blend(self, share: float) -> PrefixKV:
        """Return the sender's KV in which the receiver has recomputed tokens as CacheBlend does.
        `share` is the work, as a share of a full prefill's."""
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
    """One measurement: some plans on one document."""

    place: int
    """Index of the document in its split."""
    plans: tuple[Candidate, ...] = ()
    """Plans that are measured together, so that layers that they share are recomputed once. Empty
    in a document's first step, which measures both models' own answers and full reuse."""
    is_decoded: bool = True
    """True if answers are decoded and get a quality."""

    @property
    def name(self) -> str:
        if not self.plans:
            return REFERENCES
        return ";".join(["" if self.is_decoded else "kl", *(it.name for it in self.plans)])


@dataclass
class Study:
    """Measures one document of one split. Steps that the journal has are not measured again."""

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
    """Return the runs of layers to recompute, each with the digest of the map that corrects its E,
    or "". If several runs begin with the same E, the longest is returned: it contains the
    others."""
    stops: dict[tuple[int, str], int] = {}
    for plan in plans:
        for run in plan.runs:
            begin = run.start, plan.map_sha256
            stops[begin] = max(run.stop, stops.get(begin, 0))
    return [(Span(start, stop), e_map) for (start, e_map), stop in stops.items()]


def mixtures_of(plans: Sequence[Candidate], num_layers: int) -> list[Mixture]:
    """Return each plan's mixture: for every layer, the index of its KV source. Indices are `THEIRS`
    and `OWN`, then from `FIRST_NEW` on one for each of the `longest_runs`, then one for each
    CacheBlend."""
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
    """Return how many tokens each layer recomputes in CacheBlend if the work is `share` of a full
    prefill's. The first layer recomputes all tokens. Later layers recompute fewer and fewer, from
    `FILTERED` above their mean to `FILTERED` below."""
    mean = max(0.0, share * num_layers - 1) / max(1, num_layers - 1)
    slope = min(FILTERED, (1 - mean) / mean) if mean else 0.0
    steps = [1 - 2 * i / max(1, num_layers - 2) for i in range(num_layers - 1)]
    return [num_tokens, *(round(num_tokens * mean * (1 + slope * it)) for it in steps)]
