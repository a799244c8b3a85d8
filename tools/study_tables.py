"""What `benchmarks/serving_study` found, as tables: a head and rows each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).resolve().parent.parent / "benchmarks/results/serving_study"

Table = tuple[list[str], list[list[str]]]


def under_load() -> Table:
    """Each contender at each rate."""
    found = _read("s15")
    rows = []
    for name, of in found["rows"].items():
        for row in of:
            wait_ms = row["mean_wait_ms_in_theory"]
            expected = "–" if wait_ms is None else _seconds(wait_ms + found["idle_ttft_ms"][name])
            rows.append(
                [
                    name,
                    f"{row['load']:.1f}",
                    f"{row['request_rate']:.2f}",
                    *(_seconds(row[f"{it}_ttft_ms"]) for it in ("mean", "median", "p90", "p99")),
                    expected,
                    f"{row['median_itl_ms']:.0f} / {row['p99_itl_ms']:.0f}",
                    f"{row['attainment']:.0%}",
                    f"{row['same_answers']:.0%}",
                ]
            )
    head = ["contender", "load", "requests/s", "TTFT, mean, s", "median", "p90", "p99"]
    return [*head, "mean in theory", "TBT, ms, p50 / p99", "in time", "same answers"], rows


def served() -> Table:
    """The rate at which nine of ten requests keep the target, beside what theory allows."""
    found = _read("s15")
    alone = found["served_per_s"]["SGLang alone"]
    rows = [
        [
            name,
            _seconds(found["idle_ttft_ms"][name]),
            _seconds(found["idle_latency_ms"][name]),
            f"{rate:.2f}",
            f"{rate / alone:.2f} ×" if alone else "–",
            f"{found['bound'][name]:.2f} ×",
        ]
        for name, rate in found["served_per_s"].items()
    ]
    head = ["contender", "TTFT of an idle server, s", "whole request, s"]
    return [*head, "requests/s in time", "of SGLang alone", "bound"], rows


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.2f}"


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())
