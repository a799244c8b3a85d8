"""How long a run will take, from the cost model. Pure; the progress bar counts in these seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from cachetree import Span
from profiles.compute import REFERENCES, longest_suffix
from profiles.costs import prefix_pass_s
from profiles.data import Document
from profiles.evidence import CostModel

DECODED_SHARE: Final = 0.3
"""Of answers over mixtures that differ from the receiver's own, as far as one can know before."""
CALLS: Final = 2
"""Of each layer per step: once for every source that its rows read."""
NUM_JUDGED: Final = 12
"""Blocks and baselines of a typical frontier."""

Step = tuple[int, str]
"""A document's number and the step's name."""


def training_s(
    documents: Sequence[Document], blocks: Sequence[Span], costs: CostModel
) -> dict[Step, float]:
    """Seconds of every step of the training split."""
    return {
        (index, REFERENCES if start == 0 else f"start:{start}"): _start_s(
            document, [block for block in blocks if block.start == start], costs
        )
        for index, document in enumerate(documents)
        for start in sorted({block.start for block in blocks})
    }


def judging_s(documents: Iterable[Document], costs: CostModel) -> float:
    """Seconds of the held-out split, before its candidates are known."""
    num_layers = costs.num_layers
    return sum(
        (2 + NUM_JUDGED / 2) * prefix_pass_s(costs, len(document.prefix), num_layers)
        + NUM_JUDGED * _questions_s(document, num_layers, 1, costs)
        for document in documents
    )


def _start_s(document: Document, blocks: Sequence[Span], costs: CostModel) -> float:
    num_layers, start, num_prefix = costs.num_layers, blocks[0].start, len(document.prefix)
    # Mixtures that differ up to a layer go through it one by one; the others together.
    num_branches = sum(1 + sum(it.stop <= layer for it in blocks) for layer in range(num_layers))
    own = prefix_pass_s(costs, num_prefix, num_layers - start)
    if start == 0:
        num_branches += sum(range(num_layers))
        own += prefix_pass_s(costs, num_prefix, num_layers)
    return own + _questions_s(document, num_branches, len(blocks), costs)


def _questions_s(
    document: Document, num_branches: float, num_mixtures: int, costs: CostModel
) -> float:
    """Teacher forcing through so many branches of layers, then decoding what differs.

    Rows go through a layer together, so a token costs what it costs in a long prefix.
    """
    num_layers, num_prefix = costs.num_layers, len(document.prefix)
    num_rows = 2 * len(document.questions)
    token_layer_s = costs.layer_token_s + num_prefix * costs.suffix_token2_s / num_layers
    forced_s = num_branches * num_rows * longest_suffix(document) * token_layer_s
    num_decoded = DECODED_SHARE * num_mixtures * len(document.questions)
    decoded_s = document.task.max_new * (
        CALLS * costs.suffix_s + num_decoded * num_layers * token_layer_s
    )
    return CALLS * costs.suffix_s + forced_s + decoded_s
