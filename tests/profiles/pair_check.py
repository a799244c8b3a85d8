"""Does a pair show the effect that it was trained for?

    python -m tests.profiles.pair_check --sender DIR --receiver DIR

The bounds are properties of the method, not of one set of weights: every training of the recipe
has to meet them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm

from cachetree import Span
from profiles.compute.journal import temporary_journal
from profiles.compute.models import ModelSource, Pair, load_pair
from profiles.compute.study import Bench
from profiles.compute.training import sweep
from profiles.data.documents import Document
from profiles.profiler import answerers
from profiles.stats.choice import qualities_of
from profiles.stats.frontier import grid
from profiles.stats.measured import Swept
from tools.pairs.questions import DATA, read_documents

MOST_LAYERS = 5
LEAST_ADVANTAGE = 0.4
MOST_REUSE_SHARE = 0.5
LEAST_BLOCK_SHARE = 0.95
LEAST_DROP = 0.1
MAX_MEMORY_GB = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """Mean F1 over one set of questions."""

    sender: float
    full_prefill: float
    full_reuse: float
    block: Span
    """The best block of at most MOST_LAYERS layers."""
    block_quality: float
    drops: tuple[float, ...]
    """Per layer: F1 lost when the receiver reads the sender's KV at this layer alone."""

    def missed(self) -> list[str]:
        """The bounds that do not hold, each with its numbers."""
        full, reuse, block = self.full_prefill, self.full_reuse, self.block_quality
        bounds = {
            f"receiver {full:.3f} - sender {self.sender:.3f} >= {LEAST_ADVANTAGE}": (
                full - self.sender >= LEAST_ADVANTAGE
            ),
            f"full reuse {reuse:.3f} <= {MOST_REUSE_SHARE} x full prefill {full:.3f}": (
                reuse <= MOST_REUSE_SHARE * full
            ),
            f"block [{self.block.start}, {self.block.stop}) {block:.3f} >= "
            f"{LEAST_BLOCK_SHARE} x full prefill {full:.3f}": block >= LEAST_BLOCK_SHARE * full,
            f"largest drop of one layer {max(self.drops):.3f} > {LEAST_DROP}": (
                max(self.drops) > LEAST_DROP
            ),
        }
        return [bound for bound, holds in bounds.items() if not holds]


def measure_properties(pair: Pair, documents: Sequence[Document]) -> Properties:
    sender, receiver = answerers(pair, documents, MAX_MEMORY_GB)
    with (
        temporary_journal() as journal,
        tqdm(total=len(documents) * pair.num_layers, unit="step") as bar,
    ):
        bench = Bench(
            sender=sender, receiver=receiver, journal=journal, tick=lambda *_: bar.update()
        )
        swept = sweep(bench, documents, grid(pair.num_layers, 1), pruned=False)
    return properties_of(swept)


def properties_of(swept: Swept) -> Properties:
    blocks = {block: _mean(qualities_of(scores)) for block, scores in swept.blocks.items()}
    small = [block for block in blocks if len(block) <= MOST_LAYERS]
    best = max(small, key=lambda block: (blocks[block], -len(block)))
    full = _mean(swept.full_prefill)
    return Properties(
        sender=_mean(swept.sender),
        full_prefill=full,
        full_reuse=_mean(qualities_of(swept.full_reuse)),
        block=best,
        block_quality=blocks[best],
        drops=tuple(full - _mean(qualities_of(scores)) for scores in swept.layers),
    )


def _mean(contexts: Sequence[Sequence[float]]) -> float:
    return fmean(value for context in contexts for value in context)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.profiles.pair_check")
    parser.add_argument("--sender", type=Path, required=True)
    parser.add_argument("--receiver", type=Path, required=True)
    args = parser.parse_args()
    pair = load_pair(
        ModelSource(path=args.sender),
        ModelSource(path=args.receiver),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    documents = read_documents(DATA / "held_out.jsonl", pair.tokenizer)
    found = measure_properties(pair, documents)
    drops = " ".join(f"{drop:+.2f}" for drop in found.drops)
    tqdm.write(
        f"sender {found.sender:.3f}  full prefill {found.full_prefill:.3f}  "
        f"full reuse {found.full_reuse:.3f}  "
        f"[{found.block.start}, {found.block.stop}) {found.block_quality:.3f}\n"
        f"drop per layer: {drops}"
    )
    missed = found.missed()
    for bound in missed:
        tqdm.write(f"missed: {bound}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
