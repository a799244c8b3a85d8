"""Whether the installed SGLang is what this package was built for, and what moved if not.

What moved is found in its source, read and never imported. So a release is examined that cannot run
here, and no examination starts anything.
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
"""Functions and classes that are hooked, called or done in their place, where they are defined, and
a hash of the source of each."""
_HASH_DIGITS: Final = 12
_DEFINES: Final = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def require_supported() -> None:
    """Raise ConfigError where SGLang is another one."""
    found = version("sglang")
    if found.split("+")[0] != release.VERSION:
        raise ConfigError(
            f"sglang-droidspeak supports SGLang {release.VERSION}, found {found}; "
            f"install 'sglang=={release.VERSION}' (`droidspeak doctor --sglang` says what moved)"
        )


def installed() -> Path:
    """The folder that holds the package `sglang`."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("SGLang is not installed")
    return Path(spec.submodule_search_locations[0]).parent


def compare(root: Path) -> tuple[list[str], list[str]]:
    """What is used and the SGLang in that folder does not have, and functions and classes whose
    source there is not the one that was read; one sentence each."""
    lacking, changed = [], []
    for target, recorded in USED.items():
        try:
            found = source_hash(root, target)
        except NotThere as exc:
            lacking.append(str(exc))
            continue
        if found != recorded:
            changed.append(
                f"{target} has another source: {found}, and {recorded} in {release.VERSION}"
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
    """No such module, class or function."""


def source_hash(root: Path, target: str) -> str:
    """Of the lines of a definition, without those that are empty or comments; raises NotThere."""
    node, lines = _definition(root, target)
    start = min([node.lineno, *(it.lineno for it in node.decorator_list)])
    found = [it.strip() for it in lines[start - 1 : node.end_lineno]]
    text = "\n".join(it for it in found if it and not it.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def fields(root: Path, target: str) -> set[str]:
    """Names in a class's own body, or given to `self` in it; raises NotThere."""
    node, _ = _definition(root, target)
    found = set()
    for it in (*node.body, *(it for it in ast.walk(node) if isinstance(it, ast.Attribute))):
        match it:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def _definition(root: Path, target: str) -> tuple[ast.ClassDef, Sequence[str]]:
    """Of `package.module.name` or `package.module.Class.name`, where it is defined, and the lines
    of its file."""
    *above, name = target.split(".")
    num_modules = next((i for i, it in enumerate(above) if it[0].isupper()), len(above))
    try:
        node, lines = _module(root.joinpath(*above[:num_modules]))
    except OSError:
        raise NotThere(f"there is no {target}") from None
    for each in (*above[num_modules:], name):
        # The outermost of them: not one within another function or class.
        defined = (it for it in ast.walk(node) if isinstance(it, _DEFINES) and it.name == each)
        if (node := next(defined, None)) is None:
            raise NotThere(f"there is no {target}")
    return node, lines


@functools.lru_cache(maxsize=256)
def _module(path: Path) -> tuple[ast.Module, Sequence[str]]:
    file = path.with_suffix(".py")
    text = (file if file.is_file() else path / "__init__.py").read_text()
    return ast.parse(text), text.splitlines()
