"""Run the benchmarks of `NAMES`, the most important first: `python -m benchmarks [NAME ...]`.

Each benchmark replaces its `results/NAME.json`. Then the tables in the pages are made again. If a
benchmark fails, its old result stays, all others still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from benchmarks.gpu.parts import end
from benchmarks.result import RESULTS

NAMES = {
    "partial_prefill": ["--documents", "5"],
    "serving": [],
    "overhead": ["--rounds", "6"],
    "lora": ["--adapters", "2", "4", "8"],
    "transport": [],
    "tree": [],
    "disk": [],
    "compression": [],
    "fleet_size": [],
    "shared_tier": [],
    "never_slower": [],
    "link_sweep": ["--documents", "6"],
}
"""Benchmarks and their arguments, chosen so that all of them take 35 minutes on two cores."""
MOST_S = 900.0
"""Seconds after which a benchmark is stopped."""


def run(module: str, *args: str) -> bool:
    began_s = time.monotonic()
    command = [sys.executable, "-m", module, *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        status = f"exit status {process.wait(MOST_S)}"
    except subprocess.TimeoutExpired:
        status = "ended, as it took too long"
    finally:
        if process.poll() is None:
            end(process)
    print(f"{module}: {time.monotonic() - began_s:.0f} s, {status}\n", flush=True)
    return process.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    names = parser.parse_args().names or list(NAMES)
    if unknown := set(names) - set(NAMES):
        parser.error(f"there is no {', '.join(unknown)}")
    done = {
        name: run(f"benchmarks.{name}", *NAMES[name], "--json", str(RESULTS / f"{name}.json"))
        for name in names
    }
    done["tables"] = run("tools.reference")
    failed = [name for name, is_well in done.items() if not is_well]
    print(f"failed: {', '.join(failed)}" if failed else "all are done")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
