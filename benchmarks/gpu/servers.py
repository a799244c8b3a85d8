"""Real servers on this device: their answers beside the oracle's, and their time to first token."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import is_rehearsal
from benchmarks.gpu.random_weights import plugin_environment, write_seeded
from cachetree import Span
from profiles.random_models import random_prompt, shape
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.1
"""Largest difference of log-probabilities that rounding in bfloat16 may cause."""
PAGE = 64
REPEATS = 3
_TOLD = re.compile(r"(PASSED|FAILED|SKIPPED|ERROR) \S+::(\S+)")
"""Pattern of one test's outcome in the output of pytest-xdist."""
_AT_ONCE = 4
"""Number of test cases that run at once, each with two small servers. Most of their time is the
servers' start."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of models, of prompts, and of runs under load."""

    hidden: int
    heads: int
    kv_heads: int
    wide: int
    """Width of a layer's MLP."""
    layers: int
    block: Span
    """Layers that are recomputed. Below them the models are equal, so an answer with reuse has to
    equal full prefill's."""
    lengths: Sequence[int]
    """Lengths in tokens of the prompts for which the time to the first token is measured."""
    num_documents: int
    document_tokens: int
    run_s: float
    """Seconds of arrivals at one rate."""
    host_gb: int
    """GB of each of two memories: the sender's cache, which holds all documents, and the receiver's
    staging memory."""
    options: Mapping[str, Any]
    """Options of SGLang."""

    def config(self, layers: int) -> Any:
        sizes = {"hidden": self.hidden, "heads": self.heads, "kv_heads": self.kv_heads}
        config = shape("llama", layers=layers, **sizes)
        config.intermediate_size, config.max_position_embeddings = self.wide, 1 << 16
        return config


ON_DEVICE = Scale(
    hidden=4096,
    heads=32,
    kv_heads=8,
    wide=14336,
    layers=32,
    block=Span(24, 32),
    lengths=(2_000, 10_000, 40_000),
    num_documents=32,
    document_tokens=2048,
    run_s=7,
    host_gb=10,
    options={"mem-fraction-static": 0.4, "dtype": "bfloat16"},
)
"""Sizes for a GPU: an 8B model of random weights, a quarter of it recomputed."""
REHEARSED = Scale(
    hidden=256,
    heads=4,
    kv_heads=2,
    wide=512,
    layers=4,
    block=Span(3, 4),
    lengths=(200, 400),
    num_documents=6,
    document_tokens=256,
    run_s=2,
    host_gb=1,
    options={"device": "cpu", "dtype": "float32"},
)
"""Sizes for a rehearsal on a machine without a GPU. The times mean nothing."""


def scale() -> Scale:
    return REHEARSED if is_rehearsal() else ON_DEVICE


class SizedServer(ServerSpec):
    """A server that states its KV pool's size, and so may start at the same time as others."""

    def is_on_gpu(self, _env: Mapping[str, str]) -> bool:
        return False


def ttft(_num_tokens: int) -> Iterator[dict[str, Any]]:
    """Measure milliseconds to the first token: by full prefill, by SGLang's radix cache, and with
    the block recomputed."""
    at = scale()
    with running_pair(at) as (sender, receiver):
        yield from measured(sender, receiver, at)


@contextmanager
def running_pair(at: Scale, **more: Any) -> Iterator[Sequence[Server]]:
    """Run the two servers of `pair` on this device, with random weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = ("sender", "receiver")
        paths = write_seeded(folder, at.config(at.layers), names, at.block.start)
        with running(*pair(paths, at, **more), folder=folder / "logs", env=env(folder)) as servers:
            yield servers


def env(folder: Path) -> dict[str, str]:
    """Environment of servers that make their weights on their device."""
    return plugin_environment(folder / "plugin", os.environ.get("PYTHONPATH", str(ROOT)))


def pair(paths: Sequence[Path], at: Scale, **more: Any) -> list[ServerSpec]:
    """Return the specs of a sender and of a receiver that reads from it. `paths` are their
    checkpoints. `more` has further SGLang options of the receiver."""
    options = {"page-size": PAGE, "max-running-requests": 8, **at.options}
    options["max-total-tokens"] = 2 * max(at.lengths) + 64 * PAGE
    address = f"tcp://127.0.0.1:{free_port()}"
    sends = {"listen": address, "capture_layers": [at.block.start], "host_gb": at.host_gb}
    reads = {"peers": [address], "gate": "none", "host_gb": 0, "staging_gb": at.host_gb}
    reads["max_recompute_tokens"] = max(*at.lengths, at.document_tokens)
    return [
        SizedServer(model=path, name=name, options=options | extra, droidspeak=settings)
        for path, name, extra, settings in zip(
            paths, ("sender", "receiver"), ({}, more), (sends, reads), strict=True
        )
    ]


def measured(sender: Server, receiver: Server, at: Scale) -> Iterator[dict[str, Any]]:
    """Measure full prefill, radix cache and reuse in turns. The first request of each length warms
    up. Raises RuntimeError if an answer with reuse differs from full prefill's."""
    results: dict[str, Any] = {"layers": at.layers, "recomputed": len(at.block)}
    for length in at.lengths:
        times: dict[str, list[float]] = {"full": [], "radix": [], "reused": []}
        for repeat in range(REPEATS + 1):
            tokens = random_prompt(length, seed=repeat)
            sender.generate(tokens, max_new_tokens=1)
            receiver.flush()
            firsts = []
            for name in ("full", "radix"):  # The full prefill leaves its KV in SGLang's cache.
                first = _first_token(receiver, tokens, {"mode": "off"})
                times[name].append(first.ms)
                firsts.append(first)
            first = reused(receiver, tokens, at.block)
            times["reused"].append(first.ms)
            firsts.append(first)
            off = max(abs(it.logprob - firsts[0].logprob) for it in firsts)
            results[f"{length}_logprob_off"] = max(
                round(off, 4), results.get(f"{length}_logprob_off", 0.0)
            )
            if off > TOLERANCE:
                raise RuntimeError(f"of {length} tokens: log-probabilities differ: {firsts}")
        medians = {name: statistics.median(it[1:]) for name, it in times.items()}
        results |= {f"{length}_{name}_ms": round(ms, 2) for name, ms in medians.items()}
        results[f"{length}_speedup"] = round(medians["full"] / medians["reused"], 3)
        yield results


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    ms: float
    logprob: float
    """Log-probability of the greedy token."""
    outcome: str
    reused_tokens: int


def _first_token(server: Server, tokens: Sequence[int], control: Mapping[str, str]) -> FirstToken:
    started_s = time.perf_counter()
    reply = server.generate(tokens, max_new_tokens=1, droidspeak=control, return_logprob=True)
    took_s = time.perf_counter() - started_s
    meta_info = reply["meta_info"]
    (provenance,) = meta_info["droidspeak"]
    return FirstToken(
        ms=1000 * took_s,
        logprob=meta_info["output_token_logprobs"][0][0],
        outcome=provenance["outcome"],
        reused_tokens=provenance["reused_tokens"],
    )


def control_of(block: Span) -> dict[str, str]:
    return {"block": f"{block.start}:{block.stop}"}


def reused(server: Server, tokens: Sequence[int], block: Span) -> FirstToken:
    """Repeat the request until it reuses all pages that it can. Return that answer."""
    num_reusable = (len(tokens) - 1) // PAGE * PAGE
    deadline = time.monotonic() + 20
    while True:
        server.flush()
        first = _first_token(server, tokens, control_of(block))
        if (first.outcome, first.reused_tokens) == ("reused", num_reusable):
            return first
        if time.monotonic() > deadline:
            raise RuntimeError(f"of {len(tokens)} tokens: {first}, and not {num_reusable} reused")
        time.sleep(0.1)


def oracle(selection: str) -> Iterator[dict[str, Any]]:
    """Run `tests/gpu` under pytest, and yield the outcome of each test so far."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", selection]
    command += ["-n", str(_AT_ONCE), "--dist", "loadgroup"]
    with subprocess.Popen(
        [*command, "tests/gpu"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield from outcomes(process.stdout)
    if process.returncode:
        raise RuntimeError(f"pytest ended with {process.returncode}")


def outcomes(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    outcome_of: dict[str, Any] = {}
    for line in lines:
        sys.stderr.write(line)
        if match := _TOLD.search(line):
            outcome_of[match[2]] = match[1].lower()
            yield outcome_of
