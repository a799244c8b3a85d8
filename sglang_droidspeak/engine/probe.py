"""Check that the installed SGLang is the supported release, and list how another release differs.

The other release is read as source and never imported, so that it need not run on this machine.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from cachetree import ConfigError
from sglang_droidspeak.engine import release

USED: Final[Mapping[str, str]] = json.loads(Path(release.__file__).with_suffix(".json").read_text())
"""Functions and classes of SGLang that this package hooks, calls or replaces, each with a hash of
its source. A name begins with the module that defines it."""
_HASH_DIGITS: Final = 12
_DEFINES: Final = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def require_supported() -> None:
    """Raise ConfigError if the installed SGLang is another release."""
    present = version("sglang")
    if present.split("+")[0] != release.VERSION:
        raise ConfigError(
            f"sglang-droidspeak supports SGLang {release.VERSION}, found {present}; "
            f"install 'sglang=={release.VERSION}' (`droidspeak doctor --sglang` says what changed)"
        )


def installed() -> Path:
    """Return the folder that contains the installed package `sglang`."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("SGLang is not installed")
    return Path(spec.submodule_search_locations[0]).parent


def compare(root: Path) -> tuple[list[str], list[str]]:
    """Compare the SGLang in folder `root` with the names and sources that this package uses.

    Return two lists of sentences: about missing names, and about definitions that have changed.
    """
    lacking, changed = [], []
    for target, recorded in USED.items():
        try:
            present = source_hash(root, target)
        except NotThere as exc:
            lacking.append(str(exc))
            continue
        if present != recorded:
            changed.append(
                f"{target} has another source: {present}, and {recorded} in {release.VERSION}"
            )
    for target, names in release.FIELDS.items():
        try:
            missing = set(names.split()) - fields(root, target)
        except NotThere as exc:
            lacking.append(str(exc))
            continue
        if missing:
            lacking.append(f"{target} has no {', '.join(sorted(missing))}")
    return lacking, changed


class NotThere(LookupError):
    """The source lacks the named module, class or function."""


def source_hash(root: Path, target: str) -> str:
    """Hash the lines of a definition, without empty lines and comments. Raises NotThere."""
    node, lines = _definition(root, target)
    start = min([node.lineno, *(it.lineno for it in node.decorator_list)])
    stripped = [it.strip() for it in lines[start - 1 : node.end_lineno]]
    text = "\n".join(it for it in stripped if it and not it.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def fields(root: Path, target: str) -> set[str]:
    """Return the names that a class defines in its body, or assigns as attributes of `self`. Raises
    NotThere."""
    node, _ = _definition(root, target)
    names = set()
    for item in (*node.body, *(it for it in ast.walk(node) if isinstance(it, ast.Attribute))):
        match item:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def _definition(root: Path, target: str) -> tuple[ast.ClassDef, Sequence[str]]:
    """Find the definition of `package.module.name` or `package.module.Class.name`. Returns its node
    and the lines of its file. Raises NotThere."""
    *above, name = target.split(".")
    num_modules = next((i for i, it in enumerate(above) if it[0].isupper()), len(above))
    try:
        node, lines = _module(root.joinpath(*above[:num_modules]))
    except OSError:
        raise NotThere(f"there is no {target}") from None
    for each in (*above[num_modules:], name):
        # The first match is the outermost definition, not one inside another function or class.
        defined = (it for it in ast.walk(node) if isinstance(it, _DEFINES) and it.name == each)
        if (node := next(defined, None)) is None:
            raise NotThere(f"there is no {target}")
    return node, lines


@functools.lru_cache(maxsize=256)
def _module(path: Path) -> tuple[ast.Module, Sequence[str]]:
    file = path.with_suffix(".py")
    text = (file if file.is_file() else path / "__init__.py").read_text()
    return ast.parse(text), text.splitlines()
