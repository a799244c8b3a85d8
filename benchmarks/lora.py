"""What do adapters of one server save when they read one another's context?

    python benchmarks/lora.py [--adapters 1 2 4 8 16] [--rounds 1]

One base of 12 layers × 768 and adapters of rank 8 on q, k, v and o, all random, and one document of
2,000 tokens with a question of each adapter's own. SGLang alone keeps a tree per adapter, so each
of n adapters computes the document. With the extension the first one does, and the others copy its
slots in the pool and recompute three layers, [4, 7), by a made-up profile that passed its gate.

Physics: a full prefill is 12 layers for every token, the block about 2.1 of them (two whole, and K
and V of the third), so at best the second adapter's first token comes 12 / 2.1 = 5.7 times sooner,
less the forward over the question; and of n adapters sent at once the work is 12 + 2.1 (n - 1)
layers in place of 12 n, 3.6 times less for 8. Decoding is the same on both sides.

Contenders take turns on fresh documents. Before times are compared, outputs are: SGLang's answer
with an oracle's full prefill of the merged weights, the extension's with the oracle's same plan;
and in every round the first adapter's answers with each other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import result
import torch
from oracle import Generated, decode, partial_prefill
from random_adapters import write_adapter
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from cachetree import EMPTY_SPAN, Span
from cachetree.checkpoint import ModelIdentity, read_model_identity
from cachetree.planning import PROFILE_VERSION as VERSION
from cachetree.planning import BlockQuality, PairProfile, write_profile
from profiles.compute.models import ModelSource, load_model
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.fleet.servers import Server, ServerSpec, running

NUM_LAYERS = 12
HIDDEN = 768
RANK = 8
BLOCK = BlockQuality(start=4, stop=7, quality=0.9)
NUM_QUESTION = 24
MAX_NEW = 16
ENV = {"OMP_NUM_THREADS": "1"}
CONTENDERS = ALONE, EXTENDED = "SGLang", "extension"
PARTS = ("queued_ms", "load_ms", "recompute_ms", "forward_ms")
console = Console(width=110)


@dataclass(frozen=True)
class Models:
    base: Path
    adapters: Sequence[Path]
    profiles: Path


@dataclass(frozen=True)
class Sizes:
    tokens: int
    page: int

    @property
    def num_shared(self) -> int:
        """Tokens of the document that lie in whole pages."""
        return self.tokens // self.page * self.page

    @property
    def slots(self) -> int:
        """KV slots that one adapter's request takes, in whole pages."""
        return -(-(self.tokens + NUM_QUESTION + MAX_NEW) // self.page) * self.page + self.page


@dataclass(frozen=True)
class Sample:
    """One request."""

    ttft_ms: float
    ids: list[int]
    told: Mapping[str, Any]
    """What the extension says of it; empty without."""


@dataclass(frozen=True)
class Bench:
    servers: Mapping[str, Server]
    names: Sequence[str]
    sizes: Sizes

    def prompts(self, seed: int) -> list[list[int]]:
        """One document with a question of each adapter's own."""
        document = random_prompt(self.sizes.tokens, seed)
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
        (told,) = reply["meta_info"].get("droidspeak", [{}])
        return Sample(1000 * ttft_s, reply["output_ids"], told)

    def sequence(self, who: str, prompts: Sequence[list[int]], max_new: int = 1) -> list[Sample]:
        """One adapter after the other, from an empty cache."""
        self.servers[who].flush()
        pairs = zip(self.names, prompts, strict=True)
        return [self.ask(who, name, tokens, max_new) for name, tokens in pairs]

    def burst(self, who: str, prompts: Sequence[list[int]]) -> tuple[float, list[Sample]]:
        """All at once, from an empty cache; with the seconds until the last one is answered."""
        self.servers[who].flush()
        with ThreadPoolExecutor(len(prompts)) as pool:
            started_s = time.perf_counter()
            asked = [
                pool.submit(self.ask, who, name, tokens, MAX_NEW)
                for name, tokens in zip(self.names, prompts, strict=True)
            ]
            samples = [it.result() for it in asked]
            return time.perf_counter() - started_s, samples


@dataclass(frozen=True)
class Rounds:
    """What was measured with one number of adapters, by contender."""

    later_ms: Mapping[str, list[float]]
    """TTFT of the second adapter to the last in sequence, of all rounds."""
    first_ms: Mapping[str, list[float]]
    burst_ms: Mapping[str, list[float]]
    burst_ttft_ms: Mapping[str, list[float]]
    readers: list[Sample]
    """Requests in sequence that read another adapter's KV."""


def made_up(sender: ModelIdentity, receiver: ModelIdentity, best: BlockQuality) -> PairProfile:
    return PairProfile(
        version=VERSION,
        sender=sender,
        receiver=receiver,
        metric="f1",
        data_sha256="0" * 64,
        num_questions=1,
        sender_quality=0.1,
        full_prefill_quality=0.9,
        full_reuse_quality=0.1,
        tolerance=0.05,
        blocks=(best,),
        recommended=best,
        passed=True,
        reason="made up, of random weights",
    )


def write(folder: Path, num_adapters: int) -> Models:
    """The base, its adapters, and a profile of every ordered pair of them."""
    config = shape("llama", layers=NUM_LAYERS, hidden=HIDDEN, heads=12, kv_heads=12)
    (base,) = write_models(folder, config, ["base"])
    adapters: list[Path] = []
    for seed in range(num_adapters):
        path = folder / f"adapter-{seed}"
        adapters.append(write_adapter(path, base, rank=RANK, std=0.02, seed=seed))
    profiles = folder / "profiles"
    profiles.mkdir()
    models = [read_model_identity(base, None, it) for it in (None, *adapters)]
    for index, (sender, receiver) in enumerate(permutations(models, 2)):
        write_profile(made_up(sender, receiver, BLOCK), profiles / f"{index}.json")
    return Models(base, adapters, profiles)


def options(sizes: Sizes, num_requests: int) -> dict[str, Any]:
    return {
        "device": "cpu",
        "dtype": "float32",
        "page-size": sizes.page,
        "max-total-tokens": (num_requests + 1) * sizes.slots,
        "max-running-requests": max(8, num_requests),
        "chunked-prefill-size": 4096,
        "sleep-on-idle": True,
    }


@contextmanager
def bench(models: Models, sizes: Sizes, count: int) -> Iterator[Bench]:
    """SGLang alone and with the extension, side by side, with the first `count` adapters."""
    adapters = {it.name: it for it in models.adapters[:count]}
    shared = {
        **options(sizes, count),
        "lora-backend": "torch_native",
        "max-lora-rank": RANK,
        "max-loras-per-batch": count,
    }
    alone = ServerSpec(model=models.base, name="alone", options=shared, adapters=adapters)
    extended = ServerSpec(
        model=models.base,
        name="extended",
        options=shared,
        adapters=adapters,
        droidspeak={"profiles": [str(models.profiles)], "host_gb": 0},
    )
    with running(alone, extended, env=ENV) as (one, other):
        yield Bench({ALONE: one, EXTENDED: other}, list(adapters), sizes)


def measure(it: Bench, rounds: int) -> Rounds:
    """Contenders in turns; the first round warms up."""
    found = Rounds(*({it: [] for it in CONTENDERS} for _ in range(4)), readers=[])
    for index in range(rounds + 1):
        turns = CONTENDERS if index % 2 else CONTENDERS[::-1]
        prompts = it.prompts(seed=2 * index)
        sequences = {who: it.sequence(who, prompts) for who in turns}
        require_plan(sequences[EXTENDED])
        assert sequences[ALONE][0].ids == sequences[EXTENDED][0].ids, "full prefills must agree"
        prompts = it.prompts(seed=2 * index + 1)
        bursts = {who: it.burst(who, prompts) for who in turns}
        require_plan(bursts[EXTENDED][1])
        if index == 0:
            continue
        found.readers.extend(sequences[EXTENDED][1:])
        for who in turns:
            seconds, samples = bursts[who]
            found.first_ms[who].append(sequences[who][0].ttft_ms)
            found.later_ms[who].extend(sample.ttft_ms for sample in sequences[who][1:])
            found.burst_ms[who].append(1000 * seconds)
            found.burst_ttft_ms[who].extend(sample.ttft_ms for sample in samples)
    return found


def require_plan(samples: Sequence[Sample]) -> None:
    """One of them computed the document, and the others read it as the profile says."""
    outcomes = sorted(sample.told["outcome"] for sample in samples)
    assert outcomes == ["no_match"] + ["reused"] * (len(samples) - 1), outcomes
    readers = [sample.told for sample in samples if sample.told["outcome"] == "reused"]
    assert all(told["location"] == "pool" for told in readers), readers
    assert all(told["block"] == [BLOCK.start, BLOCK.stop] for told in readers), readers


def compare_outputs(it: Bench, models: Models) -> None:
    """Before times are compared: both contenders against the oracle, on merged weights."""
    prompts = it.prompts(seed=90_000)
    sender, receiver = (
        load_model(
            ModelSource(path=models.base, adapter=adapter),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for adapter in models.adapters[:2]
    )
    shared, tokens = it.sizes.num_shared, prompts[1]
    expected = {
        ALONE: answer(receiver, receiver, tokens, shared, EMPTY_SPAN),
        EXTENDED: answer(receiver, sender, tokens, shared, BLOCK.block),
    }
    for who, wanted in expected.items():
        samples = it.sequence(who, prompts, max_new=MAX_NEW)
        num_sure = next((i for i, gap in enumerate(wanted.margins) if gap < 1e-3), MAX_NEW)
        assert num_sure, "the oracle itself is undecided; take another seed"
        got = samples[1].ids
        assert got[:num_sure] == wanted.ids[:num_sure], (who, got, wanted.ids)
        console.print(f"{who} answers as the oracle: {num_sure} of {MAX_NEW} tokens compared")
    assert expected[ALONE].ids != expected[EXTENDED].ids, "the comparison would notice nothing"


def answer(
    receiver: PreTrainedModel,
    sender: PreTrainedModel,
    tokens: list[int],
    num_shared: int,
    block: Span,
) -> Generated:
    ids = torch.tensor([tokens])
    prefix = partial_prefill(receiver, sender, ids[:, :num_shared], block)
    return decode(receiver, prefix, ids[:, num_shared:], MAX_NEW)


def summarise(found: Rounds, count: int) -> dict[str, Any]:
    summary: dict[str, Any] = {"adapters": count}
    for who in CONTENDERS:
        summary[who] = {
            "first_ttft_ms": spread(found.first_ms[who]),
            "later_ttft_ms": spread(found.later_ms[who]),
            "burst_ms": spread(found.burst_ms[who]),
            "burst_ttft_ms": spread(found.burst_ttft_ms[who]),
        }
    for measure in summary[ALONE]:
        one, other = (summary[who][measure]["median"] for who in CONTENDERS)
        summary[f"{measure}_gain"] = one / other if other else 1.0
    return summary | {
        part: statistics.median([it.told[part] for it in found.readers] or [0.0]) for part in PARTS
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of nothing where there is but one adapter, and so no second one."""
    values = values or [0.0]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_growth(rows: Sequence[Mapping[str, Any]], sizes: Sizes) -> None:
    table = Table(title=f"{sizes.tokens} shared + {NUM_QUESTION} own tokens, ms, medians (min-max)")
    for column in ("adapters", "", "TTFT, 2nd to last", "×", "all at once", "×", "TTFT of these"):
        table.add_column(column, justify="right")
    for row in rows:
        for who in CONTENDERS:
            is_last = who == EXTENDED
            table.add_row(
                "" if is_last else str(row["adapters"]),
                who,
                cell(row[who]["later_ttft_ms"]),
                f"{row['later_ttft_ms_gain']:.2f}" if is_last and row["adapters"] > 1 else "",
                cell(row[who]["burst_ms"]),
                f"{row['burst_ms_gain']:.2f}" if is_last else "",
                cell(row[who]["burst_ttft_ms"]),
            )
    console.print(table)
    for row in rows[-1:]:
        parts = ", ".join(f"{part[:-3]} {row[part]:.0f} ms" for part in PARTS)
        console.print(f"{row['adapters']} adapters, of the extension's TTFT in sequence: {parts}")
        mb = {key: row[f"{key}_bytes_per_adapter"] / 1e6 for key in ("kv", "e")}
        pools = {key: row[f"{key}_pool_bytes"] / 1e6 for key in ("kv", "e")}
        console.print(
            f"each adapter's copy of the document: {mb['kv']:.0f} MB of KV with and without the "
            f"extension, {mb['e']:.1f} MB of E with it; pools: {pools['kv']:.0f} and "
            f"{pools['e']:.0f} MB"
        )


def cell(of: Mapping[str, float]) -> str:
    return f"{of['median']:.0f} ({of['min']:.0f}-{of['max']:.0f})" if of["max"] else ""


def memory(sizes: Sizes, count: int) -> dict[str, int]:
    """Bytes on the device. Every adapter keeps its own KV of the document, with and without."""
    kv_token, e_token = 4 * 2 * NUM_LAYERS * HIDDEN, 4 * HIDDEN  # E at one layer for all pairs.
    num_slots = options(sizes, count)["max-total-tokens"] + sizes.page
    return {
        "kv_bytes_per_token": kv_token,
        "kv_bytes_per_adapter": kv_token * sizes.num_shared,
        "kv_pool_bytes": kv_token * num_slots,
        "e_bytes_per_token": e_token,
        "e_bytes_per_adapter": e_token * sizes.num_shared,
        "e_pool_bytes": e_token * num_slots,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=1, help="measured, after one that warms up")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    environment = result.here()
    torch.set_num_threads(1)
    sizes = Sizes(args.tokens, args.page_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = write(folder, max(args.adapters))
        rows: list[dict[str, Any]] = []
        for count in args.adapters:
            with bench(models, sizes, count) as it:
                if count > 1 and all(row["adapters"] == 1 for row in rows):
                    compare_outputs(it, models)
                found = summarise(measure(it, args.rounds), count)
                rows.append(found | memory(sizes, count))
                console.print(f"{count} adapters: measured")
    print_growth(rows, sizes)
    asked = {it: getattr(args, it) for it in ("tokens", "page_size", "rounds")}
    result.write("lora", asked | {"counts": rows}, environment, args.json)


if __name__ == "__main__":
    main()
