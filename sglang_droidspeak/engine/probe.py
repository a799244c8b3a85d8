"""Whether the installed SGLang is what this package was built for, and what moved if not.

What moved is found in its source, read and never imported. So a release is examined that cannot run
here, and no examination starts anything.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from cachetree import ConfigError
from sglang_droidspeak.engine import release

_HASH_DIGITS: Final = 12
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


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


class NotThere(LookupError):
    """No such module, class or function."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or a class."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    module: Module

    @property
    def hash(self) -> str:
        """Of the lines of its source, without those that are empty or comments."""
        start = min([self.node.lineno, *(it.lineno for it in self.node.decorator_list)])
        lines = [it.strip() for it in self.module.lines[start - 1 : self.node.end_lineno]]
        text = "\n".join(it for it in lines if it and not it.startswith("#"))
        return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]

    @property
    def parameters(self) -> list[str]:
        """Of the call; of a class without an initialiser its fields."""
        if isinstance(self.node, ast.ClassDef):
            return sorted(self.fields)
        args = self.node.args
        return [it.arg for it in (*args.posonlyargs, *args.args, *args.kwonlyargs)]

    @property
    def fields(self) -> frozenset[str]:
        """Names in the class's body, or given to `self`, here and in the classes that it extends
        and that can be read."""
        assert isinstance(self.node, ast.ClassDef)
        found = {name for it in self.node.body for name in _bound(it)}
        for it in ast.walk(self.node):
            match it:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
        for base in self.bases():
            found |= base.fields
        return frozenset(found)

    def bases(self) -> Iterator[Definition]:
        for base in getattr(self.node, "bases", ()):
            if isinstance(base, ast.Name):
                try:
                    definition = self.module.find(base.id)
                except NotThere:
                    continue  # Of a library.
                if isinstance(definition.node, ast.ClassDef):
                    yield definition


@dataclass(frozen=True)
class Module:
    """One file of a package that lies in `root`."""

    name: str
    root: Path
    lines: Sequence[str]
    names: Mapping[str, ast.stmt]
    """By name what binds it at the top of the module, under conditions too: the last one, and a
    definition before an assignment."""

    def find(self, name: str) -> Definition:
        """Raises NotThere; follows imports from other modules of the package."""
        found = self.names.get(name)
        if isinstance(found, (*_Function, ast.ClassDef)):
            return Definition(found, self)
        if isinstance(found, ast.ImportFrom) and found.module and not found.level:
            original = next(it.name for it in found.names if (it.asname or it.name) == name)
            return module(self.root, found.module).find(original)
        raise NotThere(f"{self.name} has no {name}")


@functools.lru_cache(maxsize=256)
def module(root: Path, name: str) -> Module:
    """Raises NotThere."""
    base = root.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            text = path.read_text()
            statements = sorted(
                _statements(ast.parse(text)),
                key=lambda it: isinstance(it, (*_Function, ast.ClassDef)),
            )
            bound = {name: it for it in statements for name in _bound(it)}
            return Module(name, root, text.splitlines(), bound)
    raise NotThere(f"there is no module {name}")


def definition(root: Path, target: str) -> Definition:
    """Of `package.module.name` or `package.module.Class.name`; raises NotThere."""
    above, _, name = target.rpartition(".")
    if not above.rpartition(".")[2][:1].isupper():
        return module(root, above).find(name)
    return _member(definition(root, above), name, target)


def _member(owner: Definition, name: str, target: str) -> Definition:
    for it in owner.node.body:
        if isinstance(it, _Function) and it.name == name:
            return Definition(it, owner.module)
    for base in owner.bases():
        try:
            return _member(base, name, target)
        except NotThere:
            continue
    raise NotThere(f"there is no {target}")


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """At the top of a module, and in its conditions."""
    for field in ("body", "orelse", "handlers", "finalbody"):
        for it in getattr(node, field, ()):
            if isinstance(it, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
                yield from _statements(it)
            else:
                yield it


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (*_Function, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (it.asname or it.name for it in statement.names)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (it.id for it in targets if isinstance(it, ast.Name))
