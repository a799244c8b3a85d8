"""What does the extension cost where nothing is reused, and the drift guard where something is?

    python -m benchmarks.overhead [--rounds 20] [--case peers] [--case ...]

Three servers of one randomly initialised model of 12 layers × 768: SGLang alone, SGLang alone once
more as a control, and SGLang with the extension. The cases:

    peers         keeps E at two layers, stores all KV and watches a peer that has nothing
    no adapters   is on, and there is nothing to share with
    one adapter   serves one LoRA adapter, of which there is no profile
    drift guard   all reuse what a sender has read and recompute [4, 7), without the guard, without
                  it (the control), and with `shadow_rate: 0.05`, after the plan's first twenty
                  comparisons

Expected: a hash and a tree walk per request; in the first case one copy of E per kept layer and
token, and a copy of new KV to host memory by another thread; the goal is at most 2 % of TTFT and of
throughput. The guard asks for log-probabilities of one in twenty requests, and compares them once
the server is idle, which is told apart: less than that share of a full prefill of all. The servers
take turns, each first as often as the others, so that all see the same machine; answers are
compared byte by byte, and ratios to the first server are medians over rounds. What the control's
differs from 1 the machine does not resolve.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.random_adapters import write_adapter
from benchmarks.random_servers import BLOCK, ENV, profile_of, rotated, write_random
from cachetree.planning import BlockQuality, write_profile
from profiles.random_models import random_prompt
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
NAMED = {"block": f"{BLOCK.start}:{BLOCK.stop}"}
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
        """Until those of these requests are over; they fit a moment in which nothing else runs.
        The server chooses as this process does, which has started it."""
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
        for load in loads(seed):
            rids = [f"{load.kind} {seed} {i}" for i in range(len(load.prompts))]
            answers = []
            for server in rotated(servers, seed):
                seconds, answer = answered_s(server, load, rids, **asked)
                comparisons.wait(server, rids)
                answers.append(answer)
                of = times.setdefault(load.kind, {})
                of.setdefault(server.spec.name, []).append(seconds)
            assert all(it == answers[0] for it in answers), "answers must be identical"
    return times


def ratios(times: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[dict[str, Any]]:
    """A row for each server but the first: its times by the first one's, of all rounds but the
    first."""
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
    """SGLang alone, twice, and with the extension."""
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


def specs_of_guard(folder: Path) -> list[ServerSpec]:
    """A sender, and receivers of its KV with the guard and without."""
    sender, receiver = write_random(folder, ["sender", "receiver"])
    # Of random weights no answer is like full prefill's; the guard is to see a pair that is well.
    plan = BlockQuality(start=BLOCK.start, stop=BLOCK.stop, quality=0.88, tv_bound=10.0)
    profile = folder / "pair.json"
    write_profile(profile_of(sender, receiver, plan), profile)
    at = f"tcp://127.0.0.1:{free_port()}"
    sends = {"listen": at, "capture_layers": [BLOCK.start], "host_gb": 0.5}
    reads = {"peers": [at], "profiles": [str(profile)], "host_gb": 0, "fetch_deadline_s": 60}
    guard = {"shadow_rate": SHADOW_RATE, "guard_path": str(folder / "guard.json")}
    options = {**OPTIONS, "max-total-tokens": 4096}
    return [
        ServerSpec(name=name, model=model, options=options, droidspeak=settings)
        for name, model, settings in (
            ("sender", sender, sends),
            ("plain", receiver, reads),
            ("control", receiver, reads),
            ("watched", receiver, reads | guard),
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
    parser = result.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", action="append", choices=CASES)
    args = parser.parse_args()
    environment = result.here()
    found: dict[str, Any] = {"rounds": args.rounds - 1, "rows": []}
    for case in args.case or CASES:
        is_guard = case == GUARD
        comparisons, loads = Comparisons(), known if is_guard else fresh
        asked: dict[str, Any] = {"lora_path": ADAPTER} if case == "one adapter" else {}
        asked |= {"droidspeak": NAMED} if is_guard else {}
        with tempfile.TemporaryDirectory() as name:
            made = specs_of_guard(Path(name)) if is_guard else specs(case, Path(name))
            with running(*made, env=ENV) as servers:
                if is_guard:
                    sender, *servers = servers
                    read(sender, servers, **asked)
                    comparisons.settle(servers[-1], **asked)
                times = compare(servers, args.rounds, loads, comparisons, **asked)
        found["rows"] += [{"case": case, **row} for row in ratios(times)]
        if is_guard:
            found["guard"] = {
                "shadows": comparisons.num,
                "shadows_s": comparisons.seconds,
                "requests": sum(len(load.prompts) for load in known(0)) * args.rounds,
                "plain_s": sum(sum(of["plain"]) for of in times.values()),
            }
    result.write("overhead", found, environment, args.json)


if __name__ == "__main__":
    main()
