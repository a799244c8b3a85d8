"""No measured number is typed by hand on the pages that say what was measured.

A measured number is one with a unit, or one with a decimal fraction. It may stand in a part that
is made from results (`tools.tables`), in code, or be one of the exceptions below. What is a goal, a
limit or a setting belongs to the script, setting or test that holds it.
"""

from __future__ import annotations

import re

import pytest

from tools.reference import ROOT
from tools.tables import fill, where

EXCEPTIONS = {
    "README.md": {
        "SGLang 0.5.23": "a version: the one that is supported",
        "Python 3.11": "a version",
        "Apache-2.0": "a licence",
    },
    "benchmarks/README.md": {},
    **{f"docs/results/{it.name}": {} for it in (ROOT / "docs/results").glob("*.md")},
    "docs/results/corrected-e.md": {"95 % interval": "a level", "arXiv 2608.03893": "a paper"},
}
"""Texts that are no measurement, each with the reason."""
NOT_TYPED = re.compile(
    r"""(?x)
      <!--\ made:.*?<!--\ end\ -->   # made from results, or from code
    | ```.*?```                      # a command, a picture, a configuration
    | `[^`\n]*`                      # code
    | (?<=\])\([^)\n]*\)             # where a link leads
    """,
    re.DOTALL,
)
MEASURED = re.compile(
    r"""(?x)
      \d[\d,.]* \s* (?:
          % | × | percent\b | times\b
        | [nµum]?s\b | seconds?\b | minutes?\b | min\b | hours?\b
        | [kKMGT]i?B(?:/s)?\b | (?:tokens|requests|pages)/s\b
      )
    | \d+\.\d+
    """
)


def measured(text: str) -> list[str]:
    """Return the numbers of a page that were typed by hand."""
    return [it.group() for it in MEASURED.finditer(NOT_TYPED.sub("", text))]


@pytest.mark.parametrize("page", EXCEPTIONS)
def test_no_measured_number_is_typed(page):
    text = (ROOT / page).read_text()
    for exception in EXCEPTIONS[page]:
        assert exception in text, "an exception for nothing"
        text = text.replace(exception, "")
    assert measured(text) == []


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("It takes 3.5 s", ["3.5 s"]),
        ("2 ms, 40%, 7 %, 1.5 ×", ["2 ms", "40%", "7 %", "1.5 ×"]),
        ("1,024 MiB at 3 GB/s", ["1,024 MiB", "3 GB/s"]),
        ("an F1 of 0.98", ["0.98"]),
        ("12 layers × 768, 3 servers, figure 13, commit 9dc6939", []),
        ("`--pace 3.5`, [2.5 s](a.md)", ["2.5 s"]),
        ("<!-- made: x -->\n| 1 ms |\n<!-- end -->", []),
        ("```bash\nsleep 2.5\n```", []),
    ],
)
def test_measured_numbers_are_recognised(text, numbers):
    assert measured(text) == numbers


def test_a_result_says_where_each_of_its_parts_was_measured():
    runs = [
        {"processor": "A", "num_cores": 2, "load_before": 0.5, "commit": commit}
        for commit in ("0123456789", "abcdefghij+", "")
    ]
    places = [f"A, 2 cores, load before the run 0.5, commit {it}" for it in ("0123456", "abcdefg+")]
    assert where({"environment": runs[1], "rows": [{"environment": runs[0]}]}) == places[1]
    rows = [{"environment": it} for it in (runs[0], runs[1], runs[0])]
    assert where({"rows": rows, "pair": "x"}) == "; ".join(places)
    assert where({"environment": runs[2]}).endswith("commit unknown")
    assert where({"rows": [1, 2]}) == ""


def test_a_cell_without_any_of_its_numbers_is_one_dash():
    row = {"a": {"b": 0.5, "c": 4}, "none": None, "said": {"reused": 3, "slower": 1}}
    assert fill("{a[b]:.0%} ({x[y]:.2f})", row, "–") == "50% (–)"
    assert fill("{x[y]:.0%} ({none:.2f})", row, "–") == "–"
    assert fill("{none!k:.0f}", row, "no alarm") == "no alarm"
    assert fill("{a[c]/a[b]:.1f} {a[c]!k} {a!n} {said!s}", row) == "8.0 0.004 2 4"
    assert fill("{said!o}", row) == "3 `reused`, 1 `slower`"
    assert fill("{a[c]/none:.1f} {x/a[c]}", row) == "– –"
