"""What benchmarks found of fleets, as tables: a head and rows each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tools.study_tables import Table

RESULTS: Final = Path(__file__).resolve().parent.parent / "benchmarks/results"


def size() -> Table:
    """One engine in fleets of several sizes, and how each figure grows with the workers."""
    found = json.loads((RESULTS / "fleet_size.json").read_bytes())
    rows = [
        [
            f"{it['workers']}",
            f"{it['pages']:,}",
            f"{it['memory_bytes'] / 1e6:.1f}",
            f"{it['messages_per_s']:.0f}",
            f"{it['bytes_per_s'] / 1e3:.0f}",
            f"{it['cpu_share']:.1%}",
            *(f"{it[f'{of}_p99_us']:.0f}" for of in ("one", "all", "nobody")),
            f"{it['commands_per_s']:.0f}",
        ]
        for it in found["rows"]
    ]
    grows = found["exponents"]
    figures = ("memory_bytes", "messages_per_s", "bytes_per_s", "cpu_share")
    figures = (*figures, "one_p99_us", "all_p99_us", "nobody_p99_us", "commands_per_s")
    grown = (f"{grows[it]:.2f}" if it in grows else "–" for it in figures)
    rows.append(["grows as workers to the", "", *grown])
    head = ["workers", "pages", "memory, MB", "messages/s", "kB/s", "of a core"]
    head += [f"lookup p99, µs: {it}" for it in ("one has it", "all", "nobody")]
    return [*head, "commands/s to Redis"], rows


def shared_tier() -> Table:
    """Where a receiver finds the same documents, and how soon it answers."""
    lines = (RESULTS / "shared_tier.jsonl").read_text().splitlines()
    rows = [
        [
            f"`{it['where']}`",
            f"{it['fetched_mb']:.0f}",
            f"{it['gb_per_s']:.2f}",
            f"{it['ttft_p50_ms']:,.0f}",
            f"{it['off_ttft_p50_ms']:,.0f}",
            f"{it['paired_ratio']:.2f}",
        ]
        for it in map(json.loads, lines)
    ]
    head = ["read from", "MB", "GB/s", "TTFT, ms", "full prefill, ms", "TTFT of full prefill's"]
    return head, rows
