"""Command `cachetree serve`: run a worker without SGLang, configured by a YAML file."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from cachetree.cache import Cache
from cachetree.checkpoint import Codec, Family, read_shape
from cachetree.cli.show import show
from cachetree.config import CacheConfig, read_yaml, settings_of
from cachetree.errors import ConfigError
from cachetree.metrics import StatusPage
from cachetree.transport import WorkerConfig, parse_http
from cachetree.transport.tracing import exported

DType = Literal["float32", "bfloat16", "float16"]


class CheckpointFamily(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a family: one of its models, and the settings with which servers run it."""

    model: str
    """Folder of the model's checkpoint. It need not contain weights."""
    kv_dtype: DType
    model_dtype: DType | None = None
    """Dtype in which the servers compute. None: `kv_dtype`, because servers by default keep KV in
    the dtype in which they compute."""
    page_size: int
    codec: Codec = Codec.NONE
    tp_size: int = 1
    tp_rank: int = 0

    def family(self) -> Family:
        return Family(
            **read_shape(Path(self.model)),
            model_dtype=self.model_dtype or self.kv_dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            codec=self.codec,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
        )


class ServedWorker(WorkerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Worker settings for `cachetree serve`. By default, everyone on this machine may evict and pin
    if there is no key (see `admin`)."""

    admin: tuple[str, ...] | None = ()


class ServedCache(CacheConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cache settings for `cachetree serve`."""

    worker: ServedWorker = ServedWorker()


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file that `cachetree serve` reads."""

    family: Family
    """Family of models that share the cache. All servers that the worker talks to must have the
    same family. The file may have the fields of a `CheckpointFamily` instead."""
    cache: ServedCache = ServedCache()
    http: str | int = ""
    """Address `HOST:PORT` of the page with /metrics and /health. A port without a host is reachable
    on this machine only. Empty: no such page."""
    traces: str = ""
    """Address `HOST:PORT` of an OpenTelemetry collector (OTLP over gRPC, not encrypted). It gets a
    span for each served fetch of a traced request. Empty: no spans."""

    def __post_init__(self) -> None:
        rank, last = self.family.tp_rank, self.family.tp_size - 1
        if rank > last:
            raise ConfigError(f"family.tp_rank is {rank}; give at most {last}, or a larger tp_size")
        known = get_args(DType)
        for field in ("model_dtype", "kv_dtype"):
            if (value := getattr(self.family, field)) not in known:
                raise ConfigError(f"family.{field} is {value!r}; give {' or '.join(known)}")
        if self.http != "":
            parse_http(self.http)


def read_config(path: Path) -> ServeConfig:
    """Read a YAML file; raises ConfigError naming the file and the field."""
    return parse_config(read_yaml(path, "config"), f"config {path}")


def parse_config(content: Any, where: str) -> ServeConfig:
    """Convert the content of a configuration file; raises ConfigError naming `where` and the
    field."""
    config = settings_of(_with_family(content, where), ServeConfig, where)
    if not config.cache.serves:
        raise ConfigError(f"{where}: cache.serves is false; remove it to serve")
    return config


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve", help="hold a cache outside of any server")
    serve.add_argument(
        "--config", type=Path, required=True, help="YAML file with the family and the cache"
    )
    serve.set_defaults(run=lambda args: run(read_config(args.config)))


def run(config: ServeConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with contextlib.ExitStack() as stack:
        wait_for_end = stack.enter_context(_told_to_end())
        note_served = stack.enter_context(exported(config.traces))
        cache = stack.enter_context(Cache(config.family, config.cache, note_served=note_served))
        show(f"serving at {cache.address}")
        if config.http != "":
            page = StatusPage(parse_http(config.http), cache.status)
            show(f"metrics and health at {stack.enter_context(page).url}")
        wait_for_end()


@contextlib.contextmanager
def _told_to_end() -> Iterator[Callable[[], object]]:
    """Yield a function that waits for Ctrl-C or SIGTERM. Only for the main thread.

    A signal before the wait ends the wait at once; later signals do nothing. We wait at a socket. A
    signal mask would not reach threads that exist already. With an event, the handler could wait
    forever for a lock that the interrupted main thread holds.
    """
    heard, said = socket.socketpair()
    with heard, said:
        said.setblocking(False)
        woken = signal.set_wakeup_fd(said.fileno(), warn_on_full_buffer=False)
        ends = signal.SIGINT, signal.SIGTERM
        before = {it: signal.signal(it, lambda *_: None) for it in ends}
        try:
            yield lambda: heard.recv(1)
        finally:
            for signal_, handler in before.items():
                signal.signal(signal_, handler or signal.SIG_DFL)
            signal.set_wakeup_fd(woken)


def _with_family(content: Any, where: str) -> Any:
    match content:
        case {"family": {"model": _, **_rest} as told}:
            named = settings_of(told, CheckpointFamily, f"{where}: family")
            try:
                return {**content, "family": msgspec.structs.asdict(named.family())}
            except ConfigError as exc:
                raise ConfigError(f"{where}: {exc}") from exc
    return content
