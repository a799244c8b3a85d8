"""How long a run will take, from the cost model. Pure; the progress bar counts in these seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cachetree import Span
from profiles.compute.fitting import NUM_FITTED
from profiles.compute.judging import NUM_SHOWN, baselines
from profiles.compute.study import REFERENCES
from profiles.costs import prefix_pass_s
from profiles.data.documents import Document, first_of_each_task
from profiles.evidence import CostModel
from profiles.stats.choice import MOST_TRIED
from profiles.stats.measured import Candidate, spread

DECODED_SHARE: Final = 0.5
"""Of answers over plans worth trying that differ from the receiver's own, as far as one can know
before; and of a reference that is not in the own answer."""
STEPS: Final = 5
"""In which an answer is decoded whose draft is mostly right."""
FOLLOWED: Final = 2.0
"""What comparing a distribution with another costs, in times of making it."""

Step = tuple[int, str]
"""A document's number and the step's name."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of what a run does with a receiver."""

    costs: CostModel
    head_layers: float
    """What a token's distribution costs, in times of a layer over the token."""

    def sweep(
        self,
        documents: Sequence[Document],
        places: Iterable[int],
        blocks: Sequence[Span],
        *,
        pruned: bool,
    ) -> dict[Step, float]:
        """Of every step of the sweep, over the documents at these places."""
        starts: dict[int, list[Span]] = {}
        for block in blocks:
            starts.setdefault(block.start, []).append(block)
        return {
            (index, f"start:{start}" if start else REFERENCES): self._start_s(
                documents[index], of_start, pruned=pruned
            )
            for index in places
            for start, of_start in sorted(starts.items())
        }

    def fitting(self, documents: Sequence[Document]) -> dict[int, float]:
        """Of each document that maps of E are fitted on, by its place."""
        num_layers = self.costs.num_layers
        return {
            place: 2 * prefix_pass_s(self.costs, len(documents[place].prefix), num_layers)
            for place in first_of_each_task(documents, NUM_FITTED)
        }

    def judging(
        self,
        documents: Sequence[Document],
        candidates: Sequence[Candidate],
        others: Sequence[Candidate],
    ) -> float:
        """In which plans are judged, `others` on some of the documents."""
        shown = set(first_of_each_task(documents, NUM_SHOWN))
        return sum(
            self._plans_s(document, [*candidates, *(others if place in shown else ())])
            for place, document in enumerate(documents)
        )

    def _start_s(self, document: Document, blocks: Sequence[Span], *, pruned: bool) -> float:
        num_layers, start, num_prefix = self.costs.num_layers, blocks[0].start, len(document.prefix)
        # Mixtures that differ up to a layer go through it one by one; the others together.
        branches = sum(1 + sum(it.stop <= layer for it in blocks) for layer in range(num_layers))
        seconds = prefix_pass_s(self.costs, num_prefix, num_layers - start)
        num_mixtures = len(blocks)
        if start == 0:
            branches += sum(range(num_layers))
            num_mixtures += num_layers
            seconds += prefix_pass_s(self.costs, num_prefix, num_layers) + self._alone_s(document)
        seconds += self._forced_s(document, branches, num_mixtures)
        if not pruned:
            seconds += self._decoded_s(document, DECODED_SHARE * len(blocks))
        return seconds

    def _plans_s(self, document: Document, plans: Sequence[Candidate]) -> float:
        num_prefix, num_layers = len(document.prefix), self.costs.num_layers
        longest: dict[int, int] = {}
        for run in (run for it in plans for run in it.runs if run.start):
            longest[run.start] = max(len(run), longest.get(run.start, 0))
        passes = [num_layers, num_layers, *longest.values()]
        return (
            sum(prefix_pass_s(self.costs, num_prefix, it) for it in passes)
            + sum(it.share for it in plans) * self.costs.layers_s(num_prefix, num_layers)
            + self._alone_s(document)
            + self._forced_s(document, num_layers * (1 + len(plans)), 1 + len(plans))
            + self._decoded_s(document, DECODED_SHARE * len(plans))
        )

    def _forced_s(self, document: Document, num_branches: float, num_mixtures: int) -> float:
        """Given answers through so many branches of layers, and the distributions that follow. Rows
        go through a layer together, so a token costs what it costs in a long prefix."""
        num_rows, longest = len(document.questions), _longest(document)
        tokens = num_rows * (_longest_suffix(document) + (1 + DECODED_SHARE) * longest)
        followed = num_mixtures * num_rows * (1 + DECODED_SHARE) * longest * self.head_layers
        layers_s = num_branches * tokens * self._token_layer_s(document)
        return self.costs.suffix_s + layers_s + FOLLOWED * followed * self.costs.layer_token_s

    def _alone_s(self, document: Document) -> float:
        """The own answers, which the references draft; the sender's, some as long as those and some
        as long as they may be; and what plans are compared with."""
        free_s = (_longest(document) + document.task.max_new) / 2 * self.costs.suffix_s
        once_s = self._forced_s(document, self.costs.num_layers, 1)
        return free_s + once_s + self._decoded_s(document, 1 + DECODED_SHARE)

    def _decoded_s(self, document: Document, num_answers: float) -> float:
        """Answers of which a draft is known; those of a few plans in a batch, each step of which
        reads all weights."""
        rows = num_answers * len(document.questions)
        tokens = rows * (_longest_suffix(document) + 2 * _longest(document))
        steps_s = STEPS * self.costs.suffix_s * max(1.0, num_answers / 2)
        return steps_s + tokens * self.costs.num_layers * self._token_layer_s(document)

    def _token_layer_s(self, document: Document) -> float:
        of_past = len(document.prefix) * self.costs.suffix_token2_s / self.costs.num_layers
        return self.costs.layer_token_s + of_past


def typical_plans(num_layers: int, most: int = MOST_TRIED) -> list[Candidate]:
    """What the training split's plans may be, before they are known."""
    sizes = spread(range(1, num_layers), most)
    blocks = [Span((num_layers - it) // 2, (num_layers + it) // 2) for it in sizes]
    return [Candidate(runs=(it,)) for it in blocks]


def typical_others(num_layers: int) -> list[Candidate]:
    """Likewise what they are compared with."""
    blocks = [it.runs[0] for it in typical_plans(num_layers)]
    return baselines(blocks, blocks[len(blocks) // 2], range(num_layers))


def _longest(document: Document) -> int:
    return max(len(it.reference) for it in document.questions)


def _longest_suffix(document: Document) -> int:
    return max(len(it.suffix) for it in document.questions)
