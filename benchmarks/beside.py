"""Is a benchmark as fast as at another commit?

    git worktree add --detach ../before 9dc6939
    python -m benchmarks.beside ../before -- disk.py --mib 128 --repetitions 3

Each checkout runs its own script with its own code. The two take turns to be first, so that the
machine's other work disturbs both alike. Both scripts write lines of JSON. For each number in them,
we compare the two medians over the rounds. A ratio above 1 means slower now if the number is a
time, and faster now if it is a speed.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import result

NOW = Path(__file__).resolve().parents[1]


def numbers(data: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number in a JSON value, under a name made of the keys above it. An item of a list
    is named by its `what`, or else by its index."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key != "environment":
                yield from numbers(value, f"{name} / {key}" if name else key)
    elif isinstance(data, list):
        whats = [it.get("what") if isinstance(it, dict) else None for it in data]
        for index, (value, what) in enumerate(zip(data, whats, strict=True)):
            row = index if what is None or whats.count(what) > 1 else what
            yield from numbers(value, f"{name} {row}")
    elif isinstance(data, int | float):
        yield name, data


def run(checkout: Path, script: list[str]) -> dict[str, float]:
    path = os.pathsep.join(map(str, (checkout, checkout / "platforms" / "torch_cpu")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(checkout / "benchmarks" / script[0]), *script[1:]],
        cwd=checkout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: value for line in lines for name, value in numbers({line["question"]: line})}


def commit_of(checkout: Path) -> str:
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=checkout, text=True).strip()


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("before", type=Path, help="a checkout of the other commit")
    parser.add_argument("script", nargs="+", help="a benchmark and its arguments, after --")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="print what has this pattern in its name")
    args = parser.parse_args()
    environment = result.here()
    checkouts = [args.before.resolve(), NOW]
    runs: list[list[dict[str, float]]] = [[], []]
    for number in range(args.rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            runs[side].append(run(checkouts[side], args.script))
    names = [name for name in runs[0][0] if all(name in it for side in runs for it in side)]
    medians = {
        name: [statistics.median(it[name] for it in side) for side in runs] for name in names
    }
    for name, (before, now) in medians.items():
        if re.search(args.only, name):
            print(f"{now / before if before else 0:6.3f} {before:12.4g} {now:12.4g}  {name}")
    compared = {
        "script": args.script,
        "rounds": args.rounds,
        "before": commit_of(args.before),
        "before_and_now": medians,
    }
    line = result.write("how fast is this beside another commit", compared, environment)
    if args.json is not None:  # A log: each run compares other commits.
        with args.json.open("a") as log:
            log.write(line)


if __name__ == "__main__":
    main()
