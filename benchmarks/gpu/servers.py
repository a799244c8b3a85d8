"""Real servers on this device: their answers beside the oracle's, and their time to first token."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cachetree import Span
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running

ROOT = Path(__file__).parents[2]
LAYERS, BLOCK = 8, Span(3, 5)
"""Eight of the 32 layers of an 8B model, and the quarter of them that is recomputed."""
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
    """Median milliseconds to the first token: by full prefill, and with the block recomputed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = shape("llama", layers=LAYERS, hidden=4096, heads=32, kv_heads=8)
        config.intermediate_size, config.max_position_embeddings = 14336, 1 << 16
        with torch.device("cuda"):
            paths = write_models(folder, config, ("sender", "receiver"), dtype=torch.bfloat16)
        torch.cuda.empty_cache()
        with running(*pair(paths), folder=folder / "logs") as (sender, receiver):
            yield from measured(sender, receiver, LENGTHS)


def pair(paths: Sequence[Path]) -> list[ServerSpec]:
    options = {"mem-fraction-static": 0.35, "page-size": PAGE, "max-running-requests": 8}
    options["max-total-tokens"] = 4 * LENGTHS[-1]
    address = f"tcp://127.0.0.1:{free_port()}"
    sends = {"listen": address, "capture_layers": [BLOCK.start], "host_gb": 8}
    reads = {"peers": [address], "gate": "none", "host_gb": 0, "staging_gb": 4}
    reads["max_recompute_tokens"] = LENGTHS[-1]
    names = ("sender", "receiver")
    return [
        SizedServer(model=path, name=name, options=options, droidspeak=settings)
        for path, name, settings in zip(paths, names, (sends, reads), strict=True)
    ]


def measured(sender: Server, receiver: Server, lengths: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Measure both controls in turns; the first request of each length warms up."""
    results: dict[str, Any] = {"layers": LAYERS, "recomputed": len(BLOCK)}
    controls = {"full": {"mode": "off"}, "reused": {"block": f"{BLOCK.start}:{BLOCK.stop}"}}
    for length in lengths:
        times: dict[str, list[float]] = {name: [] for name in controls}
        for repeat in range(REPEATS + 1):
            tokens = random_prompt(length, seed=repeat)
            sender.generate(tokens, max_new_tokens=1)
            for name, control in controls.items():
                times[name].append(_first_token_ms(receiver, tokens, control))
        full, reused = (statistics.median(it[1:]) for it in times.values())
        results[f"{length}_full_ms"] = round(full, 2)
        results[f"{length}_reused_ms"] = round(reused, 2)
        results[f"{length}_speedup"] = round(full / reused, 3)
        yield results


def _first_token_ms(server: Server, tokens: Sequence[int], control: Mapping[str, str]) -> float:
    """Ask until the sender offers all that it has read, then return the time of that request."""
    num_reusable = (len(tokens) - 1) // PAGE * PAGE
    wanted = ("off", 0) if "mode" in control else ("reused", num_reusable)
    deadline = time.monotonic() + 20
    while True:
        server.flush()
        started_s = time.perf_counter()
        reply = server.generate(tokens, max_new_tokens=1, droidspeak=control)
        took_s = time.perf_counter() - started_s
        (provenance,) = reply["meta_info"]["droidspeak"]
        observed = provenance["outcome"], provenance["reused_tokens"]
        if observed == wanted:
            return 1000 * took_s
        if time.monotonic() > deadline:
            raise RuntimeError(f"of {len(tokens)} tokens: {observed}, and not {wanted}")
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
