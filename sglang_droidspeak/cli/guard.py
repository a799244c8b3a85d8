"""`droidspeak guard`: what the drift guard of a running server has seen, and begin anew."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_droidspeak.cli import live
from sglang_droidspeak.cli.terminal import tell
from sglang_droidspeak.guard.detector import strength
from sglang_droidspeak.guard.plans import ALL, GuardState


def add_parser(commands: Any) -> None:
    guard = commands.add_parser(
        "guard",
        help="show which plans the drift guard has taken out of service, or begin anew",
        description="Ask a running server how far answers from another model's KV were from exact "
        "runs, plan by plan, and which plans are in service. Exit status 1 where the drift guard "
        "has taken one out of service. With --reset, all plans of the pairs of one sender, or of "
        "all, are in service again, and nothing speaks against them.",
    )
    guard.add_argument("url", metavar="URL", help="of SGLang, such as http://127.0.0.1:30000")
    guard.add_argument("--reset", metavar="SENDER", help=f"a sender's model id, or `{ALL}`")
    live.add_key(guard)
    guard.add_argument("--json", action="store_true", help="one line of JSON")
    guard.set_defaults(run=_guard)


def _guard(args: argparse.Namespace) -> int:
    told = live.post(args, "/droidspeak/guard", {} if args.reset is None else {"reset": args.reset})
    state = msgspec.convert(told, GuardState)
    tell(args, told, lines(state))
    return int(any(it.num_left < len(it.plans) for it in state.pairs))


def lines(state: GuardState) -> Iterator[str]:
    """For a person."""
    rate = state.shadow_rate
    yield f"compares {rate:.1%} of reused requests" if rate else "compares nothing"
    for pair in state.pairs:
        yield f"{pair.sender} to {pair.receiver}"
        for i, it in enumerate(pair.plans):
            block = it.layers + (", E corrected" if it.e_corrected else "")
            yield (
                f"    {'in service' if i < pair.num_left else 'OUT OF SERVICE':15} {block} anew: "
                f"distance {it.mean_tv:.4f} in {it.num_shadows:,} shadows, {it.allowed:.4f} "
                f"allowed, evidence {strength(it.evidence):,.0f}"
            )
