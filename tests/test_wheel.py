"""The wheel is small, has only the packages, and can run the commands without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import metadata
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cachetree", "profiles", "sglang_droidspeak")
MOST_BYTES = 1_000_000
RUN = """
import sys
from importlib.metadata import entry_points
(script,) = entry_points(group="console_scripts", name="droidspeak")
sys.exit(script.load()(sys.argv[1:]))
"""
"""The `droidspeak` script as an installer would write it."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel from a copy, because setuptools leaves folders in the tree that it builds
    from."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-cache-dir", "--quiet", "--wheel-dir", str(folder), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def droidspeak(installed: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `droidspeak` from another folder, without the repository on the path."""
    return subprocess.run(
        [sys.executable, "-c", RUN, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_is_small_and_holds_the_packages_and_nothing_else(wheel):
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as file:
        names = [PurePosixPath(it) for it in file.namelist()]
    tops = {it.parts[0] for it in names}
    assert {it for it in tops if not it.endswith(".dist-info")} == {*PACKAGES}
    files = {
        PurePosixPath(it.relative_to(ROOT).as_posix())
        for name in PACKAGES
        for it in (ROOT / name).rglob("*")
        if it.is_file() and it.suffix not in (".md", ".pyc")
    }
    assert {it for it in names if it.parts[0] in PACKAGES} == files
    assert not [it for it in names if it.suffix in (".safetensors", ".jsonl")]


def test_it_needs_the_python_of_sglang_and_pages_say_so():
    wanted = metadata("sglang")["Requires-Python"]
    for name in ("pyproject.toml", "platforms/torch_cpu/pyproject.toml"):
        assert tomllib.loads((ROOT / name).read_text())["project"]["requires-python"] == wanted
    for name in ("README.md", "docs/quickstart.md"):
        assert f"Python {wanted.removeprefix('>=')} or newer" in (ROOT / name).read_text()


def test_its_commands_run_without_the_repository(installed, tmp_path):
    version = droidspeak(installed, tmp_path, "--version")
    assert version.returncode == 0, version.stderr
    assert version.stdout.startswith("droidspeak ")
    usage = droidspeak(installed, tmp_path, "profile", "--help")
    assert usage.returncode == 0, usage.stderr
    assert "--held-out" in usage.stdout


@pytest.mark.slow
def test_the_demo_says_in_one_line_that_its_pair_is_in_the_repository(installed, tmp_path):
    done = droidspeak(installed, tmp_path, "demo", "--device", "cpu")
    assert done.returncode == 1
    (line,) = [it for it in done.stderr.splitlines() if it.startswith("droidspeak")]
    assert str(installed) in line
    assert "run the demo from a clone, or give --sender" in line
    assert not list(tmp_path.iterdir())
