"""Should linear maps of the loaded KV become a kind of plan?

    make real
    python -m benchmarks.kv_maps --work build/kv_maps --json benchmarks/results/kv_maps.json

Each layer has one ridge regression, as in arXiv 2608.03893, from the sender's keys and values of
that layer to the receiver's. Keys are mapped without their rotation (RoPE). The first token's KV is
the receiver's own, because its values are on another scale. The profiler's code for maps of E
chooses the penalties.

The profiler judges blocks that begin with corrected E, once over the sender's KV as it is, and once
over its mapped KV. Its gate tries plans from most to least work, on one held-out context after
another, until a plan is proven or hopeless. After a hopeless plan, it tries no plan of less work.
We also measure each plan's distances from full prefill, on pages and code of this repository. A
simulation of the drift guard's own code then says how soon it stops the plan on such text.

Physics, for each token: a map takes (columns of K and V)² products. A layer takes one product per
weight, and its attention. A run that was stopped continues. To reuse an earlier profile's answers
and plans, copy its journal to WORK/SKILL.jsonl.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from msgspec.structs import replace
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import result
from benchmarks.guard_drift import NUM_RUNS, of_drifted
from cachetree import EMPTY_SPAN, Span
from cachetree.corrections import Correction
from cachetree.files import replacing
from cachetree.planning import PlanId
from profiles.answerers import answerers, time_costs
from profiles.compute.fitting import TRYING, Moments, fit, fit_maps
from profiles.compute.journal import Journal, Timed
from profiles.compute.layered import KV, LayeredModel, Prefix
from profiles.compute.measuring import measure, screening_steps
from profiles.compute.study import HELD_OUT, REFERENCES, Bench, DocumentPasses
from profiles.data.records import Record, read_records, write_records
from profiles.environment import ROOT
from profiles.forecast import Forecast
from profiles.profiler import open_pairs
from profiles.settings import Settings
from profiles.splits import load_documents, load_fitted_on, load_splits
from profiles.stats.choice import qualities_of
from profiles.stats.gate import (
    DRIFT_ERROR_RATE,
    MOST_CONTEXTS,
    interval,
    loss_bound,
    mean_bound,
    proven_after,
)
from profiles.stats.measured import NO_BLOCK, Candidate, Score
from profiles.watched import Watched
from sglang_droidspeak.guard.plans import NOISE, WatchedPair, WatchedPlan
from tools.real.check import options

MAPPED: Final = (Span(18, 24), Span(20, 24), Span(22, 24), EMPTY_SPAN)
LOADED: Final = (Span(6, 24), Span(10, 24), Span(12, 24), Span(18, 24), EMPTY_SPAN)
"""Blocks of plans that load KV without a map, from most to least work."""
FOREIGN: Final = "foreign"
NUM_FOREIGN: Final = 16
FOREIGN_CHARACTERS: Final = 1_600
LLAMA_8B: Final = (218_112_000, 4096, 2048)
"""Sizes of one layer of Llama 3.1 8B: weights, hidden size, and columns of K and V."""


class MappedSender(LayeredModel):
    """A sender with mapped KV. At each layer, a map brings the KV closer to the receiver's."""

    def __init__(
        self, sender: LayeredModel, receiver: LayeredModel, maps: Sequence[Correction]
    ) -> None:
        super().__init__(sender.model)
        self._receiver, self._maps = receiver, maps

    def prefix(self, ids: Sequence[int], e_layers: Collection[int]) -> Prefix:
        """Return the sender's KV of a prefix after its map. The first token's KV is the receiver's
        own."""
        theirs, own = super().prefix(ids, e_layers), self._receiver.prefix(ids[:1], ()).kv
        return Prefix(tuple(mapped_kv(self, self._maps, theirs.kv, own)), theirs.e)


def mapped_kv(
    model: LayeredModel, maps: Sequence[Correction], theirs: Sequence[KV], own: Sequence[KV]
) -> Iterator[KV]:
    """Map the sender's KV of a prefix. The first token's KV is the receiver's own."""
    cos, sin = _rotation(model, theirs[0][0].shape[2])
    for rows, first, correction in zip(_rows(model, theirs), own, maps, strict=True):
        keys, values = (
            it.unflatten(1, (first[0].shape[1], -1)).transpose(0, 1)[None]
            for it in correction(rows).chunk(2, 1)
        )
        both = zip(first, (_turned(keys, cos, sin), values), strict=True)
        yield tuple(torch.cat([it[:, :, :1], of[:, :, 1:].to(it.dtype)], 2) for it, of in both)


def fit_kv(
    model: LayeredModel, pairs: Iterable[tuple[Sequence[KV], Sequence[KV]]]
) -> list[Correction]:
    """Fit a map for each layer, from the sender's KV to the receiver's KV of the same documents."""
    columns = model.kv_bytes // model.dtype.itemsize
    sums = [(Moments(columns), Moments(columns)) for _ in range(model.num_layers)]
    for number, pair in enumerate(pairs, start=1):
        rows = (_rows(model, kv) for kv in pair)
        for of_layer, theirs, ours in zip(sums, *rows, strict=True):
            of_layer[number % TRYING == 0].add(theirs[1:], ours[1:])
    return [fit(*it)[0] for it in sums]


def fitted(
    passes: Sequence[DocumentPasses], e_layers: Collection[int], file: Path
) -> tuple[dict[int, Correction], dict[int, Correction]]:
    """Return maps of KV and of E by layer. Read the file, or fit the maps and write it."""
    if not file.exists():
        model = passes[0].receiver
        of_kv = enumerate(fit_kv(model, ((it.theirs, it.own) for it in passes)))
        of_e = fit_maps(passes, sorted(e_layers), model.dtype, model.device).items()
        named = {f"kv.{layer}": it for layer, it in of_kv}
        named |= {f"e.{name.layer}": it for name, it in of_e}
        tensors = {
            f"{name}.{i}": of for name, it in named.items() for i, of in enumerate(it.tensors)
        }
        with replacing(file) as fresh:
            save_file(tensors, fresh)
    maps: dict[str, dict[int, Correction]] = {"kv": {}, "e": {}}
    tensors = load_file(file)
    for kind, layer, _ in (it.split(".") for it in tensors if it.endswith(".0")):
        both = (tensors[f"{kind}.{layer}.{i}"] for i in range(2))
        maps[kind][int(layer)] = Correction(*both)
    return maps["kv"], maps["e"]


def _rows(model: LayeredModel, kv: Sequence[KV]) -> list[Tensor]:
    """Flatten each layer to `[tokens, columns]`: keys without rotation, and values."""
    cos, sin = _rotation(model, kv[0][0].shape[2])
    both = ((_turned(keys.float(), cos, -sin), values.float()) for keys, values in kv)
    return [torch.cat([it[0].transpose(0, 1).flatten(1) for it in kv], 1) for kv in both]


def _rotation(model: LayeredModel, num_tokens: int) -> tuple[Tensor, Tensor]:
    cos, sin = model.model.model.rotary_emb(torch.empty(0), torch.arange(num_tokens)[None])
    return cos[:, None], sin[:, None]


def _turned(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = keys.chunk(2, -1)
    return keys * cos + torch.cat([-second, first], -1) * sin


@dataclass(frozen=True, slots=True)
class InService:
    """One plan in place of a `guard_drift.Pair`, for the simulation of the guard."""

    allowed: float

    @property
    def service(self) -> tuple[PlanId, WatchedPair]:
        plan = WatchedPlan(block=None, e_corrected=False, allowed=self.allowed)
        pair = WatchedPair(sender="", receiver="", profile="", plans=(plan,), num_left=1)
        return PlanId("", "", *plan.key), pair


def work(
    plan: Candidate, num_maps: int, tokens: int, num_layers: int, size: tuple[int, int, int]
) -> float:
    """Return the share of a full prefill's multiplications that a plan takes. A block's last layer
    computes only K and V."""
    weights, hidden, columns = size
    layer, block = weights + tokens * hidden, len(plan)
    products = (block - 1) * layer + hidden * columns if block else 0
    products += hidden**2 if plan.e_map is not None else 0
    products += num_maps * columns**2
    return round(products / (num_layers * layer), 4)


def row(
    full: Sequence[Sequence[float]],
    scores: Sequence[Sequence[Score]],
    foreign: Sequence[Sequence[Score]],
    tolerance: float,
    num_runs: int = NUM_RUNS,
) -> dict[str, Any]:
    """Summarise a plan in a row: the gate's verdict, distances, and how soon the guard stops the
    plan on text of another kind."""
    plan = qualities_of(scores)
    full = full[: len(plan)]
    lost = [[a - b for a, b in zip(*it, strict=True)] for it in zip(full, plan, strict=True)]
    tv, foreign_tv = ([[it.tv for it in context] for context in of] for of in (scores, foreign))
    kl, foreign_kl = ([[it.kl for it in context] for context in of] for of in (scores, foreign))
    allowed = mean_bound(tv, DRIFT_ERROR_RATE) + NOISE
    seen = [*chain(*tv)], [*chain(*foreign_tv)]
    bounds = {"lost": lost, "kl": kl, "foreign_kl": foreign_kl, "foreign_tv": foreign_tv}
    return {
        "contexts": len(plan),
        "full_prefill": fmean(map(fmean, full)),
        "quality": fmean(map(fmean, plan)),
        "loss_bound": loss_bound(full, plan),
        "proven_after": proven_after(full, plan, tolerance),
        **{key: [it.mean, it.low, it.high] for key, of in bounds.items() for it in [interval(of)]},
        "allowed": allowed,
        "found": dict(of_drifted(InService(allowed), *seen, num_runs)),
    }


def texts(records: Sequence[Record]) -> Iterator[Record]:
    """Yield questions of a skill about pages and code of this repository, in turns."""
    pages, code = (sorted(ROOT.glob(it)) for it in ("docs/*.md", "cachetree/*/*.py"))
    files = [*chain(*zip(pages, code[:: len(code) // len(pages)], strict=False))][:NUM_FOREIGN]
    apart = len(records) // NUM_FOREIGN
    for number, file in enumerate(files):
        for record in records[number * apart :][:2]:
            yield replace(record, context=file.read_text()[:FOREIGN_CHARACTERS])


def share_references(one: Journal, other: Journal) -> None:
    """Copy full prefill's answers, which do not depend on a sender, to another journal."""
    for split in (HELD_OUT, FOREIGN):
        for document in one.documents(split):
            entry = one.get(split, document, REFERENCES)
            if other.get(split, document, REFERENCES) is None:
                other.put(entry)


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--real", type=Path, default=ROOT / "build/real")
    parser.add_argument("--skill", default="json", help="adapter that answers from the base's KV")
    parser.add_argument(
        "--sets", nargs=2, default=("choose_mixed", "held_out_mixed"), help="to fit on, to judge on"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build/kv_maps")
    parser.add_argument("--contexts", type=int, default=MOST_CONTEXTS, help="that judge, at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    environment, console = result.here(), Console(stderr=True)
    data, file = args.real / "data" / args.skill, args.work / f"{args.skill}_foreign.jsonl"
    fit_file, held_out_file = (data / f"{it}.jsonl" for it in args.sets)
    settings = Settings(
        sender=args.real / "base",
        receiver=args.real / "base",
        receiver_lora=ROOT / "examples/real" / args.skill,
        data=(str(fit_file),),
        held_out=(str(held_out_file),),
        device="cpu",
        max_memory_gb=5,
        most_contexts=args.contexts,
        timing_seconds=10,
        **asdict(options(args.skill)),
    )
    (pair,) = open_pairs(settings)
    stated = pair.tokenizer, pair.receiver.config.max_position_embeddings
    train, held_out = load_splits(settings, *stated)
    documents, tolerance = held_out.documents[: args.contexts], settings.tolerance
    args.work.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_records(texts(read_records(held_out_file)), file)
    _, foreign = load_documents(settings, [str(file)], *stated)
    sender, receiver = answerers(pair, [*documents, *foreign], *settings.memory_gb)
    models, layers = (sender.model, receiver.model), {it.start for it in (*MAPPED, *LOADED)} - {0}
    documents_of_fit = load_fitted_on(settings, train, held_out, *stated)
    passes = [DocumentPasses(*models, it.prefix, layers, layers) for it in documents_of_fit]
    corrected = "_".join(map(str, sorted(layers)))
    maps_file = args.work / f"{args.skill}_e_{corrected}.maps.safetensors"
    of_kv, of_e = fitted(passes, layers, maps_file)
    del passes
    e_maps = {layer: it.named(layer) for layer, it in of_e.items()}
    corrections = {e_maps[layer].sha256: it for layer, it in of_e.items()}
    kv_maps = [of_kv[layer] for layer in range(pair.num_layers)]
    digest = hashlib.sha256("".join(it.named(0).sha256 for it in kv_maps).encode()).hexdigest()
    loaded = Journal(args.work / f"{args.skill}.jsonl")
    mapped = Journal(args.work / f"{args.skill}_{digest[:16]}.jsonl")
    if loaded.costs is None:
        costs = time_costs(models[1], "receiver", documents, settings, console)
        loaded.put(Timed(costs=costs))
    tokens, num_layers = round(fmean(len(it.prefix) for it in documents)), pair.num_layers
    of_layer = sum(it.numel() for it in models[1].layers[0].parameters())
    own = of_layer, pair.receiver.config.hidden_size, models[1].kv_bytes // models[1].dtype.itemsize
    rows = []
    mapping = dataclasses.replace(sender, model=MappedSender(*models, kv_maps))
    for kv, blocks, sends, journal, other in (
        ("mapped", MAPPED, mapping, mapped, loaded),
        ("loaded", LOADED, sender, loaded, mapped),
    ):
        share_references(other, journal)
        bench = Bench(sender=sends, receiver=receiver, journal=journal, corrections=corrections)
        plans = [
            Candidate(runs=(it,), e_map=e_maps[it.start]) if len(it) else NO_BLOCK for it in blocks
        ]
        watched = Watched(bench, Forecast(loaded.costs, models[1].head_layers), console)
        judged = watched.judge(
            documents, plans, tolerance, min(MOST_CONTEXTS, len(held_out.documents))
        )
        steps = screening_steps(foreign, plans, pruned=False)
        strange = measure(bench, FOREIGN, foreign, steps)
        for block, plan in zip(blocks, plans, strict=True):
            num_maps = (num_layers - len(plan)) * (kv == "mapped")
            rows.append(
                {
                    "pair": f"base to {args.skill}, {tokens} tokens",
                    "plan": f"[{block.start}, {block.stop})" if len(block) else "no block",
                    "kv": kv,
                    "work": work(plan, num_maps, tokens, num_layers, own),
                    "work_8b": work(plan, num_maps, tokens, num_layers, LLAMA_8B),
                    **row(
                        judged.full_prefill,
                        judged.candidates[plan],
                        strange.candidates[plan],
                        tolerance,
                    ),
                }
            )
    rows = result.with_others(rows, "pair", environment, args.json)
    result.write("kv_maps", {"tolerance": tolerance, "rows": rows}, environment, args.json)


if __name__ == "__main__":
    main()
