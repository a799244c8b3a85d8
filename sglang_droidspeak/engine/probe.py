"""Whether the installed SGLang is what this package was built for, and what moved if not."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from cachetree import ConfigError
from sglang_droidspeak.engine import release
from sglang_droidspeak.engine.sources import NotThere, definition


def require_supported() -> None:
    """Raise ConfigError where SGLang is another one, or lacks a function that is used."""
    found = version("sglang")
    if found.split("+")[0] != release.VERSION:
        raise ConfigError(
            f"sglang-droidspeak supports SGLang {release.VERSION}, found {found}; "
            f"install 'sglang=={release.VERSION}' (`droidspeak doctor --sglang` says what moved)"
        )
    # As it is loaded: here the server is about to import all of it, which reading would not spare.
    for target, recorded in release.USED.items():
        _, *used = recorded.split()
        try:
            loaded = inspect.unwrap(pkgutil.resolve_name(target))
            there = inspect.signature(loaded).parameters if used else ()
        except (ImportError, AttributeError) as exc:
            raise ConfigError(f"SGLang {found} has no {target}; reinstall SGLang") from exc
        if missing := [name for name in used if name not in there]:
            raise ConfigError(
                f"SGLang {found}: {target} has no parameter {', '.join(missing)}; reinstall SGLang"
            )


def installed() -> Path:
    """The folder that holds the package `sglang`."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("SGLang is not installed")
    return Path(spec.submodule_search_locations[0]).parent


def lacking(root: Path) -> Iterator[str]:
    """Names that are used and that the SGLang in that folder does not have, one sentence each."""
    needed = [(it, "parameters", told.split()[1:]) for it, told in release.USED.items()]
    needed += [(it, "fields", names.split()) for it, names in release.FIELDS.items()]
    for target, kind, names in needed:
        try:
            there = getattr(definition(root, target), kind)
        except NotThere as exc:
            yield str(exc)
            continue
        if missing := [name for name in names if name not in there]:
            what = "parameter " if kind == "parameters" else ""
            yield f"{target} has no {what}{', '.join(missing)}"


def changed(root: Path) -> Iterator[str]:
    """Functions and classes that are there and whose source is not the one that was read."""
    for target, told in release.USED.items():
        recorded, *_ = told.split()
        with suppress(NotThere):
            if (found := definition(root, target).hash) != recorded:
                yield f"{target} has another source: {found}, and {recorded} in {release.VERSION}"
