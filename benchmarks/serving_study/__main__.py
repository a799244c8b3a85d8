"""Run studies of serving under load."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import result

from . import rig
from .streams import conversations, replayed
from .studies import ALONE, SERVED, Found, bursts, measure_idle, poisson_arrivals

STUDIES = {
    "s15": (poisson_arrivals, (*SERVED, "wide block")),
    "s21": (bursts, (ALONE, "block", "wide block")),
    "s15b": (conversations, (ALONE,)),
    "trace": (replayed, (ALONE,)),
}
"""Each study, with the contenders that are measured before it on an idle server."""
KEPT = result.RESULTS / "serving_study"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_study", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=[*STUDIES])
    parser.add_argument("--quick", action="store_true", help="tiny models and few requests")
    parser.add_argument("--requests", type=int, help="of each contender at each rate")
    parser.add_argument("--out", type=Path, default=KEPT)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    size = rig.QUICK if args.quick else rig.FULL
    size = msgspec.structs.replace(size, num_requests=args.requests or size.num_requests)
    measure(size, args.only, args.out, console)


def measure(size: rig.Size, names: Sequence[str], out: Path, console: Console) -> None:
    """Run the studies one after the other; write each result as soon as it is done."""
    environment = result.here()

    def keep(name: str, study: Found) -> None:
        summary = {**study.summary, "size": size, "environment": environment}
        encoded = msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n"
        (out / f"{name}.json").write_bytes(encoded)
        lines = [msgspec.json.encode(it) + b"\n" for it in study.requests]
        (out / f"{name}_requests.jsonl").write_bytes(b"".join(lines))

    with (
        tempfile.TemporaryDirectory() as folder,
        rig.rig(Path(folder), size, console.log) as testbed,
    ):
        alone = {each for name in names for each in STUDIES[name][1]}
        idle = measure_idle(testbed, alone, console.log)
        for name in names:
            keep(name, STUDIES[name][0](idle, console.log))


if __name__ == "__main__":
    main()
