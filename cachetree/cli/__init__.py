"""`cachetree`: serve a cache without an engine, make keys, query or control a worker."""

from __future__ import annotations

import argparse
from functools import partial
from importlib.metadata import version

from cachetree.cli import ask, keygen, serve
from cachetree.cli.serve import parse_config
from cachetree.cli.show import complain, escape_output, show, show_json, status_of

__all__ = [
    "complain",
    "escape_output",
    "main",
    "parse_config",
    "parser",
    "show",
    "show_json",
    "status_of",
]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="cachetree", description=__doc__)
    top.add_argument(
        "--version", action="version", version=f"cachetree {version('sglang-droidspeak')}"
    )
    commands = top.add_subparsers(required=True)
    serve.add_parser(commands)
    keygen.add_parser(commands)
    ask.add_parsers(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    escape_output()
    args = parser().parse_args(argv)
    return status_of("cachetree", partial(args.run, args))
