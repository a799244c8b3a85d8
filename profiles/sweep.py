"""Measure every block of a pair and write its profile.

    python -m profiles.sweep --sender DIR --receiver DIR \\
        --data train.jsonl --held-out held_out.jsonl --out pair.json

The block is chosen on one set of questions and judged on the other: recommended is the smallest
block whose F1 on `--data` is within the tolerance of full prefill's (the best F1 among equals), and
the pair passes if that block is within the tolerance on `--held-out` too.

Reuse is in whole pages, as in a server; the tokens after the last page go with the question.
Compute is bf16 unless `--dtype` says otherwise, because that is what a server runs and rounding is
part of the quality that it will show.

What makes it fast: for a context, one pass of the receiver per starting layer, from the sender's E
down to the last layer, yields the KV of every block that starts there. All configurations of a
question are then decoded as one batch.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cachetree.errors import CacheTreeError
from cachetree.identity import read_model_identity
from cachetree.ids import EMPTY_SPAN, Span
from cachetree.profile import VERSION, BlockQuality, PairProfile, write_profile
from profiles.metrics import token_f1
from profiles.oracle import KV, prefill, recompute
from profiles.records import Record, RecordError, by_context, context_prompt, read_records

METRIC: Final = "token_f1"
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    page_size: int = 16
    """Tokens per page; only whole pages are reused."""
    max_new: int = 8
    """Longest answer in tokens."""
    tolerance: float = 0.05
    """Largest accepted loss, relative to full prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two loaded models and the tokenizer that they share."""

    sender: PreTrainedModel
    receiver: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def num_layers(self) -> int:
        return int(self.receiver.config.num_hidden_layers)


@dataclass(frozen=True, slots=True)
class Scores:
    """Mean F1 over one set of questions. The empty block is full KV reuse."""

    sender: float
    full_prefill: float
    blocks: Mapping[Span, float]
    num_questions: int

    @property
    def full_reuse(self) -> float:
        return self.blocks[EMPTY_SPAN]


def all_blocks(num_layers: int) -> list[Span]:
    """Every non-empty contiguous block, by start, then by size."""
    starts = range(num_layers)
    return [Span(start, stop) for start in starts for stop in range(start + 1, num_layers + 1)]


def measure(pair: Pair, records: Sequence[Record], settings: Settings, label: str) -> Scores:
    """Mean F1 of the sender, of the receiver, and of the receiver with every block."""
    blocks = [EMPTY_SPAN, *all_blocks(pair.num_layers)]
    sender: list[float] = []
    full_prefill: list[float] = []
    by_block: dict[Span, list[float]] = {block: [] for block in blocks}
    with tqdm(total=len(records), desc=label, unit="question") as bar:
        for context, questions in by_context(records):
            context_ids = encode(pair.tokenizer, context_prompt(context))
            num_reused = len(context_ids) // settings.page_size * settings.page_size
            states = _states(pair, torch.tensor([context_ids[:num_reused]]), blocks)
            for record in questions:
                prompt = encode(pair.tokenizer, f"{context_prompt(context)} {record.input}")
                suffix = torch.tensor([prompt[num_reused:]])
                texts = answers(pair.sender, pair.tokenizer, states[:1], suffix, settings.max_new)
                sender.append(token_f1(texts[0], record.answers))
                texts = answers(pair.receiver, pair.tokenizer, states[1:], suffix, settings.max_new)
                full_prefill.append(token_f1(texts[0], record.answers))
                for block, text in zip(blocks, texts[1:], strict=True):
                    by_block[block].append(token_f1(text, record.answers))
                bar.update()
    means = {block: fmean(values) for block, values in by_block.items()}
    return Scores(fmean(sender), fmean(full_prefill), means, len(records))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text).input_ids)


@torch.no_grad()
def _states(pair: Pair, ids: Tensor, blocks: Sequence[Span]) -> list[list[KV]]:
    """KV of the reused tokens: the sender's, the receiver's, then one per block."""
    theirs, ours = prefill(pair.sender, ids), prefill(pair.receiver, ids)
    nothing = [(k[:, :, :0], v[:, :, :0]) for k, v in theirs.kv]
    embeddings = pair.receiver.get_input_embeddings()(ids)
    num_layers = pair.num_layers
    from_start = []
    for start in range(num_layers):
        entering = theirs.e[start] if start > 0 else embeddings
        from_start.append(recompute(pair.receiver, entering, Span(start, num_layers), nothing))
    states = [list(theirs.kv), list(ours.kv)]
    for block in blocks:
        recomputed = from_start[block.start] if len(block) else {}
        kv = [recomputed[i] if i in block else theirs.kv[i] for i in range(num_layers)]
        states.append(kv)
    return states


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    states: Sequence[Sequence[KV]],
    suffix: Tensor,
    max_new: int,
) -> list[str]:
    """The model's greedy answer over each state, all in one batch."""
    layers = zip(*states, strict=True)
    stacked = [(torch.cat([k for k, _ in kv]), torch.cat([v for _, v in kv])) for kv in layers]
    cache = DynamicCache(stacked, config=model.config)
    ids = suffix.expand(len(states), -1)
    columns: list[Tensor] = []
    ended = torch.zeros(len(states), dtype=torch.bool)
    for _ in range(max_new):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = output.logits[:, -1:].argmax(-1)
        columns.append(ids)
        ended |= ids[:, 0] == tokenizer.eos_token_id
        if bool(ended.all()):
            break
    rows = torch.cat(columns, 1).tolist()
    return [tokenizer.decode(_until(row, tokenizer.eos_token_id)) for row in rows]


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end)] if end in ids else ids


def recommend(scores: Scores, tolerance: float) -> Span:
    """The smallest block within the tolerance; among equals the best, then the first. The block of
    all layers is full prefill, so there is always one."""
    num_layers = max(block.stop for block in scores.blocks)
    floor = scores.full_prefill * (1.0 - tolerance)
    good = [b for b, quality in scores.blocks.items() if len(b) and quality >= floor]
    good = good or [Span(0, num_layers)]
    return min(good, key=lambda block: (len(block), -scores.blocks[block], block.start))


def verdict(block: Span, held_out: Scores, tolerance: float) -> tuple[bool, str]:
    """Whether the pair passes the gate, and why, in one sentence."""
    num_layers = max(stop.stop for stop in held_out.blocks)
    if len(block) == num_layers:
        return False, "no block smaller than all layers is within the tolerance"
    quality, floor = held_out.blocks[block], held_out.full_prefill * (1.0 - tolerance)
    compared = "at least" if quality >= floor else "below"
    return quality >= floor, (
        f"layers [{block.start}, {block.stop}) reach F1 {quality:.3f} on held-out questions, "
        f"{compared} {floor:.3f} (full prefill {held_out.full_prefill:.3f}, "
        f"tolerance {tolerance:.0%})"
    )


def load_pair(sender: Path, receiver: Path, dtype: torch.dtype) -> Pair:
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        for path in (sender, receiver)
    ]
    tokenizer = AutoTokenizer.from_pretrained(receiver)
    return Pair(sender=models[0], receiver=models[1], tokenizer=tokenizer)


def sweep(args: argparse.Namespace) -> PairProfile:
    """Measure, choose and judge, as the command line says."""
    settings = Settings(page_size=args.page_size, max_new=args.max_new, tolerance=args.tolerance)
    identities = [read_model_identity(p, args.cache_dir) for p in (args.sender, args.receiver)]
    train, held_out = read_records(args.data), read_records(args.held_out)
    pair = load_pair(args.sender, args.receiver, _DTYPES[args.dtype])
    chosen_on = measure(pair, train, settings, "choosing")
    judged_on = measure(pair, held_out, settings, "judging")
    block = recommend(chosen_on, settings.tolerance)
    passed, reason = verdict(block, judged_on, settings.tolerance)
    blocks = all_blocks(pair.num_layers)
    return PairProfile(
        version=VERSION,
        sender=identities[0],
        receiver=identities[1],
        metric=METRIC,
        data_sha256=_sha256([args.data, args.held_out]),
        num_questions=judged_on.num_questions,
        sender_quality=round(judged_on.sender, 4),
        full_prefill_quality=round(judged_on.full_prefill, 4),
        full_reuse_quality=round(judged_on.full_reuse, 4),
        tolerance=settings.tolerance,
        blocks=tuple(_quality(b, judged_on) for b in blocks),
        recommended=_quality(block, judged_on),
        passed=passed,
        reason=reason,
    )


def _quality(block: Span, scores: Scores) -> BlockQuality:
    quality = round(scores.blocks[block], 4)
    return BlockQuality(start=block.start, stop=block.stop, quality=quality)


def _sha256(paths: Iterable[Path]) -> str:
    """Of the files' bytes one after the other."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m profiles.sweep")
    parser.add_argument("--sender", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--receiver", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--data", type=Path, required=True, help="JSONL to choose the block on")
    parser.add_argument("--held-out", type=Path, required=True, help="JSONL to judge it on")
    parser.add_argument("--out", type=Path, required=True, help="the profile to write")
    parser.add_argument("--tolerance", type=float, default=0.05, help="largest relative loss")
    parser.add_argument("--page-size", type=int, default=16, help="the server's page size")
    parser.add_argument("--max-new", type=int, default=8, help="longest answer in tokens")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16")
    parser.add_argument("--cache-dir", type=Path, default=Path("build/identity"))
    args = parser.parse_args()
    try:
        profile = sweep(args)
    except (CacheTreeError, RecordError) as error:
        tqdm.write(f"sweep: {error}")
        return 1
    write_profile(profile, args.out)
    tqdm.write(
        f"sender {profile.sender_quality:.3f}, full prefill {profile.full_prefill_quality:.3f}, "
        f"full reuse {profile.full_reuse_quality:.3f}\n"
        f"{'passed' if profile.passed else 'failed'}: {profile.reason}\nwrote {args.out}"
    )
    return 0 if profile.passed else 2


if __name__ == "__main__":
    sys.exit(main())
