"""What would each eviction policy have kept of a trace of requests?

    python -m benchmarks.simulate benchmarks/traces/multi_agent.jsonl [--host-gb 32] [--json]
    python -m benchmarks.simulate --generate multi_agent --seed 0 --out FILE

Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec

from cachetree import CacheTreeError, ConfigError
from cachetree.planning import SECONDS_PER_TOKEN, PrefillCost
from cachetree.tree import POLICIES, Retention

from . import (
    GENERATORS,
    Outcome,
    PageNames,
    generate,
    read_trace,
    replay,
    write_trace,
)

_GIB = 1 << 30
_ROW = "{:10} {:>10} {:>12} {:>10} {:>8} {:>10} {:>8} {:>8} {:>7}"


def main(argv: list[str] | None = None) -> int:
    simulate = argparse.ArgumentParser(
        prog="simulate",
        description="Replay TRACE against the real tree, which counts real bytes and holds none. "
        "A prompt of t tokens costs seconds-per-token * (t + t²/2 / attention-tokens). With "
        "--generate, write a trace from a seed instead.",
    )
    simulate.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help="JSON lines")
    simulate.add_argument(
        "--policy", default=",".join(POLICIES), help="which, with commas (default: %(default)s)"
    )
    simulate.add_argument(
        "--host-gb", type=float, default=32.0, help="memory in GiB (default: %(default)s)"
    )
    simulate.add_argument(
        "--seconds-per-token",
        type=float,
        default=SECONDS_PER_TOKEN,
        help="prefill of a token without attention to others (default: %(default)s)",
    )
    simulate.add_argument(
        "--attention-tokens",
        type=float,
        help="how many others cost as much again (default: 6 * the trace's hidden size)",
    )
    simulate.add_argument("--json", action="store_true", help="print one line of JSON")
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
    if (args.generate is None) != (args.out is None) or (args.trace is None) != bool(args.generate):
        raise ConfigError("give either a TRACE, or --generate and --out")
    if args.generate:
        write_trace(generate(args.generate, args.seed), args.out)
        return
    for name in ("host_gb", "seconds_per_token", "attention_tokens"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give a positive number")
    retentions = [Retention(eviction=name) for name in args.policy.split(",")]
    trace = read_trace(args.trace)
    family = trace.header.family
    cost = PrefillCost.of_sizes(family.hidden_size, args.seconds_per_token)
    if args.attention_tokens is not None:
        context_s = args.seconds_per_token / args.attention_tokens
        cost = PrefillCost(token_s=args.seconds_per_token, context_s=context_s)
    names = PageNames(family.page_size)
    host_bytes = int(args.host_gb * _GIB)
    outcomes = [replay(trace, names, it, host_bytes, cost) for it in retentions]
    if args.json:
        print(
            json.dumps(
                {
                    "trace": args.trace.name,
                    "host_gb": args.host_gb,
                    "seconds_per_token": cost.token_s,
                    "attention_tokens": cost.token_s / cost.context_s,
                    "outcomes": [_fields(outcome) for outcome in outcomes],
                }
            )
        )
        return
    heads = ("token hits", "request hits", "saved s", "of all", "evictions", "GB", "refused")
    print(_ROW.format("policy", *heads, "wall s"))
    for outcome in outcomes:
        print(_row(outcome))


def _fields(outcome: Outcome) -> dict[str, object]:
    return {
        **msgspec.structs.asdict(outcome),
        "token_hit_rate": outcome.token_hit_rate,
        "request_hit_rate": outcome.request_hit_rate,
    }


def _row(outcome: Outcome) -> str:
    return _ROW.format(
        outcome.policy,
        f"{outcome.token_hit_rate:.1%}",
        f"{outcome.request_hit_rate:.1%}",
        f"{outcome.saved_s:.1f}",
        f"{outcome.saved_s / outcome.prefill_s:.1%}",
        outcome.num_evictions,
        f"{outcome.num_evicted_bytes / 1e9:.0f}",
        outcome.num_refused,
        f"{outcome.wall_s:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
