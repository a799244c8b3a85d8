"""Files that operators write."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from cachetree.errors import ConfigError
from cachetree.unreadable import UNREADABLE, written

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?")
"""What msgspec says of a key that nobody knows."""

_T = TypeVar("_T", bound=msgspec.Struct)


def read_yaml(path: Path, what: str) -> Any:
    """What the file says, None where that is nothing; raises ConfigError naming `what` and it."""
    try:
        return yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError(f"{what} {written(path)} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, *UNREADABLE) as exc:
        raise ConfigError(f"{what} {path} is not YAML: {' '.join(str(exc).split())}") from exc


def settings_of(given: Any, kind: type[_T], where: str) -> _T:
    """What a file or a part of one says, as a `kind`.

    Raises ConfigError that begins with `where`, names the key, and says what an unknown one may
    have been meant to be.
    """
    try:
        return msgspec.convert(given, kind)
    except UNREADABLE as exc:
        unknown = _UNKNOWN.fullmatch(str(exc))
        problem = _meant(unknown[1], unknown[2], kind) if unknown else str(exc)
        raise ConfigError(f"{where}: {problem}") from exc
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def _meant(key: str, section: str | None, kind: type[msgspec.Struct]) -> str:
    """The best of the keys that are alike, those of the same section before others."""
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
    """The keys of a struct and of those in it, by where they stand."""
    fields = msgspec.structs.fields(kind)
    yield at, [field.encode_name for field in fields]
    for field in fields:
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _sections(field.type, f"{at}.{field.encode_name}".lstrip("."))
