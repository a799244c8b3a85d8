"""Does the CUDA path do on this device what it is written for? Ten minutes at most; `make gpu`.

    python -m benchmarks.gpu [--tokens 8192] [--json benchmarks/results/gpu.json] [--only PART ...]

    captured   E that a CUDA graph writes is the E of each replay, in the slots of that replay
    pinned     a copy of staged KV into slots from page-locked memory against one from pageable
    overlap    the same copies on the extension's copy stream beside a matrix product: the share of
               the shorter that ran beside the other (1: all of it)
    sanitizer  those three under torch's CUDA sanitizer; and under NVIDIA's
    flashinfer its answer over a cached prefix, dumped for tests that have no device
    oracle     blocks of llama and qwen3, with FlashInfer and FA3, in CUDA graphs and without, of
               adapters and on two ranks, against plain transformers; then in quantised weights
    ttft       an 8B-shaped pair with a quarter of its layers recomputed, at 2K, 10K and 40K tokens

Each part has a time of its own, and what the parts before it or not asked for have left; then it is
cut: what it had found by then is told, and that it was cut. A part that cannot run here says why.
Parts that are not asked for keep what the file has of them, with what that was found on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks import result
from benchmarks.gpu.parts import (
    Found,
    NotHere,
    Part,
    attempt,
    lines_of_json,
    needs,
    run_all,
    within,
)

DUMP = Path("build/flashinfer.safetensors")
QUANTISED = "awq or gptq or fp8"
_FEW_TOKENS = 256
"""Under a sanitizer."""


def on_device(name: str, num_tokens: int) -> Iterator[Found]:
    needs()
    from benchmarks.gpu import copies

    yield getattr(copies, name)(num_tokens)


def sanitized(command: Sequence[str], _num_tokens: int) -> Iterator[Found]:
    """The parts of `on_device` in one process that is watched."""
    needs()
    if shutil.which(command[0]) is None:
        raise NotHere(f"{command[0]} is not installed")
    done = subprocess.run([*command, *WATCHED], stdout=subprocess.PIPE, text=True, check=False)
    told = [*lines_of_json(done.stdout.splitlines(keepends=True))]
    failed, missing = ([it[how] for it in told if how in it] for how in ("failed", "not_run"))
    if missing and not done.returncode:  # Under a sanitizer CUDA may not come up.
        raise NotHere(missing[0])
    why = [f"exit {done.returncode}", *failed]
    yield {"failed": ": ".join(why)} if done.returncode else {"found": "nothing"}


def dumped(_num_tokens: int) -> Iterator[Found]:
    needs("flashinfer")
    from benchmarks.gpu import attention

    DUMP.parent.mkdir(exist_ok=True)
    attention.dump(DUMP)
    yield {"dump": str(DUMP)}


def compared(which: str, _num_tokens: int) -> Iterator[Found]:
    needs("sglang")
    from benchmarks.gpu import servers

    yield from servers.oracle(which)


def timed(num_tokens: int) -> Iterator[Found]:
    needs("sglang")
    from benchmarks.gpu import servers

    yield from servers.ttft(num_tokens)


HERE = (sys.executable, "-m", "benchmarks.gpu", "--here")
WATCHED = (*HERE, "captured", "pinned", "overlap", "--tokens", str(_FEW_TOKENS))
TORCHS = ("env", "TORCH_CUDA_SANITIZER=1")
NVIDIAS = (
    *("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all"),
    *("--report-api-errors", "no"),  # torch looks at them all, and some that fail are questions.
)
PARTS = {
    "captured": Part(partial(on_device, "captured"), 20),
    "pinned": Part(partial(on_device, "pinned"), 20),
    "overlap": Part(partial(on_device, "overlap"), 20),
    "torch_sanitizer": Part(partial(sanitized, TORCHS), 30),
    "compute_sanitizer": Part(partial(sanitized, NVIDIAS), 50),
    "flashinfer": Part(dumped, 60),
    "oracle": Part(partial(compared, f"not ({QUANTISED})"), 180),
    "quantised": Part(partial(compared, QUANTISED), 80),
    "ttft": Part(timed, 80),
}


def tell(found: Found) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def alone(num_tokens: int, name: str, most_s: float) -> Found:
    """In a process of its own."""
    found = within([*HERE, name, "--tokens", str(num_tokens)], most_s)
    sys.stderr.write(f"{name}: {json.dumps(found)}\n")
    return found


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--here", nargs="+", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        failed = []
        for name in args.here:
            attempt(PARTS[name], args.tokens, lambda it: (tell(it), failed.append("failed" in it)))
        os._exit(any(failed))  # A device that has failed may not let Python end.
    environment = result.here()
    spare_s = sum(part.most_s for name, part in PARTS.items() if name not in args.only)
    asked = {it: PARTS[it] for it in args.only}
    found = run_all(asked, partial(alone, args.tokens), spare_s=spare_s)
    rows = [{"part": name, **it} for name, it in found.items()]
    rows = result.with_others(rows, "part", environment, args.json)
    result.write("gpu", {"rows": rows}, environment, args.json)
    sys.exit(any("failed" in it for it in found.values()))


if __name__ == "__main__":
    main()
