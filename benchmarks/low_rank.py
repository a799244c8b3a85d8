"""What does a refreshed layer cost in low rank, where sender and receiver are adapters on one base?

    OMP_NUM_THREADS=1 python benchmarks/low_rank.py [--num-tokens 2048] [--rank 16] [--json FILE]

Physics, per token, for K and V of d x w each and adapters of rank r:

    projection    2 d w products                 reads E (d numbers) and both matrices
    low rank      2 (d + w) 2r products          reads E and the factors; adds to the sender's KV
    shared A      2 w r products                 reads A x (2 r numbers) alone

At d = 4096, w = 1024 and r = 16 that is 26 and 256 times fewer products; what is left is memory
traffic: KV is read and written once. The rotation is the same in all three. Results are compared
with the projection before anything is timed; contenders take turns, medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import result
import torch
from low_rank_factors import Factors, by_head, change, refresh, rotated
from rich.console import Console
from rich.table import Table
from torch import Tensor

from profiles.compute import KV

SHAPES = {"12 x 768": (768, 12, 64), "Llama 3 8B": (4096, 8, 128)}
"""Hidden size, KV heads, head_dim."""
REPEATS = 9
console = Console(width=100)


def measure(
    hidden: int, heads: int, head_dim: int, num_tokens: int, rank: int
) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    rows = heads * head_dim
    x = torch.randn(1, num_tokens, hidden)
    rotary = torch.rand(1, num_tokens, head_dim), torch.rand(1, num_tokens, head_dim)
    bases = [torch.randn(rows, hidden) / hidden**0.5 for _ in range(2)]
    shared = [torch.randn(rank, hidden) / hidden**0.5 for _ in range(2)]

    def adapter(a: Tensor) -> Factors:
        return Factors(a, torch.randn(rows, rank) / rank**0.5)

    like = torch.empty(1, heads, num_tokens, head_dim)

    def kv(matrices: list[Tensor]) -> KV:
        k, v = (by_head(x @ it.T, like) for it in matrices)
        return rotated(k, *rotary), v.contiguous()

    def contenders(same_a: bool) -> tuple[KV, KV, list[Factors], list[Tensor]]:
        factors = []
        sent, received = [], []
        for base, a in zip(bases, shared, strict=True):
            theirs, ours = adapter(a), adapter(a if same_a else torch.randn_like(a) / hidden**0.5)
            sent.append(base + theirs.b @ theirs.a)
            received.append(base + ours.b @ ours.a)
            found = change(theirs, ours)
            assert found is not None
            factors.append(found)
        return kv(sent), kv(received), factors, received

    sent, expected, factors, matrices = contenders(same_a=False)
    sent_shared, expected_shared, factors_shared, _ = contenders(same_a=True)
    kept = [it.reduce(x) for it in factors_shared]
    works: dict[str, tuple[Callable[[], KV], KV, float]] = {
        "projection": (lambda: kv(matrices), expected, hidden),
        "low rank": (
            lambda: refresh(sent, *(it.expand(it.reduce(x)) for it in factors), rotary),
            expected,
            hidden,
        ),
        "shared A": (
            lambda: refresh(
                sent_shared,
                *(it.expand(z) for it, z in zip(factors_shared, kept, strict=True)),
                rotary,
            ),
            expected_shared,
            2 * rank,
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(REPEATS + 1):
        for name, (work, wanted, _) in works.items():
            began = time.perf_counter()
            found = work()
            times[name].append(time.perf_counter() - began)
            if not turn:
                off = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
                assert off < 1e-3, f"{name} is {off} from the projection"
    return {
        name: {"ms": 1e3 * median(times[name][1:]), "kept_bytes_per_token_bf16": 2 * numbers}
        for name, (_, _, numbers) in works.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-tokens", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    environment = result.here()
    table = Table("shape", "way", "time of a layer", "kept per token and layer")
    found = {}
    for shape, sizes in SHAPES.items():
        found[shape] = measure(*sizes, args.num_tokens, args.rank)
        for name, it in found[shape].items():
            kept = f"{it['kept_bytes_per_token_bf16']:,.0f} bytes"
            table.add_row(shape, name, f"{it['ms']:.2f} ms", kept)
    console.print(table)
    settings = {
        "num_tokens": args.num_tokens,
        "rank": args.rank,
        "threads": torch.get_num_threads(),
    }
    result.write("low_rank", {**settings, "shapes": found}, environment, args.json)


if __name__ == "__main__":
    main()
