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
from cachetree.tree import Retention

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?")
"""msgspec's message about an unknown key."""

_T = TypeVar("_T", bound=msgspec.Struct)


class CacheConfig(Retention, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one `Cache`; those of `Retention` say what stays in its memory."""

    host_bytes: int = 4 << 30
    """Budget of the entries held here."""
    staging_bytes: int = 1 << 30
    """Budget of fetches that run or that are not yet released."""
    disk_path: str = ""
    """Directory that keeps entries after they leave memory or this process ends; empty for none. It
    serves one family and one process at a time; each rank of a tensor-parallel server makes its own
    inside. A killed process loses entries that it had not written. A power cut may lose about the
    last 30 s; damaged entries are found by checksum and dropped."""
    disk_bytes: int = 0
    """Budget of all files in `disk_path`; set it above `host_bytes`, because the disk also holds
    what memory holds."""
    peers: tuple[str, ...] = ()
    """Addresses of the workers to read from, or where to find them: `dns://NAME:PORT`, all
    addresses of a name. Each is trusted to have computed what it serves, for all tenants."""
    peer_keys: dict[str, str] = msgspec.field(default_factory=dict)
    """Public key of each peer, or the file that holds it, by the peer's address. Traffic with a
    peer that is named here is encrypted, with `peer.key_file` as own key; other traffic is not.
    Workers found by a `dns://` address have to prove the key of that address."""
    keeps: tuple[str, ...] = ()
    """Addresses of servers to copy from, in the form of `peers`. A cache has either `keeps` or
    `peers`. This cache fetches every entry that these servers advertise in their memory, and keeps
    it after they have dropped it. They must allow this server to read. Trust is as in `peers`."""
    max_pull_mb_s: float | None = None
    """Cap on the rate at which `keeps` fetches from all of them together, 10^6 bytes per second;
    None for no cap."""
    serves: bool = True
    """Whether other servers may read from this one."""
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
                "peers and keeps are both set, and what a server keeps copies of it reads here; "
                "move all of them to keeps, or to peers if this server runs a model"
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
        for address in self.sources if self.serves and own.port else ():
            if not is_directory(address) and parse_remote(address, field=field) == own:
                raise ConfigError(
                    f"{field} has {address}, where this server itself listens; remove it"
                )
        for address in self.peer_keys.keys() - set(self.sources):
            raise ConfigError(
                f"peer_keys has {without_password(address)}, which is not in {field}; write the "
                "address alike in both"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """Addresses that it reads from, for its requests or to keep copies."""
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
    """Read a YAML file, None if it is empty; raises ConfigError naming `what` and the file."""
    import yaml  # A cache that a program embeds reads none.

    try:
        return yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError(f"{what} {written(path)} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, *UNREADABLE) as exc:
        raise ConfigError(f"{what} {path} is not YAML: {' '.join(str(exc).split())}") from exc


def settings_of(content: Any, kind: type[_T], where: str) -> _T:
    """Convert the content of a file, or of a part of one, to a `kind`.

    Raises ConfigError that begins with `where`, names the key, and suggests the key that an unknown
    one may stand for.
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
    """Return the allowed words of the field that an error of msgspec names; empty if it is no
    choice."""
    name = problem.rpartition("`$.")[2].rstrip("`")
    types = [it.type for it in msgspec.structs.fields(kind) if it.name == name]
    literals = [get_args(it) for it in types if get_origin(it) is Literal]
    enums = [list[str](it) for it in types if isinstance(it, EnumType)]
    return [value for values in (*literals, *enums) for value in values]


def _meant(key: str, section: str | None, kind: type[msgspec.Struct]) -> str:
    """Return the most similar known key; keys of the same section come before others."""
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
    """Yield the keys of a struct and of structs in it, by their section."""
    fields = msgspec.structs.fields(kind)
    yield at, [field.encode_name for field in fields]
    for field in fields:
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _sections(field.type, f"{at}.{field.encode_name}".lstrip("."))
