"""`cachetree`: serve a cache alone, make keys, and ask a worker how it is."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from cachetree.cache import Cache, CacheConfig
from cachetree.errors import CacheTreeError, ConfigError
from cachetree.family import Family
from cachetree.transport import Credentials, Status, ask_status, credentials_of, write_key_pair

_SERVED: Final = {"accepts": True}


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file given to `cachetree serve`."""

    family: Family
    """Which models' caches it holds; all servers it talks to must agree."""
    cache: CacheConfig = CacheConfig()


def read_config(path: Path) -> ServeConfig:
    """Read a YAML file; raises ConfigError naming the file and the field."""
    try:
        config = msgspec.convert(
            _with_defaults(msgspec.yaml.decode(path.read_bytes())), ServeConfig
        )
    except OSError as exc:
        raise ConfigError(f"config {path} cannot be read: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"config {path}: {exc}") from exc
    if not config.cache.serves:
        raise ConfigError(f"config {path}: cache.serves is false; remove it to serve")
    return config


def _with_defaults(config: Any) -> Any:
    """A worker that runs alone is there to be given entries."""
    match config:
        case {"cache": {"worker": {**worker}, **cache}, **rest}:
            return {**rest, "cache": {**cache, "worker": {**_SERVED, **worker}}}
        case {"cache": {**cache}, **rest} if "worker" not in cache:
            return {**rest, "cache": {**cache, "worker": _SERVED}}
        case {**rest} if "cache" not in rest:
            return {**rest, "cache": {"worker": _SERVED}}
    return config


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.command == "serve":
            _serve(read_config(args.config))
        elif args.command == "keygen":
            _keygen(args.out, args.name, as_json=args.json)
        else:
            if (args.key_file is None) != (args.server_key is None):
                raise ConfigError("give --key-file and --server-key together, or neither")
            credentials = credentials_of(args.key_file, args.server_key)
            if args.command == "status":
                status = ask_status(args.address, timeout_s=args.timeout, credentials=credentials)
                _print_status(status, as_json=args.json)
            else:
                _ping(args.address, args.timeout, credentials, as_json=args.json)
    except CacheTreeError as exc:
        print(f"cachetree: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cachetree", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="hold a cache outside of any server")
    serve.add_argument("--config", type=Path, required=True, help="YAML: family and cache")
    keygen = commands.add_parser(
        "keygen",
        help="make the key pair of a server",
        description="Write NAME.key, which the server itself reads (`key_file`), and NAME.pub, "
        "which goes to the servers that it talks to (`allowed_peers`, `peer_keys`). Nothing is "
        "overwritten.",
    )
    keygen.add_argument("--out", type=Path, required=True, metavar="DIR", help="made if needed")
    keygen.add_argument("--name", default="cachetree", help="of the files, and of the key's remark")
    keygen.add_argument("--json", action="store_true", help="print one line of JSON")
    for name, text in (("status", "what a worker holds"), ("ping", "whether a worker answers")):
        command = commands.add_parser(name, help=text)
        command.add_argument("address", help="tcp://HOST:PORT")
        command.add_argument("--json", action="store_true", help="print one line of JSON")
        command.add_argument("--timeout", type=float, default=2.0, help="seconds to wait")
        command.add_argument(
            "--key-file", metavar="FILE", help="own secret key, for a worker that has one"
        )
        command.add_argument(
            "--server-key", metavar="KEY", help="the worker's public key, or the file with it"
        )
    return parser


def _serve(config: ServeConfig) -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with Cache(config.family, config.cache) as cache:
        _print(f"serving at {cache.address}")
        stop.wait()


def _keygen(folder: Path, name: str, *, as_json: bool) -> None:
    keys, secret_file, public_file = write_key_pair(folder, name)
    if as_json:
        made = {
            "public_key": keys.public,
            "key_file": str(secret_file),
            "public_key_file": str(public_file),
        }
        _print(msgspec.json.encode(made).decode())
        return
    _print(keys.public)
    _print(f"wrote {secret_file}, which stays here, and {public_file}, which the others need")


def _print_status(status: Status, *, as_json: bool) -> None:
    if as_json:
        _print(msgspec.json.encode(status).decode())
        return
    for field, value in msgspec.structs.asdict(status).items():
        _print(f"{field:22} {value}")


def _ping(address: str, timeout_s: float, credentials: Credentials, *, as_json: bool) -> None:
    begun_at_s = time.monotonic()
    status = ask_status(address, timeout_s=timeout_s, credentials=credentials)
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
