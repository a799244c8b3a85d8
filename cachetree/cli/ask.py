"""The commands that ask a worker one thing."""

from __future__ import annotations

import argparse
import time

from cachetree.cli.show import show, show_fields, show_json
from cachetree.errors import ConfigError
from cachetree.transport import Credentials, Status, ask_status, credentials_of


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, text, run in (
        ("status", "what a worker holds", _status),
        ("ping", "whether a worker answers", _ping),
    ):
        command = commands.add_parser(name, help=text)
        add_worker(command)
        command.set_defaults(run=run)


def add_worker(command: argparse.ArgumentParser) -> None:
    """What every command says of the worker that it talks to."""
    command.add_argument("address", help="tcp://HOST:PORT")
    command.add_argument("--json", action="store_true", help="print one line of JSON")
    command.add_argument("--timeout", type=float, default=2.0, help="seconds to wait")
    command.add_argument(
        "--key-file", metavar="FILE", help="own secret key, for a worker that has one"
    )
    command.add_argument(
        "--server-key", metavar="KEY", help="the worker's public key, or the file with it"
    )


def credentials(args: argparse.Namespace) -> Credentials:
    """Raises ConfigError."""
    if (args.key_file is None) != (args.server_key is None):
        raise ConfigError("give --key-file and --server-key together, or neither")
    return credentials_of(args.key_file, args.server_key)


def status_of(args: argparse.Namespace) -> Status:
    return ask_status(args.address, timeout_s=args.timeout, credentials=credentials(args))


def _status(args: argparse.Namespace) -> None:
    (show_json if args.json else show_fields)(status_of(args))


def _ping(args: argparse.Namespace) -> None:
    begun_at_s = time.monotonic()
    status = status_of(args)
    answer_ms = (time.monotonic() - begun_at_s) * 1000
    if args.json:
        show_json({"address": args.address, "epoch": status.epoch, "answer_ms": answer_ms})
    else:
        show(f"{args.address} answered in {answer_ms:.1f} ms")
