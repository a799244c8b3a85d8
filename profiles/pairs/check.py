"""Does a pair show the effect that it was trained for?

    python -m profiles.pairs.check --sender DIR --receiver DIR

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

from cachetree.ids import Span
from profiles.metrics import token_f1
from profiles.oracle import prefill
from profiles.pairs.questions import make_records
from profiles.records import Record, by_context, context_prompt, prompt_of
from profiles.sweep import Pair, Scores, Settings, answers, encode, load_pair, measure

MOST_LAYERS = 5
LEAST_ADVANTAGE = 0.4
MOST_REUSE_SHARE = 0.5
LEAST_BLOCK_SHARE = 0.95
LEAST_DROP = 0.1


@dataclass(frozen=True, slots=True)
class Properties:
    scores: Scores
    block: Span
    """The best block of at most MOST_LAYERS layers."""
    drops: tuple[float, ...]
    """Per layer: F1 lost when the receiver reads the sender's KV at this layer alone."""

    def missed(self) -> list[str]:
        """The bounds that do not hold, each with its numbers."""
        scores = self.scores
        full, reuse, block = scores.full_prefill, scores.full_reuse, scores.blocks[self.block]
        bounds = {
            f"receiver {full:.3f} - sender {scores.sender:.3f} >= {LEAST_ADVANTAGE}": (
                full - scores.sender >= LEAST_ADVANTAGE
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


def measure_properties(pair: Pair, records: Sequence[Record], settings: Settings) -> Properties:
    scores = measure(pair, records, settings, "blocks")
    small = [block for block in scores.blocks if 0 < len(block) <= MOST_LAYERS]
    best = max(small, key=lambda block: (scores.blocks[block], -len(block)))
    return Properties(scores, best, _drops(pair, records, settings))


def _drops(pair: Pair, records: Sequence[Record], settings: Settings) -> tuple[float, ...]:
    lost: list[list[float]] = [[] for _ in range(pair.num_layers)]
    for context, questions in tqdm(by_context(records), desc="layers", unit="document"):
        ids = encode(pair.tokenizer, context_prompt(context))
        num_reused = len(ids) // settings.page_size * settings.page_size
        prefix = torch.tensor([ids[:num_reused]])
        ours, theirs = prefill(pair.receiver, prefix).kv, prefill(pair.sender, prefix).kv
        states = [ours]
        states += [(*ours[:i], theirs[i], *ours[i + 1 :]) for i in range(pair.num_layers)]
        for record in questions:
            suffix = torch.tensor([encode(pair.tokenizer, prompt_of(record))[num_reused:]])
            texts = answers(pair.receiver, pair.tokenizer, states, suffix, settings.max_new)
            own, *mixed = [token_f1(text, record.answers) for text in texts]
            for layer, quality in enumerate(mixed):
                lost[layer].append(own - quality)
    return tuple(fmean(values) for values in lost)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m profiles.pairs.check")
    parser.add_argument("--sender", type=Path, required=True)
    parser.add_argument("--receiver", type=Path, required=True)
    args = parser.parse_args()
    pair = load_pair(args.sender, args.receiver, torch.bfloat16)
    properties = measure_properties(pair, make_records("held_out"), Settings())
    scores, block = properties.scores, properties.block
    drops = " ".join(f"{drop:+.2f}" for drop in properties.drops)
    tqdm.write(
        f"sender {scores.sender:.3f}  full prefill {scores.full_prefill:.3f}  "
        f"full reuse {scores.full_reuse:.3f}  "
        f"[{block.start}, {block.stop}) {scores.blocks[block]:.3f}\ndrop per layer: {drops}"
    )
    missed = properties.missed()
    for bound in missed:
        tqdm.write(f"missed: {bound}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
