"""`make gpu`, rehearsed: on a virtual device all parts run, and without one they say so."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from virtual_cuda import VirtualCuda

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "gpu", raising=False)
    return importlib.import_module("gpu")


def test_all_parts_run_and_nothing_races(gpu: ModuleType, monkeypatch) -> None:
    for name, value in {"HEADS": 1, "HIDDEN": 128, "LAYERS": 2, "REPEATS": 1}.items():
        monkeypatch.setattr(gpu, name, value)
    with VirtualCuda() as cuda:
        found = gpu.measure(num_tokens=16)
    assert found["captured"] == {"wrong_rows": 0}
    assert found["pinned"].keys() == {"pinned_gb_per_s", "pageable_gb_per_s"}
    assert found["overlap"].keys() == {"copies_ms", "compute_ms", "both_ms", "overlap"}
    assert not cuda.races, cuda.races[0]


def test_what_cannot_run_says_why(gpu: ModuleType) -> None:
    def part(_num_tokens: int) -> dict:
        raise RuntimeError("no device\nand more")

    assert gpu.attempt(part, 16) == {"not_run": "no device"}
