"""`cachetree`: serve a cache alone, and ask a worker how it is."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from cachetree.cache import Cache, CacheConfig
from cachetree.errors import CacheTreeError, ConfigError
from cachetree.family import Family
from cachetree.transport import Status, ask_status


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file given to `cachetree serve`."""

    family: Family
    """Which models' caches it holds; all servers it talks to must agree."""
    cache: CacheConfig = CacheConfig()


def read_config(path: Path) -> ServeConfig:
    """Read a YAML file; raises ConfigError naming the file and the field."""
    try:
        config = msgspec.yaml.decode(path.read_bytes(), type=ServeConfig)
    except OSError as exc:
        raise ConfigError(f"config {path} cannot be read: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"config {path}: {exc}") from exc
    if not config.cache.serves:
        raise ConfigError(f"config {path}: cache.serves is false; remove it to serve")
    return config


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.command == "serve":
            _serve(read_config(args.config))
        elif args.command == "status":
            _print_status(ask_status(args.address, timeout_s=args.timeout), as_json=args.json)
        else:
            _ping(args.address, args.timeout, as_json=args.json)
    except CacheTreeError as exc:
        print(f"cachetree: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cachetree", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="hold a cache outside of any server")
    serve.add_argument("--config", type=Path, required=True, help="YAML: family and cache")
    for name, text in (("status", "what a worker holds"), ("ping", "whether a worker answers")):
        command = commands.add_parser(name, help=text)
        command.add_argument("address", help="tcp://HOST:PORT")
        command.add_argument("--json", action="store_true", help="print one line of JSON")
        command.add_argument("--timeout", type=float, default=2.0, help="seconds to wait")
    return parser


def _serve(config: ServeConfig) -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with Cache(config.family, config.cache) as cache:
        _print(f"serving at {cache.address}")
        stop.wait()


def _print_status(status: Status, *, as_json: bool) -> None:
    if as_json:
        _print(msgspec.json.encode(status).decode())
        return
    for field, value in msgspec.structs.asdict(status).items():
        _print(f"{field:22} {value}")


def _ping(address: str, timeout_s: float, *, as_json: bool) -> None:
    begun_at_s = time.monotonic()
    status = ask_status(address, timeout_s=timeout_s)
    answer_ms = (time.monotonic() - begun_at_s) * 1000
    if as_json:
        answer = {"address": address, "epoch": status.epoch, "answer_ms": answer_ms}
        _print(msgspec.json.encode(answer).decode())
    else:
        _print(f"{address} answered in {answer_ms:.1f} ms")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main())
