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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.random_weights import plugin_environment, write_seeded
from cachetree import Span
from profiles.random_models import random_prompt, shape
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running

ROOT = Path(__file__).parents[2]
LAYERS, BLOCK = 32, Span(24, 32)
"""Layers of an 8B model, and the quarter of them that is recomputed. The models are equal below, so
that a reuse has to answer as a full prefill does."""
TOLERANCE = 0.1
"""Largest difference of log-probabilities that kernels of other shapes may cause in bfloat16."""
LENGTHS = (2_000, 10_000, 40_000)
PAGE = 64
REPEATS = 3
_TOLD = re.compile(r"(PASSED|FAILED|SKIPPED|ERROR) \S+::(\S+)")
"""One test's outcome in the output of pytest-xdist."""
_AT_ONCE = 4
"""Cases that run at once, each with two small servers: most of their time is start-up on the
host."""


class SizedServer(ServerSpec):
    """A server that is given the size of its KV pool, so that it can start while others take
    memory."""

    def is_on_gpu(self, _env: Mapping[str, str]) -> bool:
        return False


def ttft(_num_tokens: int) -> Iterator[dict[str, Any]]:
    """Measure milliseconds to the first token: by full prefill, by SGLang's radix cache, and with
    the block recomputed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = shape("llama", layers=LAYERS, hidden=4096, heads=32, kv_heads=8)
        config.intermediate_size, config.max_position_embeddings = 14336, 1 << 16
        paths = write_seeded(folder, config, ("sender", "receiver"), BLOCK.start)
        env = plugin_environment(folder / "plugin", os.environ.get("PYTHONPATH", str(ROOT)))
        with running(*pair(paths), folder=folder / "logs", env=env) as (sender, receiver):
            yield from measured(sender, receiver, LENGTHS)


def pair(paths: Sequence[Path], **more: Any) -> list[ServerSpec]:
    """Specify a server of each model; `more` are options of SGLang."""
    options = {"mem-fraction-static": 0.4, "page-size": PAGE, "max-running-requests": 8}
    options["max-total-tokens"] = 2 * LENGTHS[-1] + 64 * PAGE
    address = f"tcp://127.0.0.1:{free_port()}"
    sends = {"listen": address, "capture_layers": [BLOCK.start], "host_gb": 8}
    reads = {"peers": [address], "gate": "none", "host_gb": 0, "staging_gb": 8}
    reads["max_recompute_tokens"] = LENGTHS[-1]
    names = ("sender", "receiver")
    return [
        SizedServer(model=path, name=name, options=options | more, droidspeak=settings)
        for path, name, settings in zip(paths, names, (sends, reads), strict=True)
    ]


def measured(sender: Server, receiver: Server, lengths: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Measure all ways in turns; the first request of each length warms up. Raises RuntimeError if
    a reuse answers otherwise than the full prefill before it."""
    results: dict[str, Any] = {"layers": LAYERS, "recomputed": len(BLOCK)}
    for length in lengths:
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
            first = _reused(receiver, tokens)
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


def _reused(server: Server, tokens: Sequence[int]) -> FirstToken:
    """Ask until the sender offers all pages that it has read. Returns the last answer."""
    num_reusable = (len(tokens) - 1) // PAGE * PAGE
    deadline = time.monotonic() + 20
    while True:
        server.flush()
        first = _first_token(server, tokens, {"block": f"{BLOCK.start}:{BLOCK.stop}"})
        if (first.outcome, first.reused_tokens) == ("reused", num_reusable):
            return first
        if time.monotonic() > deadline:
            raise RuntimeError(f"of {len(tokens)} tokens: {first}, and not {num_reusable} reused")
        time.sleep(0.1)


def oracle(selection: str) -> Iterator[dict[str, Any]]:
    """Run `tests/gpu` under pytest and yield the outcomes so far."""
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
