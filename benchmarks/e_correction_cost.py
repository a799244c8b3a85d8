"""What does correcting E add to a prefill of 2,000 tokens?

    python benchmarks/e_correction_cost.py [--documents 9] [--dtype float32]

Two real servers with randomly initialised models of 12 layers × 768. The receiver recomputes three
layers over a document: [4, 7) from E corrected by a whole matrix, and, asked in turns of the same
documents, [5, 8) from E as it is: as much work, but for the map.

Physics: a layer takes 12 hidden² products a token and attention beside, the map one hidden²: of
three layers of which the last computes keys and values alone, 4 % at most.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import result
import torch
from relay import HIDDEN, Bench, Sample, Setup, bench, median, publish, ttft

from cachetree import Span, write_profile
from cachetree.checkpoint import read_model_identity
from cachetree.corrections import Correction, write_corrections
from cachetree.planning import PROFILE_VERSION, BlockQuality, PairProfile
from profiles.stats import interval

RESULTS: Final = Path(__file__).resolve().parent / "results" / "e_correction_cost.json"
CORRECTED, PLAIN = Span(4, 7), Span(5, 8)
NUM_SHARED: Final = 2000


def write_maps(models: list[Path], path: Path) -> None:
    """A profile of the two with one plan, whose E a whole matrix corrects."""
    sender, receiver = map(read_model_identity, models)
    drawn = torch.Generator().manual_seed(0)
    matrix = torch.randn(HIDDEN, HIDDEN, generator=drawn) / HIDDEN
    it = Correction(torch.zeros(HIDDEN), (matrix,))
    named = it.named(CORRECTED.start)
    plan = BlockQuality(start=CORRECTED.start, stop=CORRECTED.stop, quality=0.9, e_map=named)
    profile = PairProfile(
        version=PROFILE_VERSION,
        sender=sender,
        receiver=receiver,
        metric="f1",
        data_sha256="0" * 64,
        num_questions=1,
        sender_quality=0.1,
        full_prefill_quality=0.9,
        full_reuse_quality=0.1,
        tolerance=0.05,
        blocks=(plan,),
        recommended=plan,
        passed=True,
        reason="made up for a benchmark",
    )
    write_profile(profile, path)
    write_corrections(profile, {named.sha256: it}, path)


def asked(it: Bench) -> dict[str, list[Sample]]:
    """Both blocks of every document, each first on every other one; the first document warms up."""
    found: dict[str, list[Sample]] = {"corrected": [], "plain": []}
    for document in range(len(it.documents)):
        blocks = {"corrected": CORRECTED, "plain": PLAIN}
        for name in sorted(blocks, reverse=bool(document % 2)):
            block = blocks[name]
            sample = it.ask(document, {"block": f"{block.start}:{block.stop}"})
            told = sample.provenance
            assert (told["outcome"], told["e_corrected"]) == ("reused", name == "corrected"), told
            if document:
                found[name].append(sample)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    environment = result.here()
    with tempfile.TemporaryDirectory() as name:
        profile = Path(name) / "pair.json"
        setup = Setup(
            num_shared=NUM_SHARED,
            num_documents=args.documents,
            dtype=args.dtype,
            sends={"capture_layers": [CORRECTED.start, PLAIN.start]},
            reads={"profiles": [str(profile)], "e_correction": "profile"},
        )
        with bench(Path(name), setup, lambda models: write_maps(models, profile)) as it:
            publish(it)
            samples = asked(it)
    told: dict[str, Any] = {"tokens": NUM_SHARED, "dtype": args.dtype}
    told["documents"] = len(samples["plain"])
    for name, of in samples.items():
        recompute_ms = median(of, lambda it: it.provenance["recompute_ms"])
        told[name] = {"ttft_p50_ms": round(median(of, ttft), 1), "recompute_p50_ms": recompute_ms}
    pairs = list(zip(samples["corrected"], samples["plain"], strict=True))
    ratios = interval([[one.ttft_ms / other.ttft_ms - 1] for one, other in pairs])
    told["ttft_added"] = [ratios.mean, ratios.low, ratios.high]
    RESULTS.write_text(
        json.dumps(told | {"environment": msgspec.to_builtins(environment)}, indent=1) + "\n"
    )
    result.write("e_correction_cost", told, environment)


if __name__ == "__main__":
    main()
