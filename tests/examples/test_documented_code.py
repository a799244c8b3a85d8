"""Code blocks of the pages are right: commands run, settings are accepted, programs run.

`test_examples` runs blocks that need servers. Commands that take minutes (`make`, `pip`,
`droidspeak profile`, `demo` and `up`) are only parsed here; other tests run them.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml

from benchmarks.__main__ import NAMES as BENCHMARKS
from cachetree.cli import main as cachetree_main
from cachetree.cli import parser as cachetree
from cachetree.cli.serve import parse_config
from profiles.data.records import read_records
from profiles.pairs import Entry
from sglang_droidspeak.cli import main
from sglang_droidspeak.cli import parser as droidspeak
from sglang_droidspeak.fleet.fleet import sglang_flags
from sglang_droidspeak.start.config import parse_settings
from tools.real.__main__ import parser as real
from tools.reference import ROOT, pages

CHECKOUT = "/path/to/this/checkout"
PAIRS = ROOT / "examples/pairs"
STAND_INS = {
    "deploy": ROOT / "deploy",
    "examples": ROOT / "examples",
    "pair.json": PAIRS / "sender_to_receiver.json",
    **dict.fromkeys(("PATH", "models/sender"), PAIRS / "weights/sender"),
    **dict.fromkeys(("MODEL", "models/receiver"), PAIRS / "weights/receiver"),
}
"""Files in the folder where the pages' commands run."""
FIELDS = {
    "/generate": {"text", "sampling_params"},
    "/v1/chat/completions": {"model", "messages", "return_meta_info"},
}
"""Fields that a documented request may have, by endpoint."""
LANGUAGES = {"bash", "json", "python", "yaml", "text", "{toctree}"}
_ASSIGNED = re.compile(r"[A-Z_]+=")
_FENCE = re.compile(r"^ *```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Fence:
    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.text.splitlines()[0][:40]}"


def fences() -> Iterator[Fence]:
    for page in pages():
        for language, text in _FENCE.findall(page.read_text()):
            yield Fence(page, language, textwrap.dedent(text))


FENCES = list(fences())


def of(language: str) -> list[Fence]:
    return [fence for fence in FENCES if fence.language == language]


def test_every_fence_says_what_it_is():
    """Every block of code names its language, so that no command is left out here."""
    assert {fence.language for fence in FENCES} == LANGUAGES
    for page in pages():
        marks = re.findall(r"(?m)^ *```", page.read_text())
        assert len(marks) == 2 * sum(fence.page == page for fence in FENCES), page


@pytest.mark.parametrize("fence", of("json"), ids=str)
def test_data_can_be_read(fence, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(fence.text)
    assert read_records(path)


def commands(fence: Fence) -> list[list[str]]:
    """Return each command as a list of words, without comments and without the variables that it
    sets."""
    lines = fence.text.replace("\\\n", "").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [[*dropwhile(_ASSIGNED.match, words)] for words in split if words]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with the files that the pages name, and with the first part of each
    trace."""
    (tmp_path / "models").mkdir()
    for name, path in STAND_INS.items():
        (tmp_path / name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("fence", of("bash"), ids=str)
def test_commands_run(fence):
    for words in commands(fence):
        _run(words)


def _run(words: list[str]) -> None:
    match words:
        case [".", ".venv/bin/activate"]:
            assert "VENV ?= .venv\n" in (ROOT / "Makefile").read_text()
        case ["make", target, *variables]:
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"(?m)^{target}:", makefile), target
            assert all(f"$({it.partition('=')[0]})" in makefile for it in variables), variables
        case ["droidspeak", "profile", "show", _, "--verify-verdict"]:
            droidspeak().parse_args(words[1:])  # The shipped profiles are from before scores.
        case ["droidspeak", "profile", "show", *_] | ["droidspeak", "identity", *_]:
            assert main(words[1:]) == 0
        case ["droidspeak", "serve", *rest] if any("build/real" in it for it in rest):
            droidspeak().parse_args(words[1:])  # `make real` makes its models.
        case ["droidspeak", "serve", *rest]:
            assert main(["serve", "--dry-run", *rest]) == 0
        case ["droidspeak", *rest]:
            droidspeak().parse_args(rest)
        case ["cachetree", "keygen", *_]:
            assert cachetree_main(words[1:]) == 0
        case ["cachetree", *rest]:
            cachetree().parse_args(rest)
        case ["pip", "install", *packages]:
            for package in packages:
                name = re.sub(r"\[(sglang|train)]$", "", package)
                project = Path(name.replace(CHECKOUT, str(ROOT))) / "pyproject.toml"
                is_sglang = package.replace("[tracing]", "") == f"sglang=={version('sglang')}"
                assert is_sglang or project.exists() or name == "sglang-droidspeak"
        case ["python", "-m", "sglang.launch_server", first, path, *flags]:
            assert first in ("--config", "--model-path") and (path == "BASE" or Path(path).exists())
            named = {it.removeprefix("--") for it in flags if it.startswith("--")}
            assert named <= sglang_flags(), named - sglang_flags()
        case ["python", "-m", "benchmarks", *names]:
            assert set(names) <= set(BENCHMARKS)
        case ["python", "-m", module, *_] if module.startswith(("benchmarks.", "tools.pairs.")):
            assert find_spec(module), module
        case ["python", "-m", "tools.real", *rest]:
            real().parse_args(rest)
        case ["python", "examples/break_even.py", *_]:
            subprocess.run([sys.executable, *words[1:]], check=True)
        case ["curl", url, "-H", "Content-Type: application/json", "-d", body]:
            assert set(json.loads(body)) <= FIELDS[urlsplit(url).path]
        case ["kubectl", "create", "secret", "generic", _, *files]:
            assert all(Path(it.removeprefix("--from-file=")).exists() for it in files)
        case ["smg", "launch", *flags]:
            assert {"--policy", "--worker-urls"} <= {*flags}
        case ["kubectl", "apply", "-f", path] | ["python" | "bash", path]:
            assert Path(path).exists()
        case _:
            pytest.fail(f"nothing is known of {shlex.join(words)}")


@pytest.mark.parametrize("fence", of("yaml"), ids=str)
def test_settings_are_accepted(fence, monkeypatch):
    monkeypatch.chdir(ROOT)
    content = yaml.safe_load(fence.text)
    if any(name.startswith("kv-events") for name in content):
        assert content.keys() <= sglang_flags()
        return
    if "cache" in content:
        parse_config(content, str(fence))
        return
    if "base" in content:
        msgspec.convert(content, dict[str, Entry])
        return
    linker = content.get("unified-cache-external-linker-config", {"linker_extra_config": content})
    parse_settings(linker["linker_extra_config"])


@pytest.mark.parametrize("fence", of("python"), ids=str)
def test_programs_run(fence, monkeypatch):
    """Programs run, or are a part of an example that runs beside its servers."""
    monkeypatch.chdir(ROOT)
    part = textwrap.indent(fence.text, "    ")
    if not any(part in it.read_text() for it in (ROOT / "examples").glob("*.py")):
        exec(compile(fence.text, str(fence.page), "exec"), {})
