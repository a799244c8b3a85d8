"""How long a run will take, from the cost model. Pure; the progress bar counts in these seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from cachetree import Span
from profiles.compute import NUM_SHOWN, REFERENCES, baselines, first_of_each_task
from profiles.costs import prefix_pass_s
from profiles.data import Document
from profiles.evidence import CostModel
from profiles.stats import MOST_TRIED, Candidate, spread

DECODED_SHARE: Final = 0.5
"""Of answers over plans worth trying that differ from the receiver's own, as far as one can know
before."""
ALONE: Final = 3
"""Answers that are decoded for references: the sender's, the receiver's own, full reuse's."""

Step = tuple[int, str]
"""A document's number and the step's name."""


def sweep_s(
    documents: Sequence[Document],
    places: Iterable[int],
    blocks: Sequence[Span],
    costs: CostModel,
    *,
    pruned: bool,
) -> dict[Step, float]:
    """Seconds of every step of the sweep, over the documents at these places."""
    starts: dict[int, list[Span]] = {}
    for block in blocks:
        starts.setdefault(block.start, []).append(block)
    return {
        (index, f"start:{start}" if start else REFERENCES): _start_s(
            documents[index], of_start, costs, pruned=pruned
        )
        for index in places
        for start, of_start in sorted(starts.items())
    }


def judging_s(
    documents: Sequence[Document],
    candidates: Sequence[Candidate],
    others: Sequence[Candidate],
    costs: CostModel,
) -> float:
    """Seconds in which plans are judged, `others` on some of the documents."""
    shown = set(first_of_each_task(documents, NUM_SHOWN))
    return sum(
        _plans_s(document, [*candidates, *(others if place in shown else ())], costs)
        for place, document in enumerate(documents)
    )


def typical_plans(num_layers: int, most: int = MOST_TRIED) -> list[Candidate]:
    """What the training split's plans may be, before they are known."""
    sizes = spread(range(1, num_layers), most)
    blocks = [Span((num_layers - it) // 2, (num_layers + it) // 2) for it in sizes]
    return [Candidate(runs=(it,)) for it in blocks]


def typical_others(num_layers: int) -> list[Candidate]:
    """Likewise what they are compared with."""
    blocks = [it.runs[0] for it in typical_plans(num_layers)]
    return baselines(blocks, blocks[len(blocks) // 2], range(num_layers))


def _start_s(
    document: Document, blocks: Sequence[Span], costs: CostModel, *, pruned: bool
) -> float:
    num_layers, start, num_prefix = costs.num_layers, blocks[0].start, len(document.prefix)
    # Mixtures that differ up to a layer go through it one by one; the others together.
    num_branches = sum(1 + sum(it.stop <= layer for it in blocks) for layer in range(num_layers))
    own_s = prefix_pass_s(costs, num_prefix, num_layers - start)
    num_decoded = 0.0 if pruned else DECODED_SHARE * len(blocks)
    if start == 0:
        num_branches += sum(range(num_layers))
        own_s += prefix_pass_s(costs, num_prefix, num_layers)
        num_decoded += ALONE
    return (
        own_s + _forced_s(document, num_branches, costs) + _decoded_s(document, num_decoded, costs)
    )


def _plans_s(document: Document, plans: Sequence[Candidate], costs: CostModel) -> float:
    num_prefix, num_layers = len(document.prefix), costs.num_layers
    longest: dict[int, int] = {}
    for run in (run for it in plans for run in it.runs if run.start):
        longest[run.start] = max(len(run), longest.get(run.start, 0))
    made_s = sum(prefix_pass_s(costs, num_prefix, it) for it in (num_layers, num_layers))
    made_s += sum(prefix_pass_s(costs, num_prefix, it) for it in longest.values())
    made_s += sum(it.share for it in plans) * costs.layers_s(num_prefix, num_layers)
    num_decoded = ALONE + DECODED_SHARE * len(plans)
    return (
        made_s
        + _forced_s(document, num_layers * (2 + len(plans)), costs)
        + _decoded_s(document, num_decoded, costs)
    )


def _forced_s(document: Document, num_branches: float, costs: CostModel) -> float:
    """Given answers through so many branches of layers. Rows go through a layer together, so a
    token costs what it costs in a long prefix."""
    longest = max(len(it.suffix) + len(it.reference) for it in document.questions)
    num_tokens = 2 * len(document.questions) * longest
    return costs.suffix_s + num_branches * num_tokens * _token_layer_s(document, costs)


def _decoded_s(document: Document, num_answers: float, costs: CostModel) -> float:
    """Answers token by token, some as long as the reference and some as long as they may be; those
    of a few plans in a batch, each of which reads all weights."""
    if not num_answers:
        return 0.0
    num_batches = max(1.0, num_answers / ALONE)
    rows = num_answers * len(document.questions)
    longest = max(len(it.reference) for it in document.questions)
    return (
        (longest + document.task.max_new)
        / 2
        * (num_batches * costs.suffix_s + rows * costs.num_layers * _token_layer_s(document, costs))
    )


def _token_layer_s(document: Document, costs: CostModel) -> float:
    return costs.layer_token_s + len(document.prefix) * costs.suffix_token2_s / costs.num_layers
