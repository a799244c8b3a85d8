"""`cachetree`: serve a cache alone, make keys, ask or tell a worker, and replay traces."""

from __future__ import annotations

import argparse
import sys

from cachetree.cli import ask, bench, keygen, serve, simulate
from cachetree.errors import CacheTreeError

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cachetree", description=__doc__)
    commands = parser.add_subparsers(required=True)
    serve.add_parser(commands)
    keygen.add_parser(commands)
    ask.add_parsers(commands)
    simulate.add_parser(commands)
    bench.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except CacheTreeError as exc:
        print(f"cachetree: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    return 0
