"""`droidspeak`: profile a pair, show what the extension does, start servers, look at them."""

from __future__ import annotations

import argparse
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from cachetree import CacheTreeError, ConfigError
from cachetree.checkpoint import read_model_identity
from cachetree.cli import complain, escape_output, show, status_of
from profiles import cli as profiler
from profiles.distill import cli as distiller
from sglang_droidspeak.cli import ask, demo, doctor, serve, verify
from sglang_droidspeak.cli.terminal import add_start_timeout, tell
from sglang_droidspeak.fleet.fleet import read_fleet, shared_cores, specs
from sglang_droidspeak.fleet.servers import ServerSpec, running
from sglang_droidspeak.fleet.signals import terminable


def main(argv: list[str] | None = None) -> int:
    escape_output()
    args = parser().parse_args(argv)
    with terminable():
        return status_of("droidspeak", partial(args.run, args))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="droidspeak", description=__doc__, allow_abbrev=False)
    top.add_argument(
        "--version",
        action="version",
        version=f"droidspeak {version('sglang-droidspeak')} for SGLang {version('sglang')}",
    )
    exact = partial(argparse.ArgumentParser, allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, parser_class=exact)  # type: ignore
    demo.add_parser(commands)
    identity = commands.add_parser(
        "identity",
        help="print the model id of a checkpoint and what decides it",
        description="Print the id by which profiles, requests and metrics name a model. The id is "
        "computed from the checkpoint's content. The folder's name does not matter.",
    )
    identity.add_argument("path", type=Path, metavar="PATH", help="checkpoint folder")
    identity.add_argument(
        "--adapter", type=Path, metavar="PATH", help="PEFT adapter on the checkpoint"
    )
    identity.add_argument("--json", action="store_true", help="print one line of JSON")
    identity.set_defaults(run=_identity)
    serve.add_parser(commands)
    up = commands.add_parser(
        "up",
        help="start the workers and engines that one file describes; Ctrl-C ends them",
        description="Start every worker (`cachetree serve`) and every engine "
        "(`sglang.launch_server`) of a file such as examples/fleet.yaml. Wait until all are "
        "ready, and print a table of them. Print a line if one of them ends. Ctrl-C ends them "
        "all.",
    )
    up.add_argument(
        "file", type=Path, metavar="FILE", help="YAML: programs, workers and engines by name"
    )
    up.add_argument(
        "--out",
        type=Path,
        default=Path("out/fleet"),
        metavar="DIR",
        help="folder for logs and configurations; default: out/fleet",
    )
    up.add_argument("--device", help="device of all engines, in place of the file's")
    add_start_timeout(up)
    up.set_defaults(run=_up)
    ask.add_parsers(commands)
    doctor.add_parser(commands)
    verify.add_parser(commands)
    profiler.add_commands(commands)
    distiller.add_command(commands)
    return top


def _up(args: argparse.Namespace) -> int:
    options = {} if args.device is None else {"device": args.device}
    wanted = specs(read_fleet(args.file), options)
    show("checking what the engines are given")
    for spec in wanted:
        if isinstance(spec, ServerSpec) and spec.droidspeak is not None:
            try:
                serve.server_of(spec.droidspeak, str(spec.model), [*serve.as_flags(spec.options)])
            except CacheTreeError as exc:
                raise ConfigError(f"engines.{spec.name}: {exc}") from exc
    show(f"starting {len(wanted)} processes; their logs are in {args.out}")
    env, timeout_s = shared_cores(wanted), args.start_timeout_s
    with running(*wanted, folder=args.out, env=env, start_timeout_s=timeout_s) as processes:
        for process in processes:
            show(f"{process.name:20} {process.address}")
        show("ready; Ctrl-C ends them")
        while processes:
            time.sleep(0.5)
            for process in [it for it in processes if not it.is_alive]:
                processes.remove(process)
                complain("droidspeak", f"{process.name} ended; {process.log} says why")
    return 1


def _identity(args: argparse.Namespace) -> int:
    identity = read_model_identity(args.path, adapter=args.adapter)
    fields = {"model_id": identity.model_id, **msgspec.structs.asdict(identity)}
    tell(args, fields, (f"{name:20} {value}" for name, value in fields.items()))
    return 0
