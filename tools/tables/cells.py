"""Tables and sentences of results: every number is put in by a format string.

A field names its way into a row of JSON: `{ttft_p50_ms:,.0f}`, `{idle_ttft_ms[full reuse]:.2f}`,
`{p90_interval[0]}`. `!k` is a thousandth (ms to s, kB to MB, MB to GB), `!M` a millionth, `!c` the
beginning of a commit, with the `+` of uncommitted changes. What is missing or null is a dash.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).resolve().parents[2] / "benchmarks/results"

Row = Mapping[str, Any]
Columns = Mapping[str, str]
"""Of a table: each head, and what stands below it."""


class _Cells(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):
            return None, field_name

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is None or value is None:
            return value
        if conversion == "c":
            return value[:7] + "+" * value.endswith("+") or "unknown"
        return value / {"k": 1e3, "M": 1e6}[conversion]

    def format_field(self, value: Any, format_spec: str) -> str:
        return "–" if value is None else str(super().format_field(value, format_spec))


_CELLS: Final = _Cells()


def told(text: str, row: Row) -> str:
    """The text with the row's numbers in it."""
    return _CELLS.vformat(text, (), row)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (" | ".join(row) for row in (head, ["---"] * len(head), *rows))
    return "".join(f"| {line} |\n" for line in lines)


def of_rows(rows: Iterable[Row], columns: Columns) -> str:
    cells = ([_cell(it, row) for it in columns.values()] for row in rows)
    return table(list(columns), cells)


def _cell(text: str, row: Row) -> str:
    """One dash where all that it names is missing."""
    found = told(text, row)
    return "–" if "–" in found and not any(map(str.isalnum, found)) else found


def named(groups: Mapping[str, Iterable[Row]]) -> Iterator[dict[str, Any]]:
    """The rows of every contender, each with its name."""
    for name, rows in groups.items():
        for row in rows:
            yield {"contender": name, **row}


def read(name: str) -> Any:
    """`results/NAME.json`, or the lines of a log, `results/NAME.jsonl`."""
    log = RESULTS / f"{name}.jsonl"
    if log.exists():
        return [json.loads(line) for line in log.read_text().splitlines()]
    return json.loads((RESULTS / f"{name}.json").read_bytes())


def counted(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{num} `{outcome}`" for outcome, num in outcomes.items())


def where(found: Row) -> str:
    """What a result, or each part of it, was measured on, and whether anything else ran there."""
    parts = [it for value in found.values() if isinstance(value, list) for it in value]
    runs = [found] if "environment" in found else parts
    runs = [it for it in runs if isinstance(it, Mapping) and "environment" in it]
    text = (
        "{processor}, {num_cores} cores, load before the run {load_before:.1f}, commit {commit!c}"
    )
    return "; ".join(dict.fromkeys(told(text, it["environment"]) for it in runs))
