"""The profiler computes the same with other releases of transformers than SGLang's: earlier ones
that a user may have, and the next ones.

Each release is installed into a folder of its own, together with packages that it needs in another
version. The tests of tiny models of all families run with it in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[2]
OTHER = ["5.0", "5.23"]
TESTS = [
    "test_mixtures.py",
    "test_oracle.py",
    "test_profiler_families.py",
    "test_models.py::test_a_model_is_what_transformers_loads",
    "test_models.py::test_an_adapter_is_applied_as_peft_does",
    "test_models.py::test_adapters_on_one_base_share_what_they_do_not_touch",
]
KERNELS, HUB, TOKENIZERS = "kernels", "huggingface-hub", "tokenizers"

RUN_TESTS = """
import sys, pytest, transformers
print("TRANSFORMERS", transformers.__version__, transformers.__file__, flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


def install(folder: Path, *requirements: str) -> None:
    """Install packages into a folder. Skip the test if no package index can be reached."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", str(folder), *requirements],
        capture_output=True,
        text=True,
    )
    if "No module named pip" in done.stderr or "(from versions: none)" in done.stderr:
        reason = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"{' '.join(requirements)} cannot be fetched from a package index: {reason}")
    assert done.returncode == 0, done.stderr


def install_release(folder: Path, release: str) -> Distribution:
    """Install the newest patch of a release of transformers, and what it needs."""
    install(folder, f"transformers=={release}.*")
    (transformers,) = distributions(path=[str(folder)])
    if missing := missing_requirements(transformers):
        install(folder, *missing)
    return transformers


def missing_requirements(transformers: Distribution) -> list[str]:
    """Return the packages that this release of transformers needs in another version than the
    installed one.

    The release refuses to be imported with a version of huggingface_hub or tokenizers that it does
    not name. If the package kernels is installed, the release uses it, and kernels cannot be
    imported with a huggingface_hub that is too old for it.
    """
    named = {it.name: it.specifier for it in map(Requirement, transformers.requires or ())}
    wanted = [it for it in (HUB, TOKENIZERS) if not named[it].contains(version(it))]
    if HUB in wanted:
        wanted.append(KERNELS)
    return [f"{it}{named[it]}" for it in wanted]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that is removed right after the test, because it holds 130 MB."""
    with tempfile.TemporaryDirectory(prefix="droidspeak-transformers-") as name:
        yield Path(name)


def run(folder: Path, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("release", OTHER)
def test_another_release_computes_what_the_oracle_does(release, folder):
    transformers = install_release(folder, release)
    tests = [str(ROOT / "tests" / "profiles" / it) for it in TESTS]
    done = run(folder, RUN_TESTS, "-q", "--tb=short", *tests)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    _, used, file = done.stdout.splitlines()[0].split(maxsplit=2)
    assert used == transformers.version
    assert used.startswith(f"{release}.")
    assert Path(file).is_relative_to(folder)
