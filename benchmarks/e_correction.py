"""How much closer to full prefill is a block that begins with corrected E?

    python -m benchmarks.e_correction measure NAME --sender DIR --receiver DIR --fit FILE \\
        --on FILE --blocks 14:24,20:24 --state DIR [--real] [--contexts N] [--seconds 240] \\
        [--no-answers] [--sender-lora DIR] [--receiver-lora DIR]
    python -m benchmarks.e_correction texts FILE
    python -m benchmarks.e_correction report --state DIR

`measure` fits the maps on the contexts of one file (`profiles.compute.fitting`; every fourth one
chooses the penalty) and measures each block on those of another, which share none: with E as the
sender's, and corrected by the map. Full reuse and linear KV maps (`kv_maps`) stand beside. It stops
after so many seconds and goes on from `--state` when called again. `texts` writes contexts of
another kind than package records: this repository's pages and code. `report` puts all that was
measured into `results/e_correction.json`, which has maps of lower rank from before, too: on no real
pair did one explain as much.

The measures: KL and total variation (TV) of the receiver's next tokens to full prefill's, along
full prefill's answers; F1 of the decoded answers. Means over a context's questions. Differences are
paired by context, with 95 % intervals by the bootstrap over contexts. All in float32 on one thread.

Physics: one recomputed layer takes about 12 hidden² products a token (Llama's sizes), a map a
twelfth of that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file

from benchmarks.kv_maps import KVMaps
from benchmarks.result import here
from cachetree import Span
from cachetree.corrections import Correction
from profiles.answerers import answerers
from profiles.compute.examination import Answerer, Examination
from profiles.compute.fitting import TRYING, Moments, fit
from profiles.compute.study import THEIRS, DocumentPasses
from profiles.data.documents import Document
from profiles.data.records import Record, write_records
from profiles.profiler import open_pair
from profiles.settings import Settings
from profiles.splits import load_documents
from profiles.stats.gate import interval
from tools.pairs.questions import OPTIONS
from tools.real.check import options

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks/results/e_correction.json"
REAL: Final = options("json")
"""Whatever is asked: by F1, with the longest answers."""
FOR_KV_MAPS: Final = 24
"""Contexts that those are fitted on."""
FEWEST: Final = 8
"""Contexts of which a mean is told."""
TEXT_CHARACTERS: Final = 1_600
ASKED: Final = ("What is this text about?", "Which names are in this text?")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One context: means over its questions, by plan."""

    pair: str
    on: str
    context: int
    tokens: int
    questions: int
    full_prefill: float
    """Its F1."""
    plans: dict[str, dict[str, float]]
    """By plan: KL, TV, and F1 where answers were decoded."""


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
    for flag in ("sender", "receiver"):
        measuring.add_argument(f"--{flag}-lora", type=Path, help="an adapter on it")
    measuring.add_argument("--blocks", required=True)
    measuring.add_argument("--real", action="store_true", help="prompts of the real pairs")
    measuring.add_argument("--no-answers", action="store_true", help="KL and TV alone")
    measuring.add_argument("--contexts", type=int, default=40)
    measuring.add_argument("--seconds", type=float, default=240)
    writing = commands.add_parser("texts")
    writing.add_argument("file", type=Path)
    reporting = commands.add_parser("report")
    for it in (measuring, reporting):
        it.add_argument("--state", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "measure":
        args.state.mkdir(parents=True, exist_ok=True)
        measure(args)
    elif args.command == "texts":
        write_records(texts(), args.file)
    else:
        report(args.state)


def measure(args: argparse.Namespace) -> None:
    """Fit, if that is not done, then context after context."""
    began = time.monotonic()
    settings = Settings(
        sender=args.sender,
        sender_lora=args.sender_lora,
        receiver=args.receiver,
        receiver_lora=args.receiver_lora,
        data=(str(args.fit),),
        **asdict(REAL if args.real else OPTIONS),
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
    both = answerers(pair, [*fitted_on, *documents])
    blocks = [Span(*map(int, it.split(":"))) for it in args.blocks.split(",")]
    bench = Bench(*both, blocks, *_fitted(args, *both, blocks, fitted_on))
    results = args.state / f"{args.name}.{args.on.stem}.jsonl"
    found = _read(results)
    with results.open("ab") as file:
        for index, document in enumerate(documents[: args.contexts]):
            if index in {it.context for it in found}:
                continue
            if time.monotonic() - began > args.seconds:
                break
            line = Found(
                pair=args.name,
                on=args.on.stem,
                context=index,
                tokens=len(document.prefix),
                questions=len(document.questions),
                **bench.judge(document, is_answered=not args.no_answers),
            )
            found.append(line)
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
    for name in found[0].plans if found else ():
        means = {of: fmean(it.plans[name][of] for it in found) for of in found[0].plans[name]}
        told = "  ".join(f"{of.upper()} {mean:.4f}" for of, mean in means.items())
        sys.stdout.write(f"{name:24s} {told}\n")
    sys.stdout.write(f"{args.name} {args.on.stem}: {len(found)} contexts, ")
    sys.stdout.write(f"{time.monotonic() - began:.0f} s\n")


def _fitted(
    args: argparse.Namespace,
    sender: Answerer,
    receiver: Answerer,
    blocks: Sequence[Span],
    documents: Sequence[Document],
) -> tuple[dict[str, Correction], KVMaps]:
    """Maps of E by layer, and linear KV maps; from the state where they are there."""
    file, told = args.state / f"{args.name}.maps", args.state / f"{args.name}.fit.json"
    of_kv = args.state / f"{args.name}.kv_maps"
    layers = sorted({it.start for it in blocks} - {0})
    if not told.exists():
        hidden = receiver.model.model.config.hidden_size
        parts = {it: (Moments(hidden), Moments(hidden)) for it in layers}

        def passed() -> Iterator[Any]:
            for index, document in enumerate(documents):
                ids = document.prefix
                both = DocumentPasses(sender.model, receiver.model, ids, layers, layers)
                for layer, them in parts.items():
                    them[index % TRYING == TRYING - 1].add(*both.e_of_both(layer))
                if index < FOR_KV_MAPS:
                    yield both.theirs, both.own

        matrices = KVMaps.fit(receiver.model, passed()).matrices
        save_file({f"{i:03}": it for i, it in enumerate(matrices)}, of_kv)
        fitted = {layer: fit(*both) for layer, both in parts.items()}
        tensors = {
            f"{layer}|{i}": tensor
            for layer, (it, _) in fitted.items()
            for i, tensor in enumerate(it.tensors)
        }
        save_file(tensors, file)
        maps = Maps(
            pair=args.name,
            contexts=len(documents),
            tokens=sum(len(it.prefix) for it in documents),
            layers={layer: _described(*it, parts[layer]) for layer, it in fitted.items()},
        )
        told.write_bytes(msgspec.json.encode(maps))
    found = {str(layer): read_map(file, layer) for layer in layers}
    return found, KVMaps([it for _, it in sorted(load_file(of_kv).items())])


def read_map(file: Path, layer: int) -> Correction:
    """The map of E at a layer, of those that were fitted for a pair."""
    found = load_file(file)
    return Correction(found[f"{layer}|0"], found[f"{layer}|1"])


def _described(it: Correction, explained: float, parts: tuple[Moments, Moments]) -> dict[str, Any]:
    """What kind of a matrix the map adds to the identity."""
    matrix = it.matrix
    values = torch.linalg.svdvals(matrix)
    symmetric = (matrix + matrix.T) / 2
    return {
        "distance": round((parts[0] + parts[1]).distance, 6),
        "explained": {"full": explained},
        "singular_values": [round(float(it), 5) for it in values[:16]],
        "energy_of_16": round(float(values[:16].square().sum() / values.square().sum()), 4),
        "symmetric": round(float(symmetric.square().sum() / matrix.square().sum()), 4),
        "scale": round(float(matrix.diagonal().mean()), 6),
    }


@dataclass(frozen=True)
class Bench:
    """What is measured of every document."""

    sender: Answerer
    receiver: Answerer
    blocks: Sequence[Span]
    maps: Mapping[str, Correction]
    """Of E, by layer."""
    kv_maps: KVMaps

    def judge(self, document: Document, *, is_answered: bool) -> dict[str, Any]:
        """What `Found` has of full prefill and the plans."""
        model = self.receiver.model
        starts = {it.start for it in self.blocks}
        passes = DocumentPasses(self.sender.model, model, document.prefix, starts, (), self.maps)
        sources: list[Any] = [passes.theirs, self.kv_maps(model, passes.theirs)]
        mixtures = {"reuse": (THEIRS,) * model.num_layers, "KV maps": (1,) * model.num_layers}
        for start in sorted(starts):
            of_start = [it for it in self.blocks if it.start == start]
            whole = Span(start, max(it.stop for it in of_start))
            for e_map in ("", str(start)) if start else ("",):
                sources.append(passes.new(whole, e_map))
                for it in of_start:
                    name = f"[{it.start}, {it.stop})" + (" corrected" if e_map else "")
                    new, layers = len(sources) - 1, range(model.num_layers)
                    mixtures[name] = tuple(new if layer in it else THEIRS for layer in layers)
        answers = self.receiver.answer(document, passes.own)
        examination = Examination(self.receiver, document, passes.own, answers)
        scores = examination.examine(sources, list(mixtures.values()), is_decoded=is_answered)
        plans = {
            name: {"kl": fmean(it.kl for it in of), "tv": fmean(it.tv for it in of)}
            for name, of in zip(mixtures, scores, strict=True)
        }
        for plan, of in zip(plans.values(), scores, strict=True) if is_answered else ():
            plan["f1"] = fmean(it.quality for it in of)
        return {"full_prefill": fmean(examination.qualities), "plans": plans}


def texts() -> Iterator[Record]:
    """Pages and code of this repository, in turns."""
    pages, code = (sorted(ROOT.glob(it)) for it in ("docs/*.md", "cachetree/*/*.py"))
    for both in zip(pages, code[:: len(code) // len(pages)], strict=False):
        for context in (it.read_text()[:TEXT_CHARACTERS] for it in both):
            for question in ASKED:
                yield Record(input=question, context=context, answers=(context[:40],))


def report(state: Path) -> None:
    """One JSON file of all pairs and data: what was there stays where it was not done again."""
    told = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"fitted": [], "measured": []}
    run = {"environment": msgspec.to_builtins(here())}
    fits = [msgspec.json.decode(it.read_bytes()) for it in state.glob("*.fit.json")]
    sets = [_told(it) for file in state.glob("*.jsonl") if len(it := _read(file)) >= FEWEST]
    for of, keys, found in (("fitted", ("pair",), fits), ("measured", ("pair", "on"), sets)):
        by_name = {tuple(it[key] for key in keys): it for it in told[of]}
        by_name |= {tuple(it[key] for key in keys): {**it, **run} for it in found}
        told[of] = [by_name[name] for name in sorted(by_name)]
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")


def _told(found: Sequence[Found]) -> dict[str, Any]:
    full, plans = [it.full_prefill for it in found], []
    has_f1 = any("f1" in measures for measures in found[0].plans.values())
    for name, measures in found[0].plans.items():
        plain = name.split(")")[0] + ")"
        plan: dict[str, Any] = {"plan": name}
        for of in measures:
            values = [it.plans[name][of] for it in found]
            plan[of] = round(fmean(values), 6)
            if plain in found[0].plans and name != plain:
                plan[f"{of}_gain"] = _paired(values, [it.plans[plain][of] for it in found])
        if "f1" in measures:
            plan["f1_to_full"] = _paired([it.plans[name]["f1"] for it in found], full)
        plans.append(plan)
    return {
        "pair": found[0].pair,
        "on": found[0].on,
        "contexts": len(found),
        "questions": sum(it.questions for it in found),
        "mean_tokens": round(fmean(it.tokens for it in found)),
        **({"full_prefill": round(fmean(full), 6)} if has_f1 else {}),
        "plans": plans,
    }


def _paired(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Mean difference, and the 95 % interval of it."""
    found = interval([[a - b] for a, b in zip(values, others, strict=True)])
    return [found.mean, found.low, found.high]


def _read(file: Path) -> list[Found]:
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(it, type=Found) for it in lines]


if __name__ == "__main__":
    main()
