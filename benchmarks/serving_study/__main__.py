"""Run the studies, or draw what is kept of them."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.result import PACKAGES
from profiles.environment import read_environment

from . import rig
from .agents import coder_and_tester
from .pictures import DRAWN
from .studies import STUDIES, Found, measure_idle

AGENTS = "s16"
KEPT = Path(__file__).parents[1] / "results" / "serving_study"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_study", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*STUDIES, AGENTS], default=[*STUDIES, AGENTS])
    parser.add_argument("--quick", action="store_true", help="tiny models and few requests")
    parser.add_argument("--requests", type=int, help="of each contender at each rate")
    parser.add_argument("--draw", action="store_true", help="only the pictures, of what is kept")
    parser.add_argument("--out", type=Path, default=KEPT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    size = rig.QUICK if args.quick else rig.FULL
    if args.requests:
        size = msgspec.structs.replace(size, num_requests=args.requests)
    if not args.draw:
        measure(size, args.only, args.out, console)
    for name in args.only:
        kept = args.out / f"{name}.json"
        DRAWN[name](json.loads(kept.read_text()), kept.with_suffix(".png"))
        console.log(f"{name}: {kept}")


def measure(size: rig.Size, names: Sequence[str], out: Path, console: Console) -> None:
    """One after the other; each is kept as soon as it is done."""
    environment = read_environment(PACKAGES)

    def keep(name: str, found: Found) -> None:
        summary = {**found.summary, "size": size, "environment": environment}
        kept = msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n"
        (out / f"{name}.json").write_bytes(kept)
        lines = [msgspec.json.encode(it) + b"\n" for it in found.requests]
        (out / f"{name}_requests.jsonl").write_bytes(b"".join(lines))

    with tempfile.TemporaryDirectory() as folder:
        if AGENTS in names:
            keep(AGENTS, coder_and_tester(size, Path(folder) / AGENTS, console.log))
        if shared := [name for name in names if name in STUDIES]:
            with rig.rig(Path(folder), size, console.log) as it:
                idle = measure_idle(it, console.log)
                for name in shared:
                    keep(name, STUDIES[name](idle, console.log))


if __name__ == "__main__":
    main()
