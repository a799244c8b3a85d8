"""`droidspeak serve`: start SGLang's own server, with this extension's options from flags."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from cachetree import ConfigError
from cachetree.cli import show
from sglang_droidspeak.fleet.fleet import check_flags
from sglang_droidspeak.start.config import MIN_PAGE_SIZE, linker_options

if TYPE_CHECKING:
    from sglang_droidspeak.start.this_server import ThisServer

_MODULE: Final = "sglang.launch_server"


def add_parser(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="start an SGLang server that shares its cache",
        description="Check the settings, then start SGLang's server with them (`python -m "
        "sglang.launch_server`). A wrong setting ends the command with one line, before "
        "anything is loaded.",
    )
    serve.add_argument("--model", required=True, metavar="PATH", help="checkpoint to serve")
    serve.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="address at which other servers may read this server's cache, tcp://HOST:PORT",
    )
    for name, text in (
        ("peer", "address of a server to read from, tcp://HOST:PORT"),
        ("profile", "profile of a pair, or a folder of them"),
    ):
        value = "PATH" if name == "profile" else "ADDRESS"
        several = f"{text}; may be given several times"
        serve.add_argument(f"--{name}", action="append", default=[], metavar=value, help=several)
    serve.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other setting, as JSON or a word: `--set host_gb=8`; may be given several times",
    )
    serve.add_argument(
        "--dry-run",
        action="store_true",
        help="print the configuration as YAML for SGLang, and start nothing",
    )
    serve.add_argument(
        "sglang",
        nargs="*",
        metavar="-- OPTIONS",
        help="SGLang's own options, as in `-- --port 30001`",
    )
    serve.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    options, rest = options_of(args), args.sglang
    if args.dry_run:
        show(f"# {shlex.join(['python', '-m', _MODULE, '--config', 'FILE', *rest])}")
        show(yaml.safe_dump(options, sort_keys=False).rstrip())
        return 0
    command = [sys.executable, "-m", _MODULE, *as_flags(options), *rest]
    os.execv(sys.executable, command)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the SGLang options that `droidspeak serve` makes from its own flags. `args.sglang` is
    not among them. Raises ConfigError or ProfileError for options that the server would refuse."""
    flags = {
        "listen": args.listen,
        "peers": args.peer,
        "profiles": args.profile,
    }
    settings = {name: it for name, it in flags.items() if it} | dict(map(_named, args.set))
    check_flags("serve", (it[2:].partition("=")[0] for it in args.sglang if it.startswith("--")))
    server = server_of(settings, args.model, args.sglang)
    return {"model-path": args.model, "page-size": server.page_size, **linker_options(settings)}


def server_of(settings: Mapping[str, Any], model: str, flags: Sequence[str]) -> ThisServer:
    """Check the settings as a server would at its start, for a model and SGLang's `flags`. Return
    that server's description. Raises ConfigError or ProfileError."""
    from sglang_droidspeak.start import refuse
    from sglang_droidspeak.start.this_server import read_server

    own = own_of(flags)
    refuse.check_page_size(own.page_size)
    return read_server(
        json.dumps(settings).encode(),
        model,
        own.revision,
        own.page_size,
        own.tp,
        () if own.enable_lora or own.lora_paths else None,
    )


def _named(setting: str) -> tuple[str, Any]:
    name, equals, value = setting.partition("=")
    if not (name and equals):
        raise ConfigError(f"--set is {setting!r}; write NAME=VALUE, for example host_gb=8")
    try:
        return name, msgspec.json.decode(value)
    except ValueError:
        return name, value


def own_of(flags: Sequence[str]) -> argparse.Namespace:
    """Return the values of SGLang's flags on which the settings depend. Raises ConfigError."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    own.add_argument("--page-size", type=int, default=MIN_PAGE_SIZE)
    own.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="tp", type=int, default=1)
    own.add_argument("--revision")
    own.add_argument("--enable-lora", action="store_true")
    own.add_argument("--lora-paths", nargs="*", default=[])
    try:
        return own.parse_known_args(flags)[0]
    except argparse.ArgumentError as exc:
        raise ConfigError(f"SGLang's {exc}") from exc


def as_flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Return the options of a configuration file as flags, as SGLang converts them."""
    for name, value in options.items():
        if value is False:
            continue
        yield f"--{name}"
        if value is not True:
            yield value if isinstance(value, str) else json.dumps(value)
