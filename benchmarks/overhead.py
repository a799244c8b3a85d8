"""What does the extension cost a server that finds nothing to reuse?

    python benchmarks/overhead.py [--rounds 20] [--case peers] [--case ...]

Three servers of one randomly initialised model of 12 layers × 768: SGLang alone, SGLang alone once
more as a control, and SGLang with the extension. The cases:

    peers         keeps E at two layers, stores all KV and watches a peer that has nothing
    no adapters   is on, and there is nothing to share with
    one adapter   serves one LoRA adapter, of which there is no profile

Expected: a hash and a tree walk per request; in the first case one copy of E per kept layer and
token, and a copy of new KV to host memory by another thread; the goal is at most 2 % of TTFT and of
throughput. The servers take turns, each first as often as the others, so that all see the same
machine; answers are compared byte by byte, and ratios to SGLang alone are medians over rounds. What
the control's differs from 1 the machine does not resolve.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import result
from random_adapters import write_adapter
from rich.console import Console
from rich.table import Table

from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "max-total-tokens": 16384,
    "max-running-requests": 8,
    "sleep-on-idle": True,
}
LORA = {"lora-backend": "torch_native", "max-lora-rank": 8, "max-loras-per-batch": 1}
ADAPTER = "adapter"
CASES = ("peers", "no adapters", "one adapter")


def first_token_s(server: Server, tokens: Sequence[int], **asked: Any) -> tuple[float, list[int]]:
    server.flush()
    started_s = time.perf_counter()
    reply = server.generate(tokens, max_new_tokens=1, **asked)
    return time.perf_counter() - started_s, reply["output_ids"]


def throughput_s(
    server: Server, prompts: Sequence[Sequence[int]], **asked: Any
) -> tuple[float, list[list[int]]]:
    """Seconds for a batch of requests of 32 new tokens each, all at once."""
    server.flush()
    started_s = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(
            pool.map(
                lambda tokens: server.generate(
                    tokens, max_new_tokens=32, sampling_params={"ignore_eos": True}, **asked
                ),
                prompts,
            )
        )
    return time.perf_counter() - started_s, [reply["output_ids"] for reply in replies]


def compare(servers: Sequence[Server], rounds: int, **asked: Any) -> dict[str, list[float]]:
    """Time of each server but the first by the time of the first, by what was measured and by
    server; requests are `asked` so."""
    plain, *others = servers
    ratios: dict[str, list[float]] = {}
    for seed in range(rounds):
        first = seed % len(servers)
        order = [*servers[first:], *servers[:first]]
        one = random_prompt(512, seed)
        many = [random_prompt(64, 1000 * seed + i) for i in range(8)]
        for kind, measure, load in (
            ("ttft", first_token_s, one),
            ("throughput", throughput_s, many),
        ):
            found = {server: measure(server, load, **asked) for server in order}
            for other in others:
                assert found[plain][1] == found[other][1], "answers must be identical"
                if seed:
                    ratio = found[other][0] / found[plain][0]
                    ratios.setdefault(f"{kind}, {other.spec.name}", []).append(ratio)
    return ratios


def report(console: Console, title: str, ratios: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    table = Table(title=title)
    for column in ("measure", "median", "p25", "p75"):
        table.add_column(column)
    summary = {}
    for kind, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        summary[kind] = {"median": middle, "p25": low, "p75": high, "rounds": len(values)}
        table.add_row(kind, f"{middle:.4f}", f"{low:.4f}", f"{high:.4f}")
    console.print(table)
    return summary


def specs(case: str, folder: Path) -> list[ServerSpec]:
    """SGLang alone, twice, and with the extension."""
    config = shape("llama", layers=12, hidden=768, heads=12, kv_heads=12)
    (model,) = write_models(folder, config, ["model"])
    nobody = f"tcp://127.0.0.1:{free_port()}"
    shared: dict[str, Any] = {"model": model, "options": OPTIONS}
    droidspeak: dict[str, Any] = {"host_gb": 0}
    if case == "peers":
        droidspeak = {
            "listen": "tcp://127.0.0.1:0",
            "peers": [nobody],
            "capture_layers": [3, 6],
            "host_gb": 1,
        }
    if case == "one adapter":
        adapter = write_adapter(folder / ADAPTER, model, rank=8)
        shared |= {"options": {**OPTIONS, **LORA}, "adapters": {ADAPTER: adapter}}
    return [
        ServerSpec(name="plain", **shared),
        ServerSpec(name="control", **shared),
        ServerSpec(name="extended", droidspeak=droidspeak, **shared),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", action="append", choices=CASES)
    args = parser.parse_args()
    environment = result.here()
    console = Console(width=100)
    summary = {}
    for case in args.case or CASES:
        asked = {"lora_path": ADAPTER} if case == "one adapter" else {}
        with (
            tempfile.TemporaryDirectory() as folder,
            running(*specs(case, Path(folder)), env={"OMP_NUM_THREADS": "1"}) as servers,
        ):
            console.print(f"{case}: {args.rounds} rounds")
            ratios = compare(servers, args.rounds, **asked)
        title = f"{case}: time / time of SGLang alone"
        summary[case.replace(" ", "_")] = report(console, title, ratios)
    result.write("overhead", summary, environment)


if __name__ == "__main__":
    main()
