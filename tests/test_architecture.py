"""The source follows the table of imports, and packages call nothing that they must not call."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cachetree", "profiles", "sglang_droidspeak")


@dataclass(frozen=True)
class Rule:
    """Modules under one of `where`, but not under one of `unless`, import nothing of `never`."""

    where: tuple[str, ...]
    never: tuple[str, ...]
    unless: tuple[str, ...] = ()

    def covers(self, module: PurePosixPath) -> bool:
        return _is_under(module, self.where) and not _is_under(module, self.unless)


RULES = (
    Rule(where=("cachetree",), never=("sglang", "sglang_droidspeak", "profiles", "transformers")),
    # Codecs and corrections compute on tensors, the transport wraps an engine's; nothing else
    # knows of torch.
    Rule(
        where=("cachetree",),
        unless=("cachetree/transport", "cachetree/checkpoint/codecs", "cachetree/corrections"),
        never=("torch",),
    ),
    Rule(where=("cachetree",), unless=("cachetree/transport",), never=("zmq",)),
    # Only the public face and its command put the transport and the core together.
    Rule(
        where=("cachetree",),
        unless=(
            "cachetree/transport",
            "cachetree/__init__",
            "cachetree/cache",
            "cachetree/config",
            "cachetree/status",
            "cachetree/cli",
            "cachetree/metrics",
        ),
        never=("cachetree.transport", "cachetree.cache", "cachetree.config", "cachetree.cli"),
    ),
    Rule(
        where=("cachetree/transport",),
        never=("cachetree.cache", "cachetree.config", "cachetree.cli"),
    ),
    Rule(where=("profiles",), never=("sglang", "sglang_droidspeak", "zmq")),
    Rule(
        where=("profiles/data", "profiles/stats", "profiles/report"),
        never=("profiles.compute", "profiles.profiler", "profiles.costs"),
    ),
    Rule(where=("profiles/data",), never=("profiles.stats", "profiles.report")),
    Rule(where=("profiles/compute",), never=("profiles.report", "profiles.profiler")),
    Rule(where=("sglang_droidspeak",), never=("transformers", "zmq")),
    Rule(where=("sglang_droidspeak",), unless=("sglang_droidspeak/engine",), never=("sglang",)),
    # Decisions are pure: values in, a value out.
    Rule(
        where=(
            "cachetree/errors",
            "cachetree/ids",
            "cachetree/checkpoint/family",
            "cachetree/checkpoint/rope",
            "cachetree/planning",
            "cachetree/tree/hashing",
        ),
        never=("threading", "time", "socket", "asyncio", "random", "os"),
    ),
    Rule(where=PACKAGES, never=("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")),
)

CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "torch.load": "unpickles; read safetensors",
    "numpy.load": "may unpickle; read safetensors",
    "yaml.load": "builds objects; use yaml.safe_load",
    "yaml.unsafe_load": "builds objects; use yaml.safe_load",
    "yaml.full_load": "builds objects; use yaml.safe_load",
    "print": "only commands talk to a terminal",
}
MAY_PRINT = ("*/cli*", "*/demo*", "*/__main__")


def _is_under(module: PurePosixPath, places: tuple[str, ...]) -> bool:
    """Return whether the module (a path without .py) is one of these places or inside one."""
    paths = [str(path) for path in (module, *module.parents)]
    return any(fnmatchcase(path, place) for path in paths for place in places)


def _modules() -> list[PurePosixPath]:
    files = [file for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    return sorted(PurePosixPath(file.relative_to(ROOT).as_posix()) for file in files)


def imports(source: str, package: str) -> Iterator[str]:
    """Return the dotted names of everything that is imported in `source`, in functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func, {}) in (
            "__import__",
            "importlib.import_module",
        ):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def calls(source: str) -> Iterator[str]:
    """Return the dotted names of everything that is called, with the modules' real names."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {it.asname: it.name for it in node.names if it.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {it.asname or it.name: f"{node.module}.{it.name}" for it in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield _dotted(node.func, names)


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return ""


def import_offences(module: PurePosixPath, source: str) -> list[str]:
    package = ".".join(module.parent.parts)
    place = module.with_suffix("")
    return [
        f"{module} imports {name}"
        for name in imports(source, package)
        for rule in RULES
        if rule.covers(place)
        and any(name == never or name.startswith(f"{never}.") for never in rule.never)
    ]


def call_offences(module: PurePosixPath, source: str) -> list[str]:
    place = module.with_suffix("")
    return [
        f"{module} calls {name}: {CALLS[name]}"
        for name in calls(source)
        if name in CALLS and not (name == "print" and _is_under(place, MAY_PRINT))
    ]


@pytest.mark.parametrize("module", _modules(), ids=str)
def test_the_import_table_holds(module):
    source = (ROOT / module).read_text()
    assert import_offences(module, source) + call_offences(module, source) == []


def public_names(face: Path) -> set[str]:
    """Return `__all__` of a package, without importing the package."""
    for node in ast.parse(face.read_text()).body:
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def private_names(module: PurePosixPath, source: str) -> list[str]:
    """Return the names of the cache that `source` imports although no package exports them."""
    return [
        f"{module} imports {name}"
        for name in imports(source, ".".join(module.parent.parts))
        if name.startswith("cachetree.")
        for package, _, last in [name.rpartition(".")]
        for face in [ROOT / package.replace(".", "/") / "__init__.py"]
        if not face.is_file() or last not in public_names(face)
    ]


def test_the_extension_and_the_profiler_use_only_public_names_of_the_cache():
    assert [
        offence
        for module in _modules()
        if module.parts[0] != "cachetree"
        for offence in private_names(module, (ROOT / module).read_text())
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "from cachetree.tree.tree import CacheTree",
        "from cachetree.ids import Span",
        "from cachetree import tree",
        "import cachetree.cache",
        "from cachetree.tree import no_such_name",
    ],
)
def test_a_private_name_is_seen(source):
    assert len(private_names(PurePosixPath("profiles/sweep.py"), source)) == 1
    assert private_names(PurePosixPath("profiles/sweep.py"), "from cachetree import Span") == []


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return, for each module, the modules that it imports, also for type checking alone. Packages
    have their own names."""
    graph = {}
    for module, source in sources.items():
        names = set(imports(source, module.rpartition(".")[0]))
        imported = {name if name in sources else name.rpartition(".")[0] for name in names}
        graph[module] = (imported & sources.keys()) - {module}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import one another in a ring, with the first one repeated at the end.
    Without a ring, the list is empty."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return list(exc.args[1])
    return []


def _sources(package: str) -> dict[str, str]:
    """Return the sources by dotted name. A package's `__init__` has the package's name."""
    modules = [module for module in _modules() if module.parts[0] == package]
    return {_dotted_name(module): (ROOT / module).read_text() for module in modules}


def _dotted_name(module: PurePosixPath) -> str:
    return ".".join(module.with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("package", ["cachetree", "sglang_droidspeak"])
def test_no_modules_import_one_another(package):
    assert circle(import_graph(_sources(package))) == []


def test_no_folders_of_the_cache_import_one_another():
    folders: dict[str, set[str]] = {}
    for module, imported in import_graph(_sources("cachetree")).items():
        folder = ".".join(module.split(".")[:2])
        others = {".".join(name.split(".")[:2]) for name in imported} - {folder}
        folders.setdefault(folder, set()).update(others)
    assert circle(folders) == []


def test_a_circle_is_seen():
    late = "if True:\n    from p.d import x"
    sources = {"p.b": "from p import c", "p.c": late, "p.d": "def f():\n    import p.b"}
    assert set(circle(import_graph(sources))) == {"p.b", "p.c", "p.d"}
    assert circle(import_graph(sources | {"p.d": "import torch"})) == []


def test_every_folder_of_the_cache_has_a_face_and_the_top_is_small():
    top = [module for module in _modules() if module.parent == PurePosixPath("cachetree")]
    assert len(top) <= 10
    faces = (ROOT / "cachetree").rglob("__init__.py")
    assert [face for face in faces if not public_names(face)] == []


# Who is further down imports nobody who is further up.
ROOMS = ("engine", "start", "adapters", "store", "hicache", "request", "guard")


def test_rooms_of_the_extension_know_only_those_below():
    offences = [
        f"{module} imports {name}"
        for module in _modules()
        if module.parts[0] == "sglang_droidspeak" and module.parts[1] in ROOMS
        for name in imports((ROOT / module).read_text(), ".".join(module.parent.parts))
        if name.startswith("sglang_droidspeak.")
        and name.split(".")[1] in ROOMS[ROOMS.index(module.parts[1]) + 1 :]
    ]
    assert offences == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cachetree/tree/tree.py", "import torch"),
        ("cachetree/tree/tree.py", "def f():\n    import zmq"),
        ("cachetree/tree/tree.py", "from cachetree.transport import Worker"),
        ("cachetree/tree/tree.py", "from ..transport import Worker"),
        ("cachetree/tree/tree.py", "from .. import transport"),
        ("cachetree/__init__.py", "import zmq.asyncio"),
        ("cachetree/transport/worker.py", "import sglang.srt"),
        ("cachetree/transport/worker.py", "from transformers import AutoModel"),
        ("cachetree/transport/worker.py", "import pickle"),
        ("cachetree/planning/policy.py", "import time"),
        ("cachetree/cache.py", "import zmq"),
        ("profiles/sweep.py", "from sglang_droidspeak.plugin import register"),
        ("profiles/sweep.py", "__import__('sglang')"),
        ("profiles/data/tasks.py", "from profiles.stats import grid"),
        ("profiles/stats/gate.py", "from profiles.compute import Bench"),
        ("profiles/compute/study.py", "from profiles.profiler import Settings"),
        ("sglang_droidspeak/plugin.py", "from sglang.srt import server_args"),
        ("sglang_droidspeak/linker/load.py", "import importlib\nimportlib.import_module('sglang')"),
        ("sglang_droidspeak/engine.py", "import transformers"),
    ],
)
def test_a_forbidden_import_is_seen(module, source):
    assert len(import_offences(PurePosixPath(module), source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cachetree/transport/worker.py", "import zmq, torch"),
        ("cachetree/cache.py", "from cachetree.transport.worker import Worker"),
        ("cachetree/__init__.py", "from cachetree.transport import Worker"),
        ("cachetree/cli.py", "from cachetree.cache import Cache\nprint(1)"),
        ("cachetree/timely.py", "import time"),
        ("profiles/sweep.py", "import transformers, torch"),
        ("sglang_droidspeak/engine.py", "import sglang"),
        ("sglang_droidspeak/engine/hooks.py", "from sglang.srt import server_args"),
        ("sglang_droidspeak/engine/v0_5_23.py", "import sglang"),
        ("sglang_droidspeak/plugin.py", "from sglang_droidspeak.engine import hooks"),
        ("sglang_droidspeak/demo/table.py", "print(1)"),
        ("profiles/sweep.py", "model.eval()\nfile.load()\nyaml.safe_load(file)"),
    ],
)
def test_allowed_imports_pass(module, source):
    path = PurePosixPath(module)
    assert import_offences(path, source) + call_offences(path, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "import torch\ntorch.load('x')",
        "from torch import load as read\nread('x')",
        "import numpy as np\nnp.load('x')",
        "import yaml as y\ny.load('x')",
        "print(1)",
    ],
)
def test_a_forbidden_call_is_seen(source):
    assert len(call_offences(PurePosixPath("profiles/sweep.py"), source)) == 1


def many_parameters(source: str) -> Iterator[str]:
    """Return the functions that take more than six parameters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            names = [it.arg for it in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            if len([it for it in names if it not in ("self", "cls")]) > 6:
                yield node.name


def test_no_function_of_the_extension_or_the_cache_takes_more_than_six():
    offences = [
        f"{module}: {name}"
        for module in _modules()
        if module.parts[0] in ("cachetree", "sglang_droidspeak")
        for name in many_parameters((ROOT / module).read_text())
    ]
    assert offences == []


def test_a_function_that_takes_seven_is_seen():
    source = "class A:\n    def {}(self, a, b, c, d, *, e, f{}): ..."
    assert list(many_parameters(source.format("six", ""))) == []
    for seven in (source, source.replace("def", "async def")):
        assert list(many_parameters(seven.format("seven", ", g"))) == ["seven"]


def test_the_front_end_imports_no_metrics():
    """When prometheus_client is imported, it decides whether processes share their numbers. It
    reads a variable that SGLang sets only after checking its arguments."""
    modules = ("plugin", "engine.asking", "guard.shadows", "start.this_server")
    imports = "\n".join(f"import sglang_droidspeak.{it}" for it in modules)
    code = f"{imports}\nimport sys\nassert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)
