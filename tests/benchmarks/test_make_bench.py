"""`make bench`: all are run, whatever becomes of one; and the page says which they are."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import __main__ as bench

PAGE = Path(bench.__file__).with_name("README.md").read_text()


def test_one_that_fails_does_not_stop_the_others_and_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(module: str, *args: str) -> bool:
        ran.append(module)
        return module != "benchmarks.serving"

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr("sys.argv", ["bench"])
    assert bench.main() == 1
    assert ran == [*(f"benchmarks.{name}" for name in bench.NAMES), "tools.reference"]
    assert capsys.readouterr().out == "failed: serving\n"
    monkeypatch.setattr("sys.argv", ["bench", "disk"])
    assert bench.main() == 0
    assert ran[-2:] == ["benchmarks.disk", "tools.reference"]


def test_a_process_that_fails_or_takes_too_long_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench.run("platform")
    assert not bench.run("benchmarks.no_such_script")
    monkeypatch.setattr(bench, "MOST_S", 0.0)
    assert not bench.run("platform")
    assert "took too long" in capfd.readouterr().out


def test_the_page_marks_what_is_run() -> None:
    marked = re.findall(r"(?m)^\| `(\w+)` \* \|", PAGE)
    assert set(marked) == bench.NAMES.keys()
    assert all(find_spec(f"benchmarks.{name}") for name in bench.NAMES)
