"""Forecast from the cost model how long a run will take. The progress bar counts these seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cachetree import Span
from profiles.compute.measuring import comparing_steps, judging_steps, sweep_steps
from profiles.compute.mixtures import Mixture
from profiles.compute.study import Step, longest_runs, mixtures_of
from profiles.data.documents import Document
from profiles.evidence import CostModel
from profiles.report.words import duration
from profiles.settings import Settings
from profiles.stats.choice import baselines
from profiles.stats.measured import FULL_REUSE, Candidate, spread

DECODED_SHARE: Final = 0.3
"""Expected share of a promising plan's answers that differ from full prefill's, and so are decoded.
As many of full prefill's answers are expected to differ from their drafts."""
SAID_TWICE: Final = 1.2
"""`spoken` adds the forecast for answers that never stop if it is more than this many times."""
STEPS: Final = 5
"""Expected forward passes to decode an answer with a draft, a guess of the answer. If the data have
no drafts, full prefill needs a pass for each token. Its answers are the drafts of plans' answers,
which need fewer. So we then expect a pass for every second token."""
FOLLOWED: Final = 2.0
"""Work to make a next-token distribution and compare it, as a multiple of the work to make it."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecasts how long the profiler's measurements (steps) take, from a receiver's cost model."""

    costs: CostModel
    head_layers: float
    """Work of one token's next-token distribution, relative to one token's work in a layer."""

    def whole(
        self,
        train: Sequence[Document],
        held_out: Sequence[Document],
        blocks: Sequence[Span],
        settings: Settings,
        fitted_on: Sequence[Document],
    ) -> float:
        """Forecast the seconds of a run, without its smaller model. If E is corrected, every block
        is assumed to be tried a second time."""
        num_layers = self.costs.num_layers
        plans, others = typical_plans(num_layers, settings.plans)
        sweep = sweep_steps(train, blocks, num_layers, pruned=settings.pruned)
        swept = {it.place for it in sweep}
        whole_s = sum(self.steps(train, sweep))
        if settings.e_correction:
            whole_s += self._rest_s(train, sweep, swept) + sum(self.fitting(fitted_on))
            plans = [*plans, *plans]
        whole_s += self._rest_s(train, judging_steps(train, plans, num_layers), swept)
        whole_s += sum(self.steps(held_out, judging_steps(held_out, plans, num_layers)))
        comparing = comparing_steps(held_out, others, num_layers)
        return whole_s + self._rest_s(held_out, comparing, range(len(held_out)))

    def both(
        self, train: Sequence[Document], held_out: Sequence[Document], *rest: Any
    ) -> tuple[float, float]:
        """Forecast `whole` twice: if answers are as long as the accepted answers, and if answers
        never stop."""
        most_s = self.whole(endless(train), endless(held_out), *rest)
        return self.whole(train, held_out, *rest), most_s

    def _rest_s(
        self, documents: Sequence[Document], steps: Sequence[Step], swept: Collection[int]
    ) -> float:
        """Forecast the seconds of `steps` without the first steps of documents in `swept`: these
        are done."""
        done = {it for it in steps if not it.plans and it.place in swept}
        seconds = zip(steps, self.steps(documents, steps, done), strict=True)
        return sum(step_s for step, step_s in seconds if step not in done)

    def steps(
        self, documents: Sequence[Document], steps: Sequence[Step], done: Collection[Step] = ()
    ) -> list[float]:
        """Forecast the seconds of each step (a measurement on one document), in order. If only some
        steps of a document are `done`, both models read its prefix again, and full prefill's
        answers are fed in again. The first missing step includes this time."""
        seconds, is_again = [], False
        for step in steps:
            document = documents[step.place]
            seconds.append(self._step_s(document, step))
            if not step.plans:
                is_again = step in done
            elif is_again and step not in done:
                seconds[-1] += self._passes_s(document) + self._own_s(document)
                is_again = False
        return seconds

    def fitting(self, documents: Sequence[Document]) -> list[float]:
        """Forecast the seconds of each document on which maps of E are fitted."""
        return [self._passes_s(it) for it in documents]

    def _passes_s(self, document: Document) -> float:
        """Forecast the seconds of the sender's and the receiver's passes over the prefix."""
        return 2 * self.costs.pass_s(len(document.prefix), self.costs.num_layers)

    def _own_s(self, document: Document) -> float:
        """Forecast the seconds to compute full prefill's next-token distributions."""
        return self._forced_s(document, self.costs.num_layers, 1)

    def _step_s(self, document: Document, step: Step) -> float:
        num_prefix, num_layers = len(document.prefix), self.costs.num_layers
        mixtures = mixtures_of(step.plans or [FULL_REUSE], num_layers)
        mixtures_s = self._mixtures_s(document, mixtures, is_decoded=step.is_decoded)
        if step.plans:
            runs = (run for run, _ in longest_runs(step.plans) if run.start)
            passes_s = sum(self.costs.pass_s(num_prefix, len(it)) for it in runs)
            share = sum(it.share for it in step.plans)
            return passes_s + share * self.costs.layers_s(num_prefix, num_layers) + mixtures_s
        # Passes of both models. The sender's answers: half of them as long as the drafts, half as
        # long as allowed. Full prefill's answers, which have drafts, and their distributions.
        passes_s = self._passes_s(document)
        free_s = (_longest(document) + document.task.max_new) / 2 * self.costs.suffix_s
        own_s = self._decoded_s(document, 1 + DECODED_SHARE) + self._own_s(document)
        return passes_s + free_s + own_s + mixtures_s

    def _mixtures_s(
        self, document: Document, mixtures: Sequence[Mixture], *, is_decoded: bool
    ) -> float:
        # A layer runs once for all mixtures that are equal up to it.
        depths = range(1, self.costs.num_layers + 1)
        branches = sum(len({it[:depth] for it in mixtures}) for depth in depths)
        seconds = self._forced_s(document, branches, len(mixtures))
        if is_decoded:
            seconds += self._decoded_s(document, DECODED_SHARE * len(mixtures))
        return seconds

    def _forced_s(self, document: Document, num_branches: float, num_mixtures: int) -> float:
        """Forecast the seconds to run known answers through the layers, and to compare the
        distributions of `num_mixtures` mixtures.

        A branch is one layer run once for all mixtures that are equal up to it. All rows go
        through a layer together, so a token costs as much as in a long prefix.
        """
        num_rows, longest = len(document.questions), _longest(document)
        tokens = num_rows * (_longest_suffix(document) + longest)
        followed = num_mixtures * num_rows * longest * self.head_layers
        layers_s = num_branches * tokens * self._token_layer_s(document)
        return self.costs.suffix_s + layers_s + FOLLOWED * followed * self.costs.layer_token_s

    def _decoded_s(self, document: Document, num_answers: float) -> float:
        """Forecast the seconds to decode `num_answers` answers to each question, with drafts.

        The answers of a few plans are one batch. Each forward pass of a batch reads all weights.
        """
        rows = num_answers * len(document.questions)
        tokens = rows * (_longest_suffix(document) + 2 * _longest(document))
        steps = STEPS if _is_drafted(document) else max(STEPS, _longest(document) / 2)
        steps_s = steps * self.costs.suffix_s * max(1.0, num_answers / 2)
        return steps_s + tokens * self.costs.num_layers * self._token_layer_s(document)

    def _token_layer_s(self, document: Document) -> float:
        of_past = len(document.prefix) * self.costs.suffix_token2_s / self.costs.num_layers
        return self.costs.layer_token_s + of_past


def typical_plans(num_layers: int, most: int) -> tuple[list[Candidate], list[Candidate]]:
    """Return examples of plans that may be judged, and of baselines. The forecast uses them,
    because the real plans are not known yet."""
    sizes = spread(range(1, num_layers), most)
    blocks = [Span((num_layers - it) // 2, (num_layers + it) // 2) for it in sizes]
    plans = [Candidate(runs=(it,)) for it in blocks]
    return plans, baselines(plans, plans[len(plans) // 2], range(num_layers))


def endless(documents: Sequence[Document]) -> list[Document]:
    """Return the same documents without drafts. The forecast then assumes that no answer ends
    before the limit."""

    def undrafted(whole: Document) -> Document:
        return replace(whole, questions=tuple(replace(of, draft=()) for of in whole.questions))

    return [*map(undrafted, documents)]


def spoken(least_s: float, most_s: float) -> str:
    """Write a forecast for people; the second number appears only if it differs.

    >>> spoken(50.0, 52.0), spoken(50.0, 342.0)
    ('50 s', '50 s; up to 5 min 42 s if answers do not stop before --max-new')
    """
    most = f"; up to {duration(most_s)} if answers do not stop before --max-new"
    return duration(least_s) + (most if most_s > SAID_TWICE * least_s else "")


def _is_drafted(document: Document) -> bool:
    return any(it.answers and it.draft for it in document.questions)


def _longest(document: Document) -> int:
    """Number of tokens of the longest answer. Without a draft, this is the longest allowed
    answer."""
    drafts = [len(it.draft) for it in document.questions]
    return max(drafts) if _is_drafted(document) else document.task.max_new


def _longest_suffix(document: Document) -> int:
    return max(len(it.suffix) for it in document.questions)
