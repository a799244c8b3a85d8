"""`make bench` runs all benchmarks even if one fails, and the page lists them."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import beside, result

PAGE = Path(bench.__file__).with_name("README.md").read_text()
RESULTS = sorted(Path(bench.__file__).parent.glob("results/**/*.json"))


def test_one_that_fails_does_not_stop_the_others_and_is_told(monkeypatch, capsys):
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


def test_a_process_that_fails_or_takes_too_long_is_no_success(monkeypatch, capfd):
    assert bench.run("platform")
    assert not bench.run("benchmarks.no_such_script")
    monkeypatch.setattr(bench, "MOST_S", 0.0)
    assert not bench.run("platform")
    assert "took too long" in capfd.readouterr().out


def test_rows_of_what_is_not_here_today_stay_with_where_they_were_measured(tmp_path):
    file, today = tmp_path / "rows.json", result.here()
    known = [{"where": it, "gb_per_s": 1, "environment": {}} for it in ("file", "mooncake")]
    file.write_text(json.dumps({"rows": known}))
    one, other = result.with_others([{"where": "file", "gb_per_s": 2}], "where", today, file)
    assert (one["where"], one["gb_per_s"]) == ("file", 2)
    assert one["environment"]["processor"] == today.processor
    assert other == known[1]


def test_the_page_marks_what_is_run():
    marked = re.findall(r"(?m)^\| `(\w+)` \* \|", PAGE)
    assert set(marked) == bench.NAMES.keys()
    assert all(find_spec(f"benchmarks.{name}") for name in bench.NAMES)


@pytest.mark.parametrize("file", RESULTS, ids=lambda it: it.stem)
def test_no_two_numbers_of_a_result_have_one_name(file):
    names = [name for name, _ in beside.numbers(json.loads(file.read_text()))]
    assert len(names) == len({*names}) > 0


def test_rows_are_named_by_what_they_are_of_where_each_says_another():
    rows = [{"what": it, "s": 1} for it in ("read", "write")]
    assert [*beside.numbers({"rows": rows})] == [("rows read / s", 1), ("rows write / s", 1)]
