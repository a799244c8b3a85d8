"""How much does the extension cost if nothing is reused?

    python -m benchmarks.overhead [--rounds 20] [--case peers] [--case ...]

Three servers run one randomly initialised model of 12 layers × 768: SGLang alone, SGLang alone once
more as a control, and SGLang with the extension. The cases for the extension:

    peers         keeps E at two layers, stores all KV and watches a peer that has nothing
    no adapters   is on, and there is nothing to share with
    one adapter   serves one LoRA adapter, without a profile of it

Expected cost: a hash and a tree walk per request. The first case adds one copy of E per kept layer
and token, and another thread copies new KV to host memory. The goal is at most 2 % of TTFT and of
throughput. The servers take turns, each first as often as the others, so that other work on the
machine disturbs all alike. Answers are compared byte by byte. Ratios to the first server are
medians over rounds. The control's ratio should be 1: its distance from 1 is the machine's noise.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.random_adapters import write_adapter
from benchmarks.random_servers import ENV, rotated, write_random
from profiles.random_models import random_prompt
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


@dataclass(frozen=True)
class Load:
    kind: str
    prompts: Sequence[Sequence[int]]
    """Prompts that are sent all at once."""
    num_new: int


def fresh(seed: int) -> list[Load]:
    many = [random_prompt(64, 1000 * seed + i) for i in range(8)]
    return [Load("ttft", [random_prompt(512, seed)], 1), Load("throughput", many, 32)]


def answered_s(server: Server, load: Load, **asked: Any) -> tuple[float, list[list[int]]]:
    server.flush()

    def ask(tokens: Sequence[int]) -> list[int]:
        forced = {"ignore_eos": True}
        reply = server.generate(
            tokens, max_new_tokens=load.num_new, sampling_params=forced, **asked
        )
        return reply["output_ids"]

    started_s = time.perf_counter()
    with ThreadPoolExecutor(len(load.prompts)) as pool:
        answers = list(pool.map(ask, load.prompts))
    return time.perf_counter() - started_s, answers


def compare(
    servers: Sequence[Server], rounds: int, **asked: Any
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round, by measurement and server. `asked` are further arguments of
    the requests."""
    times: dict[str, dict[str, list[float]]] = {}
    for seed in range(rounds):
        for load in fresh(seed):
            answers = []
            for server in rotated(servers, seed):
                seconds, answer = answered_s(server, load, **asked)
                answers.append(answer)
                of = times.setdefault(load.kind, {})
                of.setdefault(server.spec.name, []).append(seconds)
            assert all(it == answers[0] for it in answers), "answers must be identical"
    return times


def ratios(times: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each server except the first. It has the ratios of its times to the first
    server's, over all rounds except the first."""
    _, *others = times["ttft"]
    for name in others:
        row: dict[str, Any] = {"server": name}
        for kind, of in times.items():
            plain, seconds = of["plain"][1:], of[name][1:]
            pairs = zip(seconds, plain, strict=True)
            low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
            total = sum(seconds) / sum(plain)
            row[kind] = {"median": middle, "p25": low, "p75": high, "total": total}
        yield row


def specs(case: str, folder: Path) -> list[ServerSpec]:
    """Describe the servers of a case: SGLang alone, twice, and with the extension."""
    (model,) = write_random(folder, ["model"])
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
    parser = result.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", action="append", choices=CASES)
    args = parser.parse_args()
    environment = result.here()
    results: dict[str, Any] = {"rounds": args.rounds - 1, "rows": []}
    for case in args.case or CASES:
        asked = {"lora_path": ADAPTER} if case == "one adapter" else {}
        with (
            tempfile.TemporaryDirectory() as name,
            running(*specs(case, Path(name)), env=ENV) as servers,
        ):
            times = compare(servers, args.rounds, **asked)
        results["rows"] += [{"case": case, **row} for row in ratios(times)]
    result.write("overhead", results, environment, args.json)


if __name__ == "__main__":
    main()
