"""Does our code work on this CUDA device, and how fast? Fifteen minutes at most; `make gpu`.

    python -m benchmarks.gpu [--tokens 8192] [--json benchmarks/results/gpu.json] [--only PART ...]
    python -m benchmarks.gpu --rehearse    on CPUs: small versions of the parts that run there

    ttft       time to first token of an 8B-shaped pair that recomputes 8 of 32 layers, at 2K, 10K
               and 40K tokens, beside SGLang's full prefill and its radix cache; answers compared
    overlap    copies of loaded layers by the product's loader beside a layer's kernels:
               milliseconds that they add per layer, and their bandwidth
    throughput requests per second at a target for the first token, with two models on the device:
               Poisson arrivals for two minutes
    lora       eight adapters of one server that read one document: time to first token, beside
               SGLang alone
    oracle     answers with recomputed blocks beside plain transformers: llama and qwen3, FlashInfer
               and FA3, with CUDA graphs and without, adapters, two ranks
    quantised  the same with quantised weights
    captured   do all replays of a CUDA graph write E into their own slots?
    pinned     bandwidth of copies of KV into slots, from page-locked and from pageable memory
    torch_sanitizer, compute_sanitizer
               the copies under torch's CUDA sanitizer, and under NVIDIA's
    flashinfer FlashInfer's answer over a cached prefix, saved for tests without a device

The most useful parts run first. Each has its own time limit, plus the time that earlier parts left.
At the limit we end the part, and report its results so far, marked as cut. A part that cannot run
on this machine says why. The file is written at each result, so a run may be stopped at any time.
With `--only`, the file keeps the rows of all other parts, with their environments.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks import result
from benchmarks.gpu.parts import (
    REHEARSAL,
    Found,
    NotHere,
    Part,
    attempt,
    is_rehearsal,
    lines_of_json,
    needs,
    run_all,
    within,
)
from profiles.environment import Environment

Report = Callable[[str, Found], None]
"""Function that takes a part's name and its results so far."""
DUMP = Path("build/flashinfer.safetensors")
QUANTISED = "awq or gptq or fp8"
SLOWER = 5
"""Factor by which a rehearsal on CPUs may take longer than the parts' time limits."""
_FEW_TOKENS = 256
"""Number of tokens of a part that runs under a sanitizer."""


def on_device(name: str, num_tokens: int) -> Iterator[Found]:
    needs()
    from benchmarks.gpu import copies

    yield from getattr(copies, name)(num_tokens)


def beside(num_tokens: int) -> Iterator[Found]:
    needs("sglang")
    from benchmarks.gpu.overlap import overlap

    yield from overlap(num_tokens)


def sanitized(command: Sequence[str], _num_tokens: int) -> Iterator[Found]:
    """Run a sanitizer, `command`, over one process with all parts that copy (`WATCHED`)."""
    needs()
    if shutil.which(command[0]) is None:
        raise NotHere(f"{command[0]} is not installed")
    done = subprocess.run([*command, *WATCHED], stdout=subprocess.PIPE, text=True, check=False)
    reports = [*lines_of_json(done.stdout.splitlines(keepends=True))]
    failed, missing = ([it[how] for it in reports if how in it] for how in ("failed", "not_run"))
    if missing and not done.returncode:  # Under a sanitizer CUDA may fail to start.
        raise NotHere(missing[0])
    why = [f"exit {done.returncode}", *failed]
    yield {"failed": ": ".join(why)} if done.returncode else {"found": "nothing"}


def dumped(_num_tokens: int) -> Iterator[Found]:
    needs("flashinfer")
    from benchmarks.gpu import attention

    DUMP.parent.mkdir(exist_ok=True)
    attention.dump(DUMP)
    yield {"dump": str(DUMP)}


def compared(selection: str, _num_tokens: int) -> Iterator[Found]:
    needs("sglang")
    from benchmarks.gpu import servers

    yield from servers.oracle(selection)


def served(name: str, num_tokens: int) -> Iterator[Found]:
    """Run a part that starts servers with random weights: `ttft`, `throughput` or `lora`."""
    needs("sglang", on_cpus=True)
    from benchmarks.gpu import adapters, servers, throughput

    parts_of = {"ttft": servers.ttft, "throughput": throughput.measure, "lora": adapters.measure}
    yield from parts_of[name](num_tokens)


HERE = (sys.executable, "-m", "benchmarks.gpu", "--here")
_COPIES = ("captured", "pinned", *(["overlap"] if importlib.util.find_spec("sglang") else []))
WATCHED = (*HERE, *_COPIES, "--tokens", str(_FEW_TOKENS))
TORCHS = ("env", "TORCH_CUDA_SANITIZER=1")
NVIDIAS = (
    *("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all"),
    # torch reads every error, and some of its calls fail on purpose.
    *("--report-api-errors", "no"),
)
PARTS = {
    "ttft": Part(partial(served, "ttft"), 280),
    "overlap": Part(beside, 40),
    "throughput": Part(partial(served, "throughput"), 180),
    "lora": Part(partial(served, "lora"), 80),
    "oracle": Part(partial(compared, f"not ({QUANTISED})"), 110),
    "quantised": Part(partial(compared, QUANTISED), 50),
    "captured": Part(partial(on_device, "captured"), 15),
    "pinned": Part(partial(on_device, "pinned"), 15),
    "torch_sanitizer": Part(partial(sanitized, TORCHS), 25),
    "compute_sanitizer": Part(partial(sanitized, NVIDIAS), 30),
    "flashinfer": Part(dumped, 15),
}
"""Parts, the most useful first: they then have results, even if the run is stopped early."""


def tell(results: Found) -> None:
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()


def alone(num_tokens: int, report: Report, name: str, most_s: float) -> Found:
    """Run one part in its own process, for at most `most_s` seconds. Report its results as they
    come."""
    command = [*HERE, name, "--tokens", str(num_tokens)]
    most_s *= SLOWER if is_rehearsal() else 1
    results = within(command, most_s, lambda so_far: report(name, so_far))
    report(name, results)
    sys.stderr.write(f"{name}: {json.dumps(results)}\n")
    return results


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="servers run on CPUs, in small")
    parser.add_argument("--here", nargs="+", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rehearse:
        os.environ[REHEARSAL] = "1"
    if args.here:
        failed = []
        for name in args.here:
            attempt(PARTS[name], args.tokens, lambda it: (tell(it), failed.append("failed" in it)))
        os._exit(any(failed))  # A device that has failed may not let Python end.
    environment = result.here()
    rows: list[Found] = []

    def report(name: str, results: Found) -> None:
        row = {"part": name, **results}
        rows[:] = [*(it for it in rows if it["part"] != name), row]
        save(rows, environment, args.json)

    asked = {name: part for name, part in PARTS.items() if name in args.only}
    results = run_all(asked, partial(alone, args.tokens, report))
    all_rows = result.with_others(rows, "part", environment, args.json)
    result.write("gpu", {"rows": all_rows}, environment, args.json)
    sys.exit(any("failed" in it for it in results.values()))


def save(rows: Sequence[Found], environment: Environment, file: Path | None) -> None:
    """Write `rows`, the parts' results so far, to the file. Keep its rows of all other parts."""
    all_rows = result.with_others(rows, "part", environment, file)
    result.save("gpu", {"rows": all_rows}, environment, file)


if __name__ == "__main__":
    main()
