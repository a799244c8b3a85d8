"""Output of the commands, for people and for programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from cachetree import printable
from cachetree.cli import show, show_json
from sglang_droidspeak.fleet.servers import START_TIMEOUT_S


def tell(args: argparse.Namespace, answer: object, lines: Iterable[str]) -> None:
    """Show `answer` as one line of JSON with `--json`. Else show `lines`, for a person."""
    if args.json:
        show_json(answer)
    else:
        for line in lines:
            show(printable(line))


def add_start_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start-timeout",
        dest="start_timeout_s",
        type=float,
        default=START_TIMEOUT_S,
        metavar="S",
        help="most seconds until a process has to be ready",
    )
