"""The operator's settings of a cache, and the files that state them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from enum import EnumType
from math import inf
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from cachetree.errors import UNREADABLE, ConfigError, written
from cachetree.transport import PeerConfig, WorkerConfig, is_directory, without_password
from cachetree.transport.address import parse_address, parse_remote
from cachetree.transport.directory import parse_directory
from cachetree.tree import Retention

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?")
"""Pattern of msgspec's error about an unknown key. Its two groups are the key, and the path of the
settings' section that has this key."""

_T = TypeVar("_T", bound=msgspec.Struct)


class CacheConfig(Retention, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one `Cache`. The inherited settings say which entries stay in memory."""

    host_bytes: int = 4 << 30
    """Largest number of bytes of the entries in this process's memory."""
    staging_bytes: int = 1 << 30
    """Largest number of bytes of all fetches that still run, or that their readers have not
    released yet."""
    disk_path: str = ""
    """Directory that keeps entries after they leave memory or this process ends; empty for none. It
    serves one family and one process at a time. Each rank of a tensor-parallel server makes a
    directory of its own in it. A killed process loses entries that were not yet written. A power
    cut may lose about the last 30 s. Checksums find damaged entries, which are dropped."""
    disk_bytes: int = 0
    """Largest number of bytes of all files in `disk_path`. Set it above `host_bytes`, because the
    disk also has all entries of the memory."""
    peers: tuple[str, ...] = ()
    """Addresses of the workers to read from: `tcp://HOST:PORT`, or `dns://NAME:PORT` for all
    addresses of a name. This cache trusts the entries of these workers, for all tenants."""
    peer_keys: dict[str, str] = msgspec.field(default_factory=dict)
    """Address of each peer, with its public key or the file that has it. Traffic with these peers
    is encrypted; this cache's own key is `peer.key_file`. Traffic with other peers is not
    encrypted. All workers behind a `dns://` address have to prove the key of that address."""
    keeps: tuple[str, ...] = ()
    """Addresses of servers to copy from, in the form of `peers`. A cache has either `keeps` or
    `peers`. This cache fetches every entry that these servers advertise in their memory, and keeps
    it after they have dropped it. They must allow this cache to read. It trusts them like
    `peers`."""
    max_pull_mb_s: float | None = None
    """Largest number of megabytes (10^6 bytes) per second that this cache reads from all servers of
    `keeps` together. None: no limit."""
    serves: bool = True
    """Whether other servers may read from this cache."""
    worker: WorkerConfig = WorkerConfig()
    """Settings for serving other servers."""
    peer: PeerConfig = PeerConfig()
    """Settings for reading from each peer."""

    def __post_init__(self) -> None:
        for field in ("host_bytes", "staging_bytes"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be 0 or more")
        super().__post_init__()
        if bool(self.disk_path) != (self.disk_bytes > 0):
            raise ConfigError(
                f"disk_path is {self.disk_path!r} and disk_bytes {self.disk_bytes}; "
                "give both, or neither"
            )
        if self.peers and self.keeps:
            raise ConfigError(
                "peers and keeps are both set, and a server that keeps copies reads from its own "
                "memory; move all addresses to keeps, or to peers if this server runs a model"
            )
        if self.max_pull_mb_s is not None and not (self.keeps and 0 < self.max_pull_mb_s < inf):
            raise ConfigError(
                f"max_pull_mb_s is {self.max_pull_mb_s}; give a finite number above 0, and keeps, "
                "or leave it out"
            )
        field = "keeps" if self.keeps else "peers"
        for address in (it for it in self.sources if self.sources.count(it) > 1):
            raise ConfigError(
                f"{field} has {without_password(address)} twice; name each worker once"
            )
        own = parse_address(self.worker.listen, field="listen")
        for address in self.sources:
            if is_directory(address):
                parse_directory(address, field=field)
            elif parse_remote(address, field=field) == own and self.serves:
                raise ConfigError(
                    f"{field} has {address}, where this server itself listens; remove it"
                )
        for address in self.peer_keys.keys() - set(self.sources):
            raise ConfigError(
                f"peer_keys has {without_password(address)}, which is not in {field}; write the "
                "same address in both"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """Addresses of workers that this cache reads from: `keeps` if set, otherwise `peers`."""
        return self.keeps or self.peers

    def peer_at(self, address: str) -> PeerConfig:
        """Return the settings for reading from this peer."""
        server_key = self.peer_keys.get(address, self.peer.server_key)
        return msgspec.structs.replace(self.peer, server_key=server_key)

    def disk_of(self, tp_rank: int, tp_size: int) -> Path:
        """Return the directory of one rank's entries."""
        path = Path(self.disk_path)
        return path if tp_size == 1 else path / f"rank{tp_rank}"


def read_yaml(path: Path, what: str) -> Any:
    """Return the content of a YAML file. None if it is empty. Raises ConfigError that names the
    file; `what` is the kind of file, for this error."""
    import yaml  # Not at the top: a program that embeds a cache reads no YAML.

    try:
        return yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError(f"{what} {written(path)} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, *UNREADABLE) as exc:
        raise ConfigError(f"{what} {path} is not YAML: {' '.join(str(exc).split())}") from exc


def settings_of(content: Any, kind: type[_T], where: str) -> _T:
    """Convert the content of a settings file, or a part of it, to the struct `kind`.

    Raises ConfigError that begins with `where` and names the key. For an unknown key, the error
    suggests the most similar known one.
    """
    try:
        return msgspec.convert(content, kind)
    except UNREADABLE as exc:
        unknown, problem = _UNKNOWN.fullmatch(str(exc)), str(exc)
        if unknown:
            problem = _meant(unknown[1], unknown[2], kind)
        elif "`$." in problem and (choices := _choices(kind, problem)):
            problem += f"; it is one of {', '.join(choices)}"
        raise ConfigError(f"{where}: {problem}") from exc
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def _choices(kind: type[msgspec.Struct], problem: str) -> list[str]:
    """Return the allowed values of the field that msgspec's error message names. Empty if the field
    takes any value of its type."""
    name = problem.rpartition("`$.")[2].rstrip("`")
    types = [it.type for it in msgspec.structs.fields(kind) if it.name == name]
    literals = [get_args(it) for it in types if get_origin(it) is Literal]
    enums = [list[str](it) for it in types if isinstance(it, EnumType)]
    return [value for values in (*literals, *enums) for value in values]


def _meant(key: str, section: str | None, kind: type[msgspec.Struct]) -> str:
    """Return the message about an unknown key. It suggests a similar key of the same section, or
    else this key in another section."""
    known = dict(_sections(kind))
    here = known.get(section or "", [])
    names = {f"{at}.{name}" if at else name: name for at in known for name in known[at]}
    close = difflib.get_close_matches(key, here, n=1)
    meant = [f"{section}.{it}" if section else it for it in close]
    meant += [it for it, name in names.items() if name == key]
    path = f"{section}.{key}" if section else key
    if meant:
        return f"there is no key {path}; did you mean {meant[0]}?"
    return f"there is no key {path}; known there: {', '.join(here)}"


def _sections(kind: type[msgspec.Struct], at: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each section of a settings struct (a path of nested fields), with its keys."""
    fields = msgspec.structs.fields(kind)
    yield at, [field.encode_name for field in fields]
    for field in fields:
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _sections(field.type, f"{at}.{field.encode_name}".lstrip("."))
