"""What does the extension cost where nothing is reused, and the drift guard where something is?

    python benchmarks/overhead.py [--rounds 20] [--case peers] [--case ...]
    python benchmarks/overhead.py --case "drift guard" --before CHECKOUT --out FILE

Three servers of one randomly initialised model of 12 layers × 768: SGLang alone, SGLang alone once
more as a control, and SGLang with the extension. The cases:

    peers         keeps E at two layers, stores all KV and watches a peer that has nothing
    no adapters   is on, and there is nothing to share with
    one adapter   serves one LoRA adapter, of which there is no profile
    drift guard   all reuse what a sender has read and recompute [4, 7), without the guard, without
                  it (the control), and with `shadow_rate: 0.05`, after the plan's first twenty
                  comparisons; and without it as the code of CHECKOUT does, where one of a commit
                  before the guard is given

Expected: a hash and a tree walk per request; in the first case one copy of E per kept layer and
token, and a copy of new KV to host memory by another thread; the goal is at most 2 % of TTFT and of
throughput. The guard asks for log-probabilities of one in twenty requests, and compares them once
the server is idle, which is told apart: less than that share of a full prefill of all. The servers
take turns, each first as often as the others, so that all see the same machine; answers are
compared byte by byte, and ratios to the first server are medians over rounds. What the control's
differs from 1 the machine does not resolve.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import result
from random_adapters import write_adapter
from rich.console import Console
from rich.table import Table
from serving_study.rig import FULL, write_profile_of

from cachetree.planning import read_profile, write_profile
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running
from sglang_droidspeak.guard.plans import NUM_FIRST
from sglang_droidspeak.guard.shadows import place_of

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "max-total-tokens": 16384,
    "max-running-requests": 8,
    "sleep-on-idle": True,
}
LORA = {"lora-backend": "torch_native", "max-lora-rank": 8, "max-loras-per-batch": 1}
ADAPTER = "adapter"
BLOCK = FULL.block
GUARD = "drift guard"
CASES = ("peers", "no adapters", "one adapter", GUARD)
SHADOW_RATE = 0.05


@dataclass(frozen=True)
class Load:
    kind: str
    prompts: Sequence[Sequence[int]]
    """Asked all at once."""
    num_new: int


def fresh(seed: int) -> list[Load]:
    many = [random_prompt(64, 1000 * seed + i) for i in range(8)]
    return [Load("ttft", [random_prompt(512, seed)], 1), Load("throughput", many, 32)]


def known(_seed: int) -> list[Load]:
    """What the sender has read."""
    many = [random_prompt(256, 1000 + i) for i in range(8)]
    return [Load("ttft", [random_prompt(512, 0)], 1), Load("throughput", many, 32)]


def answered_s(
    server: Server, load: Load, rids: Sequence[str], **asked: Any
) -> tuple[float, list[list[int]]]:
    server.flush()

    def ask(tokens: Sequence[int], rid: str) -> list[int]:
        forced = {"ignore_eos": True}
        reply = server.generate(
            tokens, max_new_tokens=load.num_new, sampling_params=forced, rid=rid, **asked
        )
        return reply["output_ids"]

    started_s = time.perf_counter()
    with ThreadPoolExecutor(len(rids)) as pool:
        answers = list(pool.map(ask, load.prompts, rids))
    return time.perf_counter() - started_s, answers


class Comparisons:
    """What the drift guard leaves a server to do, after a plan's first answers."""

    def __init__(self) -> None:
        self.num, self.seconds = 0, 0.0

    def settle(self, server: Server, **asked: Any) -> None:
        """All of the first ones are compared; from then on one in twenty is."""
        load = known(0)[0]
        for i in count():
            if num_shadows(server) >= NUM_FIRST:
                return
            answered_s(server, load, [f"first {i}"], **asked)
            time.sleep(2)

    def wait(self, server: Server, rids: Sequence[str]) -> None:
        """Until those of these requests are over; they fit a moment in which nothing else runs."""
        if "guard_path" not in (server.spec.droidspeak or {}):
            return
        started_s, before = time.perf_counter(), self.num
        self.num += sum(place_of(rid) < SHADOW_RATE for rid in rids)
        while self.num > before and num_shadows(server) < NUM_FIRST + self.num:
            time.sleep(0.01)
            assert time.perf_counter() - started_s < 60, "a chosen answer was not compared"
        self.seconds += time.perf_counter() - started_s


def num_shadows(server: Server) -> int:
    (pair,) = server.post("/droidspeak/guard")["pairs"]
    return sum(it["num_shadows"] for it in pair["plans"])


def compare(
    servers: Sequence[Server],
    rounds: int,
    loads: Callable[[int], Sequence[Load]],
    comparisons: Comparisons,
    **asked: Any,
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by what was measured and by server; requests are `asked` so."""
    times: dict[str, dict[str, list[float]]] = {}
    for seed in range(rounds):
        first = seed % len(servers)
        for load in loads(seed):
            rids = [f"{load.kind} {seed} {i}" for i in range(len(load.prompts))]
            answers = []
            for server in (*servers[first:], *servers[:first]):
                seconds, answer = answered_s(server, load, rids, **asked)
                comparisons.wait(server, rids)
                answers.append(answer)
                of = times.setdefault(load.kind, {})
                of.setdefault(server.spec.name, []).append(seconds)
            assert all(it == answers[0] for it in answers), "answers must be identical"
    return times


def report(
    console: Console, title: str, times: Mapping[str, Mapping[str, Sequence[float]]]
) -> dict[str, Any]:
    """Ratios to the first server, of all rounds but the first."""
    table = Table(title=title)
    for column in ("measure", "median", "p25", "p75", "all rounds"):
        table.add_column(column)
    summary = {}
    for kind, of in times.items():
        _, *plain = of["plain"]
        for name, (_, *seconds) in of.items():
            if name != "plain":
                pairs = zip(seconds, plain, strict=True)
                low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
                total = sum(seconds) / sum(plain)
                found = {"median": middle, "p25": low, "p75": high, "total": total}
                summary[f"{kind}, {name}"] = {**found, "rounds": len(seconds)}
                table.add_row(f"{kind}, {name}", *(f"{it:.4f}" for it in found.values()))
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


def specs_of_guard(folder: Path, before: Path | None) -> list[ServerSpec]:
    """A sender, and receivers of its KV with the guard and without."""
    config = shape("llama", layers=12, hidden=768, heads=12, kv_heads=12)
    sender, receiver = write_models(folder, config, ["sender", "receiver"])
    profile = write_profile_of(sender, receiver, FULL)
    found = read_profile(profile)
    # Of random weights no answer is like full prefill's; the guard is to see a pair that is well.
    blocks = tuple(msgspec.structs.replace(it, tv_bound=10.0) for it in found.blocks)
    write_profile(msgspec.structs.replace(found, blocks=blocks), profile)
    at = f"tcp://127.0.0.1:{free_port()}"
    sends = {"listen": at, "capture_layers": [BLOCK[0]], "host_gb": 0.5}
    reads = {"peers": [at], "profiles": [str(profile)], "host_gb": 0, "fetch_deadline_s": 60}
    guard = {"shadow_rate": SHADOW_RATE, "guard_path": str(folder / "guard.json")}
    paths = () if before is None else (before, before / "platforms/torch_cpu")
    old = ("env", f"PYTHONPATH={os.pathsep.join(str(it.resolve()) for it in paths)}")
    options = {**OPTIONS, "max-total-tokens": 4096}
    return [
        ServerSpec(name=name, model=model, options=options, droidspeak=settings, wrapper=wrapper)
        for name, model, settings, wrapper in (
            ("sender", sender, sends, ()),
            ("plain", receiver, reads, ()),
            ("control", receiver, reads, ()),
            *[("before", receiver, reads, old)] * bool(paths),
            ("watched", receiver, reads | guard, ()),
        )
    ]


def read(sender: Server, receivers: Sequence[Server], **asked: Any) -> None:
    """Have the sender read what is known, and each receiver reuse all of it once."""
    prompts = [tokens for load in known(0) for tokens in load.prompts]
    for tokens in prompts:
        sender.generate(tokens, max_new_tokens=1)
    for server in receivers:
        for tokens in prompts:
            for _ in range(100):
                # By an id that is not chosen.
                reply = server.generate(tokens, max_new_tokens=1, rid="known", **asked)
                meta = reply["meta_info"]
                if meta["droidspeak"][0]["outcome"] == "reused":
                    break
                time.sleep(0.1)
            else:
                raise AssertionError(f"{server.spec.name} reuses nothing: {meta['droidspeak']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--before", type=Path, help="a checkout of a commit before the drift guard")
    parser.add_argument("--out", type=Path, help="write the result to this file too")
    args = parser.parse_args()
    environment = result.here()
    console = Console(width=100)
    summary: dict[str, Any] = {}
    for case in args.case or CASES:
        comparisons, asked, loads = Comparisons(), {}, fresh
        if case == "one adapter":
            asked = {"lora_path": ADAPTER}
        if case == GUARD:
            asked, loads = {"droidspeak": {"block": f"{BLOCK[0]}:{BLOCK[1]}"}}, known
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made = specs_of_guard(folder, args.before) if case == GUARD else specs(case, folder)
            with running(*made, env={"OMP_NUM_THREADS": "1"}) as servers:
                console.print(f"{case}: {args.rounds} rounds")
                if case == GUARD:
                    sender, *servers = servers
                    read(sender, servers, **asked)
                    comparisons.settle(servers[-1], **asked)
                times = compare(servers, args.rounds, loads, comparisons, **asked)
        found = report(console, f"{case}: time / time of the first server", times)
        if case == GUARD:
            found |= {
                "shadows": comparisons.num,
                "shadows_s": comparisons.seconds,
                "requests": sum(len(load.prompts) for load in known(0)) * args.rounds,
                "plain_s": sum(sum(of["plain"]) for of in times.values()),
            }
        summary[case.replace(" ", "_")] = found
    result.write("overhead", summary, environment, args.out)


if __name__ == "__main__":
    main()
