"""How much do adapters of one server save if they read one another's context?

    python -m benchmarks.lora [--adapters 2 4 8 16] [--rounds 1]
    python -m benchmarks.lora --activated 8 [--rounds 2]

There is one base of 12 layers × 768 and adapters of rank 8 on q, k, v and o, all with random
weights. All adapters read one document of 2,000 tokens; each asks its own question. SGLang alone
keeps a radix tree per adapter, so each of n adapters computes the document. With the extension only
the first adapter computes the document. The others copy its slots in the pool and recompute three
layers, [4, 7), by a made-up profile.

Physics: a full prefill computes 12 layers for every token, the block about 2.1 layers (two whole,
and K and V of the third). So the second adapter's first token is at best 12 / 2.1 = 5.7 times
faster, less the forward over the question. If n adapters are sent at once, the work is 12 + 2.1
(n-1) layers in place of 12 n: 3.6 times less for 8. Decoding is the same on both sides.

Contenders take turns on fresh documents. We compare outputs before times. SGLang's answer must
agree with an oracle's full prefill of the merged weights, and the extension's answer with the
oracle's by the same plan. In every round, the first adapter's two answers must be equal.

With `--activated`: how much do n activated adapters (aLoRAs) cost, beside n ordinary adapters? A
batch has slots for `max_loras_per_batch` adapters. With activated adapters, the base needs a slot,
too. With n slots, one of n requests sent at once waits until another has answered; with n + 1 slots
none waits. Nothing is recomputed for an activated adapter, so at best the time to first token is
the question's forward. Answers with n and with n + 1 slots must be equal.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from shutil import copytree
from statistics import median
from typing import Any

import torch

from benchmarks import result
from benchmarks.oracle import generate
from benchmarks.random_adapters import activate, write_adapter
from benchmarks.random_servers import (
    BLOCK,
    ENV,
    HIDDEN,
    NUM_LAYERS,
    PAGE,
    options,
    profile_of,
    rotated,
    write_random,
)
from cachetree import EMPTY_SPAN
from cachetree.checkpoint import read_model_identity, user_cache
from cachetree.planning import BlockQuality, write_profile
from profiles.compute.models import ModelSource, load_model
from profiles.random_models import random_prompt
from sglang_droidspeak.fleet.servers import Server, ServerSpec, running

RANK = 8
QUALITY = BlockQuality(start=BLOCK.start, stop=BLOCK.stop, quality=0.9)
NUM_QUESTION = 24
MAX_NEW = 16
CONTENDERS = ALONE, EXTENDED = "SGLang", "extension"
GAINS = {"later": "later_ttft_ms", "burst": "burst_ms"}
ORDINARY, AS_MANY, ONE_MORE = "ordinary", "activated", "activated, a slot more"
INVOCATION = [7, 8]


@dataclass(frozen=True)
class Models:
    base: Path
    adapters: Sequence[Path]
    profiles: Path


@dataclass(frozen=True)
class Sample:
    ttft_ms: float
    ids: list[int]
    provenance: Mapping[str, Any]
    """Provenance that the extension reports. Empty without the extension."""


@dataclass(frozen=True)
class Bench:
    servers: Mapping[str, Server]
    names: Sequence[str]
    num_tokens: int
    """Number of tokens in the document."""

    def prompts(self, seed: int) -> list[list[int]]:
        """Make each adapter's prompt: one document, an invocation for aLoRAs, and a question."""
        document = [*random_prompt(self.num_tokens, seed), *INVOCATION]
        questions = range(100_000 + 100 * seed, 100_000 + 100 * seed + len(self.names))
        return [[*document, *random_prompt(NUM_QUESTION, it)] for it in questions]

    def ask(self, who: str, name: str, tokens: list[int], max_new: int) -> Sample:
        ttft_s, reply = self.servers[who].stream(
            tokens,
            max_new_tokens=max_new,
            lora_path=name,
            timeout_s=600,
            sampling_params={"ignore_eos": True},
        )
        (provenance,) = reply["meta_info"].get("droidspeak", [{}])
        return Sample(1000 * ttft_s, reply["output_ids"], provenance)

    def sequence(self, who: str, prompts: Sequence[list[int]], max_new: int = 1) -> list[Sample]:
        """Ask with all adapters, one after the other, from an empty cache."""
        self.servers[who].flush()
        pairs = zip(self.names, prompts, strict=True)
        return [self.ask(who, name, tokens, max_new) for name, tokens in pairs]

    def burst(self, who: str, prompts: Sequence[list[int]]) -> tuple[float, list[Sample]]:
        """Ask with all adapters at once, from an empty cache. Also return the seconds until the
        last answer."""
        self.servers[who].flush()
        with ThreadPoolExecutor(len(prompts)) as pool:
            started_s = time.perf_counter()
            asked = [
                pool.submit(self.ask, who, name, tokens, MAX_NEW)
                for name, tokens in zip(self.names, prompts, strict=True)
            ]
            samples = [it.result() for it in asked]
            return time.perf_counter() - started_s, samples


def write(base: Path, num_adapters: int) -> Models:
    """Write adapters beside their base, and a profile of every ordered pair of them."""
    folder = base.parent
    adapters = [
        write_adapter(folder / f"adapter-{seed}", base, rank=RANK, std=0.02, seed=seed)
        for seed in range(num_adapters)
    ]
    profiles = folder / "profiles"
    profiles.mkdir()
    identities = [read_model_identity(base, user_cache(), it) for it in (None, *adapters)]
    for index, pair in enumerate(permutations(identities, 2)):
        profile = profile_of(*pair, QUALITY)
        write_profile(profile, profiles / f"{index}.json")
    return Models(base, adapters, profiles)


def pool_tokens(num_tokens: int, num_requests: int) -> int:
    """Slots that the KV pool needs for the adapters' requests and one more, in whole pages."""
    pages = -(-(num_tokens + NUM_QUESTION + MAX_NEW) // PAGE) + 1
    return (num_requests + 1) * pages * PAGE


def specs(
    models: Models, num_tokens: int, count: int, spec: type[ServerSpec] = ServerSpec, **more: Any
) -> list[ServerSpec]:
    """Specify SGLang alone and with the extension, both with the first `count` adapters. `more` are
    options of SGLang."""
    of_sglang = {
        "max_total_tokens": pool_tokens(num_tokens, count),
        "max_running_requests": max(8, count),
        "lora_backend": "torch_native",
        "max_lora_rank": RANK,
        "max_loras_per_batch": count,
    }
    return [
        spec(
            model=models.base,
            name=name,
            options=options(**of_sglang | more),
            adapters={it.name: it for it in models.adapters[:count]},
            droidspeak=droidspeak,
        )
        for name, droidspeak in (("alone", None), ("extended", settings_of(models)))
    ]


@contextmanager
def bench(
    servers: Sequence[ServerSpec], num_tokens: int, env: Mapping[str, str] = ENV
) -> Iterator[Bench]:
    """Run SGLang alone and with the extension, side by side."""
    with running(*servers, env=env) as running_servers:
        contenders = dict(zip(CONTENDERS, running_servers, strict=True))
        yield Bench(contenders, list(servers[0].adapters), num_tokens)


def settings_of(models: Models) -> dict[str, Any]:
    return {"profiles": [str(models.profiles)], "host_gb": 0}


@contextmanager
def activated_bench(models: Models, num_tokens: int) -> Iterator[Bench]:
    """Run three servers: with ordinary adapters, with activated copies of them, and with these
    copies and one more slot for adapters."""
    ordinary = {it.name: it for it in models.adapters}
    copies = {
        name: activate(Path(copytree(it, it.with_name(f"{name}-activated"))), INVOCATION)
        for name, it in ordinary.items()
    }
    count = len(ordinary)
    contenders = {
        ORDINARY: (ordinary, count),
        AS_MANY: (copies, count),
        ONE_MORE: (copies, count + 1),
    }
    specs = [
        ServerSpec(
            model=models.base,
            name=who.replace(", ", "-").replace(" ", "-"),
            options=options(
                max_total_tokens=pool_tokens(num_tokens, count),
                max_running_requests=max(8, count),
                lora_backend="torch_native",
                max_lora_rank=RANK,
                max_loras_per_batch=num_slots,
                lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            ),
            adapters=adapters,
            droidspeak=settings_of(models),
        )
        for who, (adapters, num_slots) in contenders.items()
    ]
    with running(*specs, env=ENV) as servers:
        yield Bench(dict(zip(contenders, servers, strict=True)), list(ordinary), num_tokens)


def measure_activated(testbed: Bench, rounds: int) -> list[dict[str, Any]]:
    """Measure the servers of `activated_bench` in turns. `last_ttft_ms` is the largest TTFT of a
    burst, in which a request may wait for a slot."""
    times: dict[str, dict[str, list[float]]] = {
        who: {"later_ttft_ms": [], "burst_ms": [], "last_ttft_ms": []} for who in testbed.servers
    }
    for index in range(rounds + 1):
        turns = rotated([*testbed.servers], index)
        one, other = testbed.prompts(seed=2 * index), testbed.prompts(seed=2 * index + 1)
        sequences = {who: testbed.sequence(who, one) for who in turns}
        bursts = {who: testbed.burst(who, other) for who in turns}
        for who in turns:
            outcomes = [
                sample.provenance["outcome"] for sample in (*sequences[who], *bursts[who][1])
            ]
            assert outcomes.count("no_match") == 2, (who, outcomes)
            assert outcomes.count("reused") == len(outcomes) - 2, (who, outcomes)
            if index:
                burst_s, samples = bursts[who]
                times[who]["later_ttft_ms"] += [sample.ttft_ms for sample in sequences[who][1:]]
                times[who]["burst_ms"].append(1000 * burst_s)
                times[who]["last_ttft_ms"].append(max(sample.ttft_ms for sample in samples))
        answers = [[sample.ids for sample in bursts[who][1]] for who in (AS_MANY, ONE_MORE)]
        assert answers[0] == answers[1], "slots must not change answers"
    return [
        {"adapters": who, **{name: median(values) for name, values in of_one.items()}}
        for who, of_one in times.items()
    ]


def measure(testbed: Bench, rounds: int) -> dict[str, Any]:
    """Measure the contenders in turns. Return medians in ms, without the first round."""
    later: dict[str, list[float]] = {who: [] for who in CONTENDERS}
    burst: dict[str, list[float]] = {who: [] for who in CONTENDERS}
    for index in range(rounds + 1):
        turns = rotated(CONTENDERS, index)
        prompts = testbed.prompts(seed=2 * index)
        sequences = {who: testbed.sequence(who, prompts) for who in turns}
        require_plan(sequences[EXTENDED])
        assert sequences[ALONE][0].ids == sequences[EXTENDED][0].ids, "full prefills must agree"
        prompts = testbed.prompts(seed=2 * index + 1)
        bursts = {who: testbed.burst(who, prompts) for who in turns}
        require_plan(bursts[EXTENDED][1])
        for who in turns if index else ():
            later[who] += [sample.ttft_ms for sample in sequences[who][1:]]
            burst[who].append(1000 * bursts[who][0])
    medians: dict[str, Any] = {
        who: {"later_ttft_ms": median(later[who]), "burst_ms": median(burst[who])}
        for who in CONTENDERS
    }
    one, other = (medians[who] for who in CONTENDERS)
    gains = {f"{of}_gain": one[key] / other[key] for of, key in GAINS.items()}
    return {"adapters": len(testbed.names), **medians, **gains}


def require_plan(samples: Sequence[Sample]) -> None:
    """Check that one adapter computed the document, and that all others reused it by the block."""
    outcomes = sorted(sample.provenance["outcome"] for sample in samples)
    assert outcomes == ["no_match"] + ["reused"] * (len(samples) - 1), outcomes
    readers = [sample.provenance for sample in samples if sample.provenance["outcome"] == "reused"]
    assert all(told["location"] == "pool" for told in readers), readers
    assert all(told["block"] == [BLOCK.start, BLOCK.stop] for told in readers), readers


def compare_outputs(testbed: Bench, models: Models) -> None:
    """Compare both contenders' answers with the oracle, which uses merged weights."""
    prompts = testbed.prompts(seed=90_000)
    sender, receiver = (
        load_model(ModelSource(path=models.base, adapter=adapter))
        for adapter in models.adapters[:2]
    )
    ids, num_shared = torch.tensor(prompts[1:2]), testbed.num_tokens // PAGE * PAGE
    asked = (ids[:, :num_shared], ids[:, num_shared:])
    expected = {
        ALONE: generate(receiver, receiver, *asked, EMPTY_SPAN, MAX_NEW),
        EXTENDED: generate(receiver, sender, *asked, BLOCK, MAX_NEW),
    }
    for who, wanted in expected.items():
        samples = testbed.sequence(who, prompts, max_new=MAX_NEW)
        assert wanted.sure, "the oracle itself is undecided; take another seed"
        got = samples[1].ids
        assert got[: len(wanted.sure)] == wanted.sure, (who, got, wanted.ids)
    assert expected[ALONE].ids != expected[EXTENDED].ids, "the comparison would notice nothing"


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--adapters", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=1, help="measured, after one that warms up")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument(
        "--activated", type=int, metavar="N", help="instead: N activated adapters beside N others"
    )
    args = parser.parse_args()
    environment = result.here()
    torch.set_num_threads(1)
    if args.activated is not None:
        with tempfile.TemporaryDirectory() as name:
            (base,) = write_random(Path(name), ["base"])
            models = write(base, args.activated)
            with activated_bench(models, args.tokens) as testbed:
                rows = measure_activated(testbed, args.rounds)
        results = {"tokens": args.tokens, "rounds": args.rounds, "count": args.activated}
        result.write("lora_activated", {**results, "rows": rows}, environment, args.json)
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        (base,) = write_random(Path(name), ["base"])
        models = write(base, max(args.adapters))
        for count in args.adapters:
            with bench(specs(models, args.tokens, count), args.tokens) as testbed:
                if not rows:
                    compare_outputs(testbed, models)
                rows.append(measure(testbed, args.rounds))
    shared = args.tokens // PAGE * PAGE
    results = {
        "tokens": args.tokens,
        "rounds": args.rounds,
        "counts": rows,
        "kv_bytes_per_adapter": 4 * 2 * NUM_LAYERS * HIDDEN * shared,
        "e_bytes_per_adapter": 4 * HIDDEN * shared,  # E of one layer, for all pairs.
    }
    result.write("lora", results, environment, args.json)


if __name__ == "__main__":
    main()
