"""Plans with refreshed layers: which are worth measuring, and how they do on the training split.

There are 2^L sets of layers, so only these are, after all blocks have been measured:

    the k most sensitive layers refreshed, k = 2, 4, 8, … and all that differ
    the best block of each size up to half of the model, with as many of the other layers refreshed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Final

from rich.console import Console

from cachetree import EMPTY_SPAN, Span
from cachetree.planning import Recipe
from profiles.compute.judging import judge, num_steps
from profiles.compute.study import Bench
from profiles.data import Document
from profiles.progress import Clock, shown
from profiles.stats import Candidate, Swept, choose, spread

SPLIT: Final = "refreshed"
"""The training split's questions once more, for the journal."""


def refresh(
    bench: Bench,
    documents: Sequence[Document],
    swept: Swept,
    first_difference: int,
    console: Console,
) -> Swept:
    """What was swept, with plans that refresh layers. For models of one base: within one server
    those share a pool, where E at every layer costs memory and no transfer."""
    choice = choose(swept, 0.0)
    found = recipes(choice.best_blocks, choice.ranking, first_difference)
    if not found:
        return swept
    with shown(console, "refreshing", Clock(len(documents))) as done:
        candidates = {it: Candidate(runs=it.runs) for it in found}
        step = len(documents) / num_steps(documents, [*candidates.values()], (), bench.num_layers)
        ticking = replace(bench, tick=lambda _, is_new: done(step, is_new))
        judged = judge(ticking, documents, list(candidates.values()), SPLIT)
    scores = {recipe: judged.candidates[it] for recipe, it in candidates.items()}
    return replace(swept, refreshed=scores)


def recipes(
    best_blocks: Iterable[Span], ranking: Sequence[int], first_difference: int
) -> list[Recipe]:
    """`best_blocks` have one of each size; `ranking` has all layers, the most sensitive first.

    Layers below the first that differs are the receiver's own already.
    """
    differing = [layer for layer in ranking if layer >= first_difference]
    blocks = [it for it in best_blocks if 1 < len(it) <= len(ranking) // 2]
    found = []
    for block in (EMPTY_SPAN, *spread(blocks)):
        others = [layer for layer in differing if layer not in block]
        for number in _numbers(len(others)):
            found.append(Recipe(block=block, refreshed=tuple(sorted(others[:number]))))
    return found


def _numbers(total: int) -> list[int]:
    """2, 4, 8, … and the total; a single layer is a block."""
    doubling = takewhile(lambda it: it < total, (2**i for i in range(1, total)))
    return [*doubling, *([total] if total > 1 else [])]
