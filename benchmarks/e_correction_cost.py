"""What does correcting E add to a prefill of 2,000 tokens, and what does it save?

    python -m benchmarks.e_correction_cost [--documents 9] [--dtype float32]
    python -m benchmarks.e_correction_cost --sender DIR --receiver DIR --data FILE --maps FILE \\
        --corrected 16:24 --plain 6:24 --documents 5

Two real servers. The first command takes randomly initialised models of 12 layers × 768: the
receiver recomputes three layers, [4, 7) from E corrected by a whole matrix, and [5, 8) from E as it
is: as much work, but for the map. The second takes a real pair, the maps of `e_correction.py
measure` (`STATE/NAME.maps`), and two blocks that stay as close to full prefill. Full prefill stands
beside. All are asked in turns about the same documents, for one token each; in float32, after what
both blocks answer has been compared with an oracle. *Processor time* is of the block alone, in this
process: what else runs on the machine counts for little in it.

Physics: a layer takes 12 hidden² products a token and attention beside, the map one hidden²: of
three layers of which the last computes keys and values alone, 4 % at most.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from benchmarks import result
from benchmarks.e_correction import REAL, read_map
from benchmarks.random_servers import profile_of
from benchmarks.relay import (
    Bench,
    Sample,
    Setup,
    asked,
    bench,
    compare_outputs,
    median,
    publish,
    ttft,
)
from cachetree import ModelIdentity, Span, write_profile
from cachetree.checkpoint import read_model_identity
from cachetree.corrections import Correction, write_corrections
from cachetree.planning import BlockQuality
from profiles.compute.layered import LayeredModel
from profiles.compute.models import ModelSource, load_model, load_tokenizer
from profiles.data.datasets import load_sources
from profiles.data.documents import make_documents
from profiles.stats.gate import interval

NUM_SHARED: Final = 2000
NUM_TIMES: Final = 5


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--documents", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    for flag in ("sender", "receiver", "data", "maps"):
        parser.add_argument(f"--{flag}", type=Path)
    parser.add_argument("--corrected", type=_block, default=Span(4, 7))
    parser.add_argument("--plain", type=_block, default=Span(5, 8))
    args = parser.parse_args()
    environment = result.here()
    blocks = {"corrected": args.corrected, "plain": args.plain}
    with tempfile.TemporaryDirectory() as name:
        profile = Path(name) / "pair.json"
        setup = Setup(
            num_shared=NUM_SHARED,
            num_documents=args.documents,
            dtype=args.dtype,
            sends={"capture_layers": [it.start for it in blocks.values()]},
            reads={"profiles": [str(profile)]},
            models=(args.sender, args.receiver) if args.sender else (),
            documents=_documents(args) if args.data else (),
        )

        def prepare(models: Sequence[Path]) -> None:
            _write_profile(models, args.corrected, args.maps, profile)

        with bench(Path(name), setup, prepare) as it:
            publish(it)
            receiver, document = it.receiver.spec.model, it.documents[0]
            correction = _correction(args.corrected, args.maps, read_model_identity(receiver))
            if args.dtype == "float32":
                compare_outputs(it, _named(args.plain), args.plain)
                compare_outputs(
                    it, _named(args.corrected), args.corrected, lambda e: correction(e[0])[None]
                )
            samples = in_turns(it, blocks)
        added = processor_time(receiver, document, args.corrected, correction)
    told: dict[str, Any] = {
        "pair": f"{args.sender.name}_to_{args.receiver.name}" if args.sender else "random weights",
        "tokens": round(fmean(map(len, it.documents[1:]))),
        "processor_time_added": added,
        "dtype": args.dtype,
        "documents": len(samples["plain"]),
        "full prefill": {"ttft_p50_ms": round(median(samples["full prefill"], ttft), 1)},
    }
    for name, block in blocks.items():
        told[name] = {
            "block": [block.start, block.stop],
            "ttft_p50_ms": round(median(samples[name], ttft), 1),
            "recompute_p50_ms": median(samples[name], "recompute_ms"),
        }
    pairs = zip(samples["corrected"], samples["plain"], strict=True)
    ratios = interval([[one.ttft_ms / other.ttft_ms - 1] for one, other in pairs])
    told["ttft_added"] = [ratios.mean, ratios.low, ratios.high]
    rows = result.with_others([told], "pair", environment, args.json)
    result.write("e_correction_cost", {"rows": rows}, environment, args.json)


def _block(literal: str) -> Span:
    return Span(*map(int, literal.split(":")))


def _named(block: Span) -> dict[str, str]:
    return {"block": f"{block.start}:{block.stop}"}


def _documents(args: argparse.Namespace) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(ModelSource(path=args.receiver))
    sources = load_sources([str(args.data)], REAL)
    made = make_documents(sources, tokenizer, page_size=16, max_prompt_tokens=None)
    return [it.prefix for it in made[: args.documents]]


def _write_profile(models: Sequence[Path], block: Span, maps: Path | None, path: Path) -> None:
    """With one plan, whose E a whole matrix corrects."""
    sender, receiver = map(read_model_identity, models)
    it = _correction(block, maps, receiver)
    named = it.named(block.start)
    plan = BlockQuality(start=block.start, stop=block.stop, quality=0.9, e_map=named)
    profile = profile_of(sender, receiver, plan)
    write_profile(profile, path)
    write_corrections(profile, {named.sha256: it}, path)


def _correction(block: Span, maps: Path | None, receiver: ModelIdentity) -> Correction:
    if maps is not None:
        return read_map(maps, block.start)
    hidden, drawn = receiver.hidden_size, torch.Generator().manual_seed(0)
    matrix = torch.randn(hidden, hidden, generator=drawn) / hidden
    return Correction(torch.zeros(hidden), matrix)


@torch.inference_mode()
def processor_time(
    path: Path, document: Sequence[int], block: Span, correction: Correction
) -> dict[str, float]:
    """Shares of the map in a block over a document and in its full prefill, by one thread."""
    torch.set_num_threads(1)
    model = LayeredModel(load_model(ModelSource(path=path)))
    e = model.prefix(document, [block.start]).e[block.start]
    ways = {
        "map": lambda: correction(e[0]),
        "block": lambda: model.recompute(e, block),
        "full prefill": lambda: model.prefix(document, ()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_TIMES):
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name].append(time.process_time() - began)
    least = {name: min(of) for name, of in seconds.items()}
    return {f"of {it}": round(least["map"] / least[it], 5) for it in ("block", "full prefill")}


def in_turns(it: Bench, blocks: Mapping[str, Span]) -> dict[str, list[Sample]]:
    """Each way of every document."""
    ways = {name: _named(span) for name, span in blocks.items()}
    found = asked(it, ways | {"full prefill": {"mode": "off"}})
    for name, of in found.items():
        wanted = ("off" if name == "full prefill" else "reused", name == "corrected")
        for told in (sample.provenance for sample in of):
            assert (told["outcome"], told["e_corrected"]) == wanted, told
    return found


if __name__ == "__main__":
    main()
