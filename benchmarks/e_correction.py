"""How much closer to full prefill is a block that begins with corrected E?

    python benchmarks/e_correction.py measure NAME --sender DIR --receiver DIR --fit FILE \\
        --on FILE --blocks 15:25,10:25,5:25 --state DIR [--real] [--contexts N] [--seconds 240]
    python benchmarks/e_correction.py report --state DIR

`measure` fits the maps on the contexts of one file (`profiles.compute.fitting`; every fourth one
chooses the penalty) and measures each block on those of another, which share none: with E as the
sender's, with a bias added, and with maps of each rank. It stops after so many seconds and goes on
from `--state` when called again. `report` puts all that was measured into
`results/e_correction.json`.

The measure: the receiver is given the reference answers token by token over its own KV, and over
that of each plan. KL and total variation (TV) of the distributions of these tokens, means by
question; nothing is decoded. Differences are paired by context, with 95 % intervals by the
bootstrap over contexts. All in float32 on one thread.

Physics: one recomputed layer takes about 12 hidden² products a token (Llama's sizes), a whole map
hidden², one of rank 16 32 hidden. So a map costs at most a twelfth of a layer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
import torch
from result import here
from safetensors.torch import load_file, save_file

from cachetree import Span
from cachetree.corrections import Correction
from profiles.compute import Answerer, ModelSource, block_mixture
from profiles.compute.fitting import RANKS, Fitted, Moments, fit
from profiles.compute.mixtures import forced
from profiles.data import Document, Metric, TaskOptions
from profiles.profiler import answerers, load_documents, open_pair
from profiles.settings import Settings

RESULTS: Final = Path(__file__).resolve().parent / "results" / "e_correction.json"
REAL: Final = TaskOptions(template="{context}\n\n{input}", chat=True, metric=Metric.F1, max_new=56)
SMALL: Final = TaskOptions(template="<bos> {context} {input}", metric=Metric.F1, max_new=8)
KINDS: Final = {0: "bias", None: "full"} | {it: f"rank {it}" for it in RANKS if it}
TRYING: Final = 4
"""Every such context chooses the penalty."""
NUM_DRAWS: Final = 2000
FEWEST: Final = 8
"""Contexts of which a mean is told."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One context: KL and TV by plan, means over its questions."""

    pair: str
    on: str
    context: int
    tokens: int
    questions: int
    kl: dict[str, float]
    tv: dict[str, float]


class Maps(msgspec.Struct, frozen=True, kw_only=True):
    """What was fitted for one pair."""

    pair: str
    contexts: int
    tokens: int
    layers: dict[int, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("name")
    for flag in ("sender", "receiver", "fit", "on"):
        measuring.add_argument(f"--{flag}", type=Path, required=True)
    measuring.add_argument("--blocks", required=True)
    measuring.add_argument("--real", action="store_true", help="prompts of the real pairs")
    measuring.add_argument("--contexts", type=int, default=40)
    measuring.add_argument("--fit-contexts", type=int, default=150)
    measuring.add_argument("--seconds", type=float, default=240)
    reporting = commands.add_parser("report")
    for it in (measuring, reporting):
        it.add_argument("--state", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.state.mkdir(parents=True, exist_ok=True)
    if args.command == "measure":
        measure(args)
    else:
        report(args.state)


def measure(args: argparse.Namespace) -> None:
    """Fit, if that is not done, then context after context."""
    began = time.monotonic()
    settings = Settings(
        sender=ModelSource(path=args.sender),
        receiver=ModelSource(path=args.receiver),
        data=(str(args.fit),),
        options=REAL if args.real else SMALL,
        dtype="float32",
        device="cpu",
        out=args.state / "none.json",
    )
    pair = open_pair(settings)
    positions = pair.receiver.config.max_position_embeddings
    _, fitted_on = load_documents(settings, [str(args.fit)], pair.tokenizer, positions)
    _, documents = load_documents(settings, [str(args.on)], pair.tokenizer, positions)
    known = {it.context for it in fitted_on}
    assert not known & {it.context for it in documents}, "judged on what the maps are fitted on"
    sender, receiver = answerers(pair, [*fitted_on, *documents])
    blocks = [Span(*map(int, it.split(":"))) for it in args.blocks.split(",")]
    maps = _maps(args, sender, receiver, fitted_on[: args.fit_contexts])
    results = args.state / f"{args.name}.{args.on.stem}.jsonl"
    found = _read(results)
    with results.open("ab") as file:
        for index, document in enumerate(documents[: args.contexts]):
            if index in {it.context for it in found}:
                continue
            if time.monotonic() - began > args.seconds:
                break
            kl, tv = judge(sender, receiver, document, blocks, maps)
            line = Found(
                pair=args.name,
                on=args.on.stem,
                context=index,
                tokens=len(document.prefix),
                questions=len(document.questions),
                kl=kl,
                tv=tv,
            )
            found.append(line)
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
    for name in found[0].kl if found else ():
        kl, tv = (fmean(getattr(it, of)[name] for it in found) for of in ("kl", "tv"))
        sys.stdout.write(f"{name:24s} KL {kl:.4f}  TV {tv:.4f}\n")
    sys.stdout.write(f"{len(found)} contexts, {time.monotonic() - began:.0f} s\n")


def _maps(
    args: argparse.Namespace, sender: Answerer, receiver: Answerer, documents: Sequence[Document]
) -> dict[tuple[int, str], Correction]:
    """By layer and kind; of every other layer."""
    file, told = args.state / f"{args.name}.maps", args.state / f"{args.name}.fit.json"
    layers = range(1 if receiver.model.num_layers < 16 else 5, receiver.model.num_layers)
    layers = layers if receiver.model.num_layers < 16 else range(5, 30, 5)
    if not told.exists():
        hidden = receiver.model.model.config.hidden_size
        parts = {it: (Moments(hidden), Moments(hidden)) for it in layers}
        for index, document in enumerate(documents):
            theirs = sender.model.prefix(document.prefix, layers).e
            ours = receiver.model.prefix(document.prefix, layers).e
            for layer, (first, second) in parts.items():
                part = second if index % TRYING == TRYING - 1 else first
                part.add(theirs[layer], ours[layer])
        fitted = {layer: fit(*both) for layer, both in parts.items()}
        tensors = {
            f"{layer}|{kind}|{i}": tensor
            for layer, many in fitted.items()
            for kind, it in zip(KINDS_IN_ORDER, many, strict=True)
            for i, tensor in enumerate(it.correction.tensors)
        }
        save_file(tensors, file)
        told.write_bytes(
            msgspec.json.encode(
                Maps(
                    pair=args.name,
                    contexts=len(documents),
                    tokens=sum(len(it.prefix) for it in documents),
                    layers={
                        layer: _described(many, parts[layer]) for layer, many in fitted.items()
                    },
                )
            )
        )
    read: dict[tuple[int, str], list[torch.Tensor]] = {}
    for name, tensor in sorted(load_file(file).items()):
        layer, kind, _ = name.split("|")
        read.setdefault((int(layer), kind), []).append(tensor)
    return {key: Correction(it[0], tuple(it[1:])) for key, it in read.items()}


KINDS_IN_ORDER: Final = [KINDS[it] for it in RANKS]


def _described(many: Sequence[Fitted], parts: tuple[Moments, Moments]) -> dict[str, Any]:
    """Explained share by kind, and what kind of a matrix the whole map adds to the identity."""
    matrix = many[-1].correction.factors[0]
    values = torch.linalg.svdvals(matrix)
    symmetric = (matrix + matrix.T) / 2
    return {
        "distance": round((parts[0] + parts[1]).distance, 6),
        "explained": {kind: it.explained for kind, it in zip(KINDS_IN_ORDER, many, strict=True)},
        "singular_values": [round(float(it), 5) for it in values[:16]],
        "energy_of_16": round(float(values[:16].square().sum() / values.square().sum()), 4),
        "symmetric": round(float(symmetric.square().sum() / matrix.square().sum()), 4),
        "scale": round(float(matrix.diagonal().mean()), 6),
    }


@torch.inference_mode()
def judge(
    sender: Answerer,
    receiver: Answerer,
    document: Document,
    blocks: Sequence[Span],
    maps: Mapping[tuple[int, str], Correction],
) -> tuple[dict[str, float], dict[str, float]]:
    """KL and TV of every plan over one context."""
    model = receiver.model
    num_layers = model.num_layers
    theirs = sender.model.prefix(document.prefix, [it.start for it in blocks])
    sources: list[Any] = [theirs.kv, model.prefix(document.prefix, ()).kv]
    mixtures = {"own": (1,) * num_layers, "reuse": (0,) * num_layers}
    for start in sorted({it.start for it in blocks}):
        from_start = [it for it in blocks if it.start == start]
        whole = Span(start, max(it.stop for it in from_start))
        e = theirs.e[start]
        for kind in ("", *KINDS_IN_ORDER):
            entering = maps[start, kind](e[0])[None] if kind else e
            made = model.recompute(entering, whole)
            sources.append([made.get(layer) for layer in range(num_layers)])
            for it in from_start:
                name = f"[{it.start}, {it.stop})" + (f" {kind}" if kind else "")
                mixtures[name] = block_mixture(it, num_layers, len(sources) - 1)
    texts = [(*it.suffix, *it.reference[:-1]) for it in document.questions]
    width = max(map(len, texts))
    rows = torch.tensor([[*text, *([0] * (width - len(text)))] for text in texts])
    streams = forced(model, sources, list(mixtures.values()), rows, receiver.room.rows)
    kl, tv = dict.fromkeys(mixtures, 0.0), dict.fromkeys(mixtures, 0.0)
    for row, question in enumerate(document.questions):
        places = slice(len(question.suffix) - 1, len(texts[row]))
        expected = model.logits(streams[0][row, places]).log_softmax(-1)
        for name, stream in zip(mixtures, streams, strict=True):
            got = model.logits(stream[row, places]).log_softmax(-1)
            p = expected.exp()
            share = 1 / len(document.questions)
            kl[name] += share * float((p * (expected - got)).sum(-1).mean())
            tv[name] += share * float((p - got.exp()).abs().sum(-1).mean() / 2)
    del kl["own"], tv["own"]
    return kl, tv


def report(state: Path) -> None:
    """One JSON file of all pairs and data."""
    sets = [_read(file) for file in sorted(state.glob("*.jsonl"))]
    fits = [msgspec.json.decode(it.read_bytes(), type=Maps) for it in state.glob("*.fit.json")]
    told = {
        "environment": msgspec.to_builtins(here()),
        "fitted": [msgspec.to_builtins(it) for it in sorted(fits, key=lambda it: it.pair)],
        "measured": [_told(found) for found in sets if len(found) >= FEWEST],
    }
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")


def _told(found: Sequence[Found]) -> dict[str, Any]:
    plans = []
    for name in found[0].kl:
        plain = name.split(")")[0] + ")"
        plan: dict[str, Any] = {"plan": name}
        for of in ("kl", "tv"):
            values = [getattr(it, of)[name] for it in found]
            plan[of] = round(fmean(values), 6)
            if name not in ("reuse", plain):
                base = [getattr(it, of)[plain] for it in found]
                plan[f"{of}_gain"] = _interval([a - b for a, b in zip(values, base, strict=True)])
        plans.append(plan)
    return {
        "pair": found[0].pair,
        "on": found[0].on,
        "contexts": len(found),
        "questions": sum(it.questions for it in found),
        "mean_tokens": round(fmean(it.tokens for it in found)),
        "plans": plans,
    }


def _interval(values: Sequence[float]) -> list[float]:
    """Mean, and the 95 % interval of it."""
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(NUM_DRAWS))
    low, high = means[NUM_DRAWS // 40], means[-NUM_DRAWS // 40]
    return [round(it, 6) for it in (fmean(values), low, high)]


def _read(file: Path) -> list[Found]:
    return list(_lines(file)) if file.exists() else []


def _lines(file: Path) -> Iterator[Found]:
    for line in file.read_bytes().splitlines():
        yield msgspec.json.decode(line, type=Found)


if __name__ == "__main__":
    main()
