"""The file in which a server keeps what its drift guard knows, from one start to the next."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from cachetree import ConfigError
from cachetree.disk import hold, new_file
from sglang_droidspeak.guard.plans import WatchedPair

_hold = functools.cache(hold)
"""Until this process ends."""
_VERSION: Final = 1
_MAX_BYTES: Final = 16 << 20


class _Record(msgspec.Struct, frozen=True):
    version: int
    pairs: tuple[WatchedPair, ...]


def read_record(path: Path) -> tuple[WatchedPair, ...]:
    """None where there is no file; raises ConfigError where it is not one of these."""
    remedy = "remove it, which puts every pair in service again, or give another guard_path"
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ConfigError(f"guard_path {path} has more than {_MAX_BYTES >> 20} MiB; {remedy}")
        record = msgspec.json.decode(raw, type=_Record)
    except FileNotFoundError:
        return ()
    except OSError as exc:
        raise ConfigError(f"guard_path {path} cannot be read: {exc.strerror}; {remedy}") from exc
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"guard_path {path} has no drift guard's record: {exc}; {remedy}"
        ) from exc
    if record.version != _VERSION:
        raise ConfigError(
            f"guard_path {path} has version {record.version}, this release {_VERSION}; {remedy}"
        )
    return record.pairs


def check_record(path: Path) -> None:
    """Keep other servers away from it while this process lives; raises ConfigError where one has
    it, where what is known cannot be read, or where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _hold(path.absolute().with_name(f".{path.name}.lock"))
        write_record(path, read_record(path))
    except BlockingIOError:
        raise ConfigError(
            f"guard_path {path} is another server's; give each server a file of its own"
        ) from None
    except OSError as exc:
        raise ConfigError(
            f"guard_path {path} cannot be written: {exc.strerror}; give a file in a folder of this "
            "user"
        ) from exc


def write_record(path: Path, pairs: Iterable[WatchedPair]) -> None:
    """Replace it as a whole, for its owner alone; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path.resolve()) as file:
        file.write(msgspec.json.encode(_Record(_VERSION, tuple(pairs))))
