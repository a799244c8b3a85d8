"""What does the extension cost a server that finds nothing to reuse?

    python benchmarks/overhead.py [--rounds 30]

Two servers of one randomly initialised model of 12 layers × 768: SGLang alone, and SGLang with the
extension keeping E at two layers, storing all KV and watching a peer that has nothing. Expected: a
hash and a tree walk per request, one copy of E per kept layer and token, and a copy of new KV to
host memory by another thread; the goal is at most 2 % of TTFT and of throughput. Requests alternate
between the servers so that both see the same machine, answers are compared byte by byte first, and
the ratio is the median over pairs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import result
from rich.console import Console
from rich.table import Table

from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.servers import Server, ServerSpec, free_port, running

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "max-total-tokens": 16384,
    "max-running-requests": 8,
    "sleep-on-idle": True,
}


def first_token_s(server: Server, tokens: Sequence[int]) -> tuple[float, list[int]]:
    server.flush()
    started_s = time.perf_counter()
    reply = server.generate(tokens, max_new_tokens=1)
    return time.perf_counter() - started_s, reply["output_ids"]


def throughput_s(server: Server, prompts: Sequence[Sequence[int]]) -> tuple[float, list[list[int]]]:
    """Seconds for a batch of requests of 32 new tokens each, all at once."""
    server.flush()
    started_s = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(
            pool.map(
                lambda tokens: server.generate(
                    tokens, max_new_tokens=32, sampling_params={"ignore_eos": True}
                ),
                prompts,
            )
        )
    return time.perf_counter() - started_s, [reply["output_ids"] for reply in replies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    environment = result.here()
    console = Console()
    ratios: dict[str, list[float]] = {"ttft": [], "throughput": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = shape("llama", layers=12, hidden=768, heads=12, kv_heads=12)
        (model,) = write_models(folder, config, ["model"])
        nobody = f"tcp://127.0.0.1:{free_port()}"
        plain = ServerSpec(model=model, name="plain", options=OPTIONS)
        extended = ServerSpec(
            model=model,
            name="extended",
            options=OPTIONS,
            droidspeak={
                "listen": "tcp://127.0.0.1:0",
                "peers": [nobody],
                "capture_layers": [3, 6],
                "host_gb": 1,
            },
        )
        with (
            console.status("starting two servers"),
            running(plain, extended, env={"OMP_NUM_THREADS": "1"}) as servers,
        ):
            console.print(f"{rounds} rounds")
            for seed in range(rounds):
                order = servers if seed % 2 else servers[::-1]
                one = random_prompt(512, seed)
                many = [random_prompt(64, 1000 * seed + i) for i in range(8)]
                for kind, measure, load in (
                    ("ttft", first_token_s, one),
                    ("throughput", throughput_s, many),
                ):
                    found = {server.spec.name: measure(server, load) for server in order}
                    assert found["plain"][1] == found["extended"][1], "answers must be identical"
                    if seed:
                        ratios[kind].append(found["extended"][0] / found["plain"][0])
    table = Table(title="time with the extension / time without, nothing to reuse")
    for column in ("measure", "median", "p25", "p75"):
        table.add_column(column)
    summary = {}
    for kind, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        summary[kind] = {"median": middle, "p25": low, "p75": high, "rounds": len(values)}
        table.add_row(kind, f"{middle:.4f}", f"{low:.4f}", f"{high:.4f}")
    console.print(table)
    result.write("overhead", summary, environment)


if __name__ == "__main__":
    main()
