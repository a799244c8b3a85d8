"""How soon does the drift guard find that documents have changed, and what does it cost until then?

    make real
    python -m benchmarks.guard_drift --json benchmarks/results/guard_drift.json

The shipped small pair and a real pair run on servers, by the plans that their profiles recommend.
Each receiver first reads documents of its own task that its profile does not know. Then it reads
documents of another task (the real pair: other questions about the same documents). Last it reads
its own documents from KV that the sender keeps as int4. Every answer is compared with an exact run.
So we know the guard's distances for a pair that still fits its profile, and for a pair that does
not. The questions of the small pair's own task are asked once more, at temperature 1. This must not
change the distances, because the guard compares greedy runs of its own.

Then we simulate 300 reused requests a day. The guard's own code compares some of them, at its
default rate and with the profile's bound. Each comparison draws one of these distances:

    found      reused requests until the alarm, if documents change at the first request, and if
               they change after 1,000
    healthy    share of 20,000 healthy requests that is compared, and runs with an alarm
    clustered  runs of 30 days with an alarm, if all documents above the bound follow each other
               once a day, at a random time: no proof covers this order
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks import result
from cachetree.planning import BlockQuality, PlanId, read_profile, write_profile
from profiles.compute.models import ModelSource, load_tokenizer
from profiles.data.datasets import load_sources
from profiles.data.documents import make_documents
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running
from sglang_droidspeak.guard.plans import NOISE, Shadow, WatchedPair, after, watched
from tools.pairs.questions import QUESTIONS_PER_DOCUMENT, make_records
from tools.real.check import options

ROOT = Path(__file__).resolve().parents[1]
RATE = 0.05
NUM_BEFORE = 1_000
"""Healthy requests before the documents change."""
NUM_HEALTHY = 20_000
PER_DAY = 300
NUM_DAYS = 30
NUM_CLUSTERED = 200
"""Number of simulated runs of `NUM_DAYS` days."""
NUM_RUNS = 500
NUM_SMALL = 300
"""Number of questions for the small pair in each task, each about another document."""
REAL_SET = "verify"
"""Data set of `tools.real`, with three questions about each document."""
GOAL = 200
NUM_TRIES = 5
PUBLISH = {"publish": "before_reply"}


@dataclass(frozen=True)
class Prompt:
    prefix: Sequence[int]
    """Tokens that the sender has read."""
    tokens: Sequence[int]


@dataclass(frozen=True)
class Pair:
    name: str
    sender: Path
    receiver: Path
    profile: Path
    tasks: Sequence[str]
    """Tasks; the pair's own task is first."""
    prompts: Callable[[str], list[Prompt]]

    @property
    def plan(self) -> BlockQuality:
        """Plan that the profile of the pair recommends."""
        plan = read_profile(self.profile).recommended
        assert plan is not None
        return plan

    @property
    def service(self) -> tuple[PlanId, WatchedPair]:
        """The recommended plan's id, and the guard's state of the pair when a server starts."""
        profile, plan = read_profile(self.profile), self.plan
        models = profile.sender.model_id, profile.receiver.model_id
        block = plan.start, plan.stop
        return PlanId(*models, block, plan.e_map is not None), watched(profile)


def small_prompts(task: str) -> list[Prompt]:
    tokenizer = load_tokenizer(ModelSource(path=SMALL.receiver))
    records = make_records("fresh", seed=77, num_wanted=NUM_SMALL, task=task)
    texts = [f"<bos> {it.context} {it.input}" for it in records[::QUESTIONS_PER_DOCUMENT]]
    ids = [tokenizer.encode(it, add_special_tokens=False) for it in texts]
    return [Prompt(it, it) for it in ids]


def real_prompts(task: str) -> list[Prompt]:
    file = ROOT / f"build/real/data/{task}/{REAL_SET}.jsonl"
    sources = load_sources([str(file)], options(task))
    tokenizer = load_tokenizer(ModelSource(path=REAL.receiver))
    documents = make_documents(sources, tokenizer, page_size=16, max_prompt_tokens=None)
    return [
        Prompt(it.prefix, [*it.prefix, *one.suffix]) for it in documents for one in it.questions
    ]


_WEIGHTS = ROOT / "examples/pairs/weights"
_MADE = ROOT / "build/real"
SMALL = Pair(
    "small pair",
    _WEIGHTS / "sender",
    _WEIGHTS / "receiver",
    ROOT / "examples/pairs/sender_to_receiver.json",
    ("biographies", "code"),
    small_prompts,
)
REAL = Pair(
    "base to questions",
    _MADE / "base",
    _MADE / "merged/questions",
    ROOT / "examples/real/base_to_questions.json",
    ("questions", "json", "summaries"),
    real_prompts,
)


def measured(
    pair: Pair, folder: Path, tasks: Sequence[str], temperature: float, **of_both: str
) -> Iterator[tuple[str, list[float]]]:
    """Yield each task with the distances of its answers from exact runs."""
    profile, plan = read_profile(pair.profile), pair.plan
    # No observation may raise an alarm.
    tolerant = tuple(msgspec.structs.replace(it, tv_bound=1.0) for it in profile.blocks)
    write_profile(
        msgspec.structs.replace(
            profile, blocks=tolerant, recommended=tolerant[profile.blocks.index(plan)]
        ),
        folder / pair.profile.name,
    )
    for maps in pair.profile.parent.glob(f"{pair.profile.stem}.maps.*"):
        (folder / maps.name).symlink_to(maps)
    address = f"tcp://127.0.0.1:{free_port()}"
    of_sglang = {"device": "cpu", "dtype": "bfloat16", "max-total-tokens": 16384}
    keeps = {"listen": address, "capture_layers": [plan.start], "host_gb": 3, **of_both}
    reads = {
        "peers": [address],
        "profiles": [str(folder / pair.profile.name)],
        "guard_path": str(folder / "guard.json"),
        "shadow_rate": 1.0,
        "host_gb": 0,
        **of_both,
    }
    specs = [
        ServerSpec(model=pair.sender, name="sender", options=of_sglang, droidspeak=keeps),
        ServerSpec(model=pair.receiver, name="receiver", options=of_sglang, droidspeak=reads),
    ]
    with running(*specs, folder=folder, env={"OMP_NUM_THREADS": "1"}) as (sender, receiver):
        for task in tasks:
            prompts = pair.prompts(task)
            for prefix in {tuple(it.prefix) for it in prompts}:
                sender.generate(prefix, max_new_tokens=1, droidspeak=PUBLISH)
            block = f"{plan.start}:{plan.stop}"
            yield task, list(distances(receiver, prompts, block, temperature))


def distances(
    receiver: Server, prompts: Sequence[Prompt], block: str, temperature: float
) -> Iterator[float]:
    """Ask all prompts, and yield the distance of each answer. Each request names the block: the
    small models are no faster with reuse, so the server would not choose it."""
    num, total = compared(receiver)
    for prompt in prompts:
        reuse(receiver, prompt, block, temperature)
        before, before_total = num, total
        started_s = time.monotonic()
        while num == before:
            assert time.monotonic() - started_s < 60, "an answer was not compared"
            time.sleep(0.01)
            num, total = compared(receiver)
        yield round(max(0.0, total - before_total), 4)


def reuse(receiver: Server, prompt: Prompt, block: str, temperature: float) -> None:
    """Repeat the request until it reuses KV. On a busy machine a load may be too late."""
    for _ in range(NUM_TRIES):
        receiver.flush()
        reply = receiver.generate(
            prompt.tokens,
            max_new_tokens=8,
            droidspeak={"block": block},
            sampling_params={"temperature": temperature},
        )
        (label,) = reply["meta_info"]["droidspeak"]
        if label["outcome"] == "reused":
            return
    raise AssertionError(label)


def compared(receiver: Server) -> tuple[int, float]:
    """Return the number of comparisons so far, and the sum of their distances."""
    (pair,) = receiver.post("/droidspeak/guard")["pairs"]
    total = sum(it["num_shadows"] * it["mean_tv"] for it in pair["plans"])
    return sum(it["num_shadows"] for it in pair["plans"]), total


class Requests:
    """Simulated reused requests, one after the other, by a profile's recommended plan."""

    def __init__(self, pair: Pair, random: Random) -> None:
        self.plan, self.pair = pair.service
        self.num_left = self.pair.num_left
        self.num_asked = self.num_compared = 0
        self._random = random

    def ask(self, distances: Sequence[float]) -> bool:
        """Simulate a request with one of these distances. Return False once the guard has stopped
        the plan."""
        self.num_asked += 1
        if self._random.random() < RATE or self.plan in self.pair.suspects:
            hour = self.num_asked * 24 // PER_DAY
            tv = self._random.choice(distances)
            self.pair = after(self.pair, Shadow(plan=self.plan, tv=tv, hour=hour))
            self.num_compared += 1
        return self.pair.num_left == self.num_left

    def ask_in_clusters(self, distances: Sequence[float]) -> bool:
        """Simulate a day's requests, with all distances above the bound in a row. Return False once
        the guard has stopped the plan."""
        key = self.plan.block, self.plan.e_corrected
        allowed = next(it.allowed for it in self.pair.plans if it.key == key)
        day = self._random.choices(distances, k=PER_DAY)
        easy, hard = ([it for it in day if (it > allowed) == is_hard] for is_hard in (False, True))
        at = self._random.randrange(len(easy) + 1)
        return all(self.ask([it]) for it in (*easy[:at], *hard, *easy[at:]))


def requests_until_alarm(
    pair: Pair, before: Sequence[float], drifted: Sequence[float], seed: int
) -> int:
    """Return the number of drifted requests until the alarm, at most ten times `GOAL`. If there are
    distances `before`, healthy requests with these come first."""
    requests = Requests(pair, Random(seed))
    for _ in range(NUM_BEFORE if before else 0):
        requests.ask(before)
    return next(num for num in count(1) if not requests.ask(drifted) or num == 10 * GOAL)


def of_drifted(
    pair: Pair, healthy: Sequence[float], drifted: Sequence[float], num_runs: int = NUM_RUNS
) -> Iterator[tuple[str, dict[str, float]]]:
    for when, before in (("from the first on", ()), ("after 1,000", healthy)):
        runs = [requests_until_alarm(pair, before, drifted, seed) for seed in range(num_runs)]
        within = sum(it <= GOAL for it in runs) / num_runs
        yield when, {"median": median(runs), "within_200": within}


def of_healthy(pair: Pair, healthy: Sequence[float]) -> dict[str, float]:
    runs = [Requests(pair, Random(seed)) for seed in range(5)]
    in_service = [all(it.ask(healthy) for _ in range(NUM_HEALTHY)) for it in runs]
    share = fmean(it.num_compared for it in runs) / NUM_HEALTHY
    return {"compared": share, "alarms": in_service.count(False), "runs": len(runs)}


def of_clusters(pair: Pair, healthy: Sequence[float]) -> dict[str, float]:
    runs = [Requests(pair, Random(seed)) for seed in range(NUM_CLUSTERED)]
    in_service = [all(it.ask_in_clusters(healthy) for _ in range(NUM_DAYS)) for it in runs]
    return {"alarms": in_service.count(False), "runs": len(runs)}


def rows_of(pair: Pair) -> Iterator[dict[str, Any]]:
    """Measure a pair, and yield a row for each task and setting. The pair's own task is first."""
    own, *others = pair.tasks
    healthy: list[float] = []
    studies = [((own, *others), 0.0, {}), ((own,), 0.0, {"codec": "int4"})]
    if pair is SMALL:
        studies.append(((own,), 1.0, {}))
    for tasks, temperature, of_both in studies:
        with tempfile.TemporaryDirectory() as folder:
            for task, seen in measured(pair, Path(folder), tasks, temperature, **of_both):
                asked = [f"temperature {temperature:g}"] if temperature else []
                row = {
                    "pair": pair.name,
                    "reads": ", ".join([task, *of_both.values(), *asked]),
                    "allowed": (pair.plan.tv_bound or 0.0) + NOISE,
                    "mean": fmean(seen),
                    "distances": seen,
                }
                if healthy and not temperature:
                    yield row | {"found": dict(of_drifted(pair, healthy, seen))}
                else:
                    healthy = healthy or seen
                    alarms = {
                        "healthy": of_healthy(pair, seen),
                        "clustered": of_clusters(pair, seen),
                    }
                    yield row | alarms


def main() -> None:
    args = result.arguments(__doc__).parse_args()
    environment = result.here()
    rows = [row for pair in (SMALL, REAL) for row in rows_of(pair)]
    result.write("guard_drift", {"rate": RATE, "measured": rows}, environment, args.json)


if __name__ == "__main__":
    main()
