"""What would each eviction policy have kept of a trace of requests?

    python -m benchmarks.simulate benchmarks/traces/multi_agent.jsonl [--host-gb 8 32 64]
    python -m benchmarks.simulate --generate multi_agent --seed 0 --out FILE

Run it from the root of the repository. The real tree counts real bytes and holds none; a prompt's
prefill costs what `cachetree.planning.PrefillCost` has for the trace's sizes. Nothing that is told
depends on the machine, but for the seconds that a replay takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import result
from cachetree import CacheTreeError, ConfigError
from cachetree.planning import PrefillCost
from cachetree.tree import POLICIES, Retention

from . import GENERATORS, PageNames, generate, read_trace, replay, write_trace

_GIB = 1 << 30


def main(argv: list[str] | None = None) -> int:
    simulate = result.arguments(__doc__)
    simulate.prog = "simulate"
    simulate.add_argument("traces", type=Path, nargs="*", metavar="TRACE", help="JSON lines")
    simulate.add_argument(
        "--policy", default=",".join(POLICIES), help="which, with commas (default: %(default)s)"
    )
    simulate.add_argument(
        "--host-gb", type=float, nargs="+", default=[32.0], help="GiB (default: %(default)s)"
    )
    simulate.add_argument("--generate", choices=GENERATORS, help="write such a trace to --out")
    simulate.add_argument("--seed", type=int, default=0, help="of the trace (default: 0)")
    simulate.add_argument("--out", type=Path, metavar="FILE", help="where the trace goes")
    try:
        run(simulate.parse_args(argv))
    except CacheTreeError as exc:
        print(f"simulate: {exc}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    if (args.generate is None) != (args.out is None) or bool(args.traces) == bool(args.generate):
        raise ConfigError("give either a TRACE, or --generate and --out")
    if args.generate:
        write_trace(generate(args.generate, args.seed), args.out)
        return
    for it in args.host_gb:
        if not 0 < it < float("inf"):
            raise ConfigError(f"--host-gb is {it}; give a positive number")
    environment = result.here()
    policies = args.policy.split(",")
    rows = [row(trace, host_gb, policies) for trace in args.traces for host_gb in args.host_gb]
    found = {"policies": policies, "rows": rows}
    result.write("simulate", found, environment, args.json)


def row(path: Path, host_gb: float, policies: list[str]) -> dict[str, Any]:
    """Of one trace in so much memory; a field for each policy."""
    retentions = [Retention(eviction=name) for name in policies]
    trace = read_trace(path)
    family = trace.header.family
    names, cost = PageNames(family.page_size), PrefillCost.of_sizes(family.hidden_size)
    outcomes = [replay(trace, names, it, int(host_gb * _GIB), cost) for it in retentions]
    told = {
        it.policy: {**msgspec.structs.asdict(it), "token_hit_rate": it.token_hit_rate}
        for it in outcomes
    }
    return {"trace": path.stem, "host_gb": host_gb, **told}


if __name__ == "__main__":
    sys.exit(main())
