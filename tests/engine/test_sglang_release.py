"""The records of SGLang agree with the installed release, are complete, and name what has moved."""

from __future__ import annotations

import ast
import shutil
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from sglang_droidspeak.cli import main
from sglang_droidspeak.engine import probe, release
from sglang_droidspeak.engine.probe import NotThere, fields, source_hash
from sglang_droidspeak.start.refuse import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
OF = "sglang.srt.managers.schedule_batch"
STREAM = "sglang.srt.layers.layer_boundary.residual.batch"
CLASSES = {
    # name of a variable in the extension: whose fields are read there
    "req": ("Req",),
    "batch": ("ScheduleBatch", "ForwardBatch"),
    "replay": ("ScheduleBatch",),
    "forward_batch": ("ForwardBatch",),
    "runner": ("ModelRunner",),
    "scheduler": ("Scheduler",),
    "grammars": ("GrammarManager",),
    "adder": ("PrefillAdder",),
    "transfer": ("PoolTransfer",),
    "lora_ref": ("LoRARef",),
    "manager": ("LoRAManager", "TokenizerManager"),
}
OURS = {"has_own_e"}
"""Attributes that the extension itself writes to SGLang's objects."""
PUT_TOGETHER = {"get_internal_state_communicator"}
"""Names that SGLang puts together at run time, so that no search finds them. The functions that use
them are recorded."""
CALLED_FOR_WHAT_IT_IS = {"envs", "app"}
"""Names that need no record: the settings, which are used by name, and FastAPI's app."""


def test_the_installed_release_is_the_recorded_one():
    assert probe.compare(probe.installed()) == ([], [])


@pytest.mark.parametrize("folder", [".", "platforms/torch_cpu"])
def test_the_extra_installs_the_tested_release_and_nothing_else_installs_any(folder):
    """If another release such as a `.post1` or a vendor's build is installed, an installation
    without the extra leaves it in place."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["sglang"] == [f"sglang=={release.VERSION}"]
    assert not any(it.startswith("sglang") for it in project["dependencies"])


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return a folder with the recorded parts of the installed SGLang's batches, in two files."""
    for target in (OF, STREAM):
        path = Path(*target.split(".")).with_suffix(".py")
        (tmp_path / path).parent.mkdir(parents=True)
        shutil.copy(probe.installed() / path, tmp_path / path)
    return tmp_path


def test_what_moved_is_told_in_a_line_each(other, monkeypatch, capsys):
    used = {it: told for it, told in probe.USED.items() if ".Req." in it or ".residual." in it}
    fields = {it: told for it, told in release.FIELDS.items() if it.endswith(".Req")}
    monkeypatch.setattr(probe, "USED", used)
    monkeypatch.setattr(release, "FIELDS", fields)
    assert main(["doctor", "--sglang", str(other)]) == 0

    file = other / Path(*OF.split(".")).with_suffix(".py")
    text = file.read_text()
    text = text.replace("def _compute_max_prefix_len(", "def _max_prefix_len(")
    text = text.replace("self.cache_salt =", "self.salt =")
    text = text.replace("def refresh_fill_ids(self", "def refresh_fill_ids(self, more=()")
    file.write_text(text)
    (other / "sglang/srt/layers/layer_boundary/residual/batch.py").unlink()
    probe._module.cache_clear()
    capsys.readouterr()
    assert main(["doctor", "--sglang", str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *(f"there is no {STREAM}.{it}" for it in ("set_written", "start", "clear")),
        f"there is no {OF}.Req._compute_max_prefix_len",
        f"{OF}.Req has no cache_salt",
        f"{OF}.Req.refresh_fill_ids has another source",
        f"{OF}.Req.__init__ has another source",
        "5 missing, 2 changed since SGLang 0.5.23, of 7 functions and classes, and the fields of 1",
    ]


def test_a_folder_without_sglang_is_refused(tmp_path, capsys):
    assert main(["doctor", "--sglang", str(tmp_path)]) == 1
    assert "has no folder `sglang`" in capsys.readouterr().err


def test_every_field_that_is_read_of_sglangs_objects_is_recorded():
    recorded = {it.rpartition(".")[2]: set(names.split()) for it, names in release.FIELDS.items()}
    used = {it.rpartition(".")[2] for it in probe.USED}
    missing = [
        f"{path.name}: {node.value.id}.{node.attr}"
        for path in sorted((ROOT / "sglang_droidspeak").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if (of := CLASSES.get(node.value.id)) is not None
        if node.attr not in used | OURS | PUT_TOGETHER
        and not any(node.attr in recorded[it] for it in of)
    ]
    assert missing == []


def nodes() -> list[ast.AST]:
    """Return the syntax nodes of all modules of the extension."""
    files = sorted((ROOT / "sglang_droidspeak").rglob("*.py"))
    return [node for file in files for node in ast.walk(ast.parse(file.read_text()))]


def test_whatever_is_called_is_recorded():
    """The record has every function and class that a module of the extension imports and calls,
    `f()`, or calls as an attribute of an import, `c.f()`."""
    names, everywhere = set(), nodes()
    calls = {ast.unparse(node.func) for node in everywhere if isinstance(node, ast.Call)}
    for node in everywhere:
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")):
            continue
        for alias in node.names:
            name = alias.asname or alias.name
            for call in calls if name not in CALLED_FOR_WHAT_IT_IS else ():
                if call.partition(".")[0] == name and "(" not in call:
                    place = node.module + "." + alias.name + call.removeprefix(name)
                    function = resolve_name(place)
                    if getattr(function, "__module__", "").startswith("sglang."):
                        names.add(f"{function.__module__}.{function.__qualname__}")
    assert {f"{STREAM}.start", f"{OF}.ScheduleBatch.init_new"} <= names
    made = {it.removesuffix(".__init__") for it in probe.USED}
    assert names - made == set()


def test_whatever_is_called_of_its_objects_is_recorded():
    used = {it.rpartition(".")[2] for it in probe.USED}
    missing = [
        ast.unparse(node.func)
        for node in nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id in CLASSES
        if node.func.attr not in used | PUT_TOGETHER
    ]
    assert missing == []


def test_the_forwards_of_models_whose_layers_are_run_are_recorded():
    """The record has the loop over the layers and the forward of one layer, for each supported
    class."""
    folder, names = "sglang.srt.models", set()
    for path in sorted(probe.installed().joinpath(*folder.split(".")).glob("*.py")):
        text = path.read_text()
        if not any(f"class {it}(" in text for it in ARCHITECTURES):
            continue
        names |= {
            f"{folder}.{path.stem}.{it.name}.forward"
            for it in ast.parse(text).body
            if isinstance(it, ast.ClassDef) and it.name.endswith(("Model", "DecoderLayer"))
            if any(isinstance(of, ast.FunctionDef) and of.name == "forward" for of in it.body)
        }
    assert len(names) > 15
    assert names - probe.USED.keys() == set()


def test_a_name_is_found_where_it_is_defined(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.py").write_text(
        "if True:\n    class A:\n        x: int = 0\n        y = 1\n"
        "        def f(self):\n            def g(): pass\n            z = self.w = 2\n"
        "def g(): return 1\n"
    )
    (tmp_path / "p/b.py").write_text("# Moved.\n\n@once\ndef g():\n    return 1\n")
    assert fields(tmp_path, "p.a.A") == {"f", "w", "x", "y"}
    assert source_hash(tmp_path, "p.a.g") != source_hash(tmp_path, "p.b.g")
    before = source_hash(tmp_path, "p.b.g")
    (tmp_path / "p/b.py").write_text("@once\n\n# Of what?\ndef g():\n    return 1\n")
    probe._module.cache_clear()
    assert source_hash(tmp_path, "p.b.g") == before
    for missing in ("p.a.h", "p.a.A.h", "p.a.B.f", "p.c.h"):
        with pytest.raises(NotThere):
            source_hash(tmp_path, missing)
