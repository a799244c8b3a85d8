"""Workers and engines of one machine, described in one file: what `droidspeak up` starts.

programs:
  master: {...}       `command`, and the `port` of loopback where it answers
workers:
  shelf: {...}        as `cachetree serve --config` takes it
engines:
  reader: {...}       SGLang's options by their flag names, and `droidspeak:` for the extension
x-...: {...}          ignored; a place for YAML anchors
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cachetree import ConfigError, read_yaml, settings_of
from cachetree.cli import parse_config
from sglang_droidspeak.fleet.servers import ProgramSpec, ServerSpec, Spec, WorkerSpec
from sglang_droidspeak.start.config import parse_settings

_DEFAULT_PORT = 30000


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Program that engines need beside workers, such as the master of a store."""

    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Programs, workers and engines by name. A name is also the name of a log file."""

    programs: dict[str, Program] = {}
    workers: dict[str, dict[str, Any]] = {}
    engines: dict[str, dict[str, Any]] = {}

    def __post_init__(self) -> None:
        if not self.workers and not self.engines:
            raise ConfigError("there are no workers and no engines; describe at least one")
        names = [*self.programs, *self.workers, *self.engines]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"the name {name} is used twice; give each its own name")
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ConfigError(f"{name!r} cannot be a name; use letters, digits, - and _")
        for name, program in self.programs.items():
            if shutil.which(program.command[0]) is None:
                raise ConfigError(
                    f"programs.{name}: there is no program {program.command[0]}; install it, or "
                    "write its path"
                )
        for name, config in self.workers.items():
            parse_config(config, f"workers.{name}")
        taken: dict[int, str] = {}
        for name, options in self.engines.items():
            check_flags(f"engines.{name}", options.keys() - {"droidspeak"})
            if not isinstance(options.get("model-path"), str):
                raise ConfigError(f"engines.{name} has no model-path")
            if any(it.startswith("ssl-cert") for it in options):
                raise ConfigError(
                    f"engines.{name} has ssl-certfile, and engines are asked by http whether they "
                    "are ready; leave it out, or start this one by itself with `droidspeak serve`"
                )
            port = options.get("port", _DEFAULT_PORT)
            if not (isinstance(port, int) and 1 <= port <= 65535):
                raise ConfigError(f"engines.{name} has port {port!r}; give one of 1 to 65535")
            if port in taken:
                raise ConfigError(f"engines.{name} and engines.{taken[port]} both have port {port}")
            taken[port] = name
            if "droidspeak" in options:
                parse_settings(options["droidspeak"], f"engines.{name}.droidspeak")


def check_flags(where: str, options: Iterable[str]) -> None:
    """Raise ConfigError for an unknown option, which SGLang would refuse only after a minute."""
    known = sglang_flags()
    for option in options:
        # SGLang accepts the first letters of a flag in place of the flag.
        if known and not any(flag.startswith(option) for flag in known):
            close = difflib.get_close_matches(option, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{where} has {option}, which SGLang does not know{meant}")


@functools.cache
def sglang_flags() -> frozenset[str]:
    """Return the names of SGLang's options, read from its source: an import takes many seconds.

    A few of these names are not options. Empty if SGLang's source has another form.
    """
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        return frozenset()
    source = Path(package.origin).parent / "srt"
    text = "".join(it.read_text() for it in (source / "arg_groups").rglob("*.py"))
    text += "".join(it.read_text() for it in source.glob("server_args.py"))
    fields = re.findall(r'^    "(\w+)",$', text, re.MULTILINE)
    flags = {it.replace("_", "-") for it in fields} | set(re.findall(r'"--([\w-]+)"', text))
    return frozenset(flags | {f"no-{it}" for it in flags})


def read_fleet(path: Path) -> Fleet:
    """Read a fleet's file. Raises ConfigError naming the file and the field."""
    loaded = read_yaml(path, "fleet")
    if isinstance(loaded, dict):
        loaded = {key: value for key, value in loaded.items() if not str(key).startswith("x-")}
    return settings_of(loaded, Fleet, f"fleet {path}")


def specs(fleet: Fleet, options: Mapping[str, Any] | None = None) -> list[Spec]:
    """Return the processes to start, engines last. `options` replaces options of every engine."""
    programs = [
        ProgramSpec(name=name, command=it.command, port=it.port)
        for name, it in fleet.programs.items()
    ]
    workers = [WorkerSpec(name=name, config=it) for name, it in fleet.workers.items()]
    return [
        *programs,
        *workers,
        *(_engine(name, it | {**(options or {})}) for name, it in fleet.engines.items()),
    ]


def shared_cores(started: Sequence[Spec]) -> dict[str, str]:
    """Return environment variables with which engines on the CPU share its cores.

    By default the threads of every engine use all cores, and spin while they wait for each other.
    """
    num_engines = sum(isinstance(spec, ServerSpec) for spec in started)
    num_cores = len(os.sched_getaffinity(0)) // max(1, num_engines)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores)))}


def _engine(name: str, options: Mapping[str, Any]) -> ServerSpec:
    rest = dict(options)
    return ServerSpec(
        name=name,
        model=Path(rest.pop("model-path")),
        host=rest.pop("host", "127.0.0.1"),
        port=rest.pop("port", _DEFAULT_PORT),
        droidspeak=rest.pop("droidspeak", None),
        options=rest,
    )
