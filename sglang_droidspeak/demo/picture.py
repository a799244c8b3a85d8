"""The picture of a demo: quality on the left, time on the right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from sglang_droidspeak.demo.report import DemoReport, MeasuredPair, described, hardware
from sglang_droidspeak.demo.results import Condition

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    Condition.FULL_PREFILL: "#6b7280",
    Condition.FULL_REUSE: "#d97706",
    Condition.BLOCK: "#2563eb",
    Condition.ALL_LAYERS: "#9ca3af",
}

_NOTABLE = 1.05
"""Speed-up from which it is written."""


def draw(report: DemoReport, path: Path) -> None:
    """Write a PNG, without a display."""
    figure = Figure(figsize=(11.5, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_quality(left, report.pair)
    _draw_speed(right, report.pair)
    figure.suptitle(
        f"A prefix that another model has read: how good, how soon\n{described(report.pair)}"
    )
    figure.supxlabel(hardware(report.environment), fontsize=8, color="#555555")
    figure.savefig(path, dpi=150)


def _draw_quality(axes: Axes, part: MeasuredPair) -> None:
    values = [part.conditions[condition].quality or 0.0 for condition in Condition]
    bars = axes.bar(_labels(part.block), values, color=list(COLOURS.values()))
    axes.bar_label(bars, [f"{value:.3f}" for value in values], padding=2)
    axes.set_ylim(0, 1.12)
    axes.set_ylabel(f"{part.metric} (0 to 1)")
    axes.set_title(f"Quality: {part.num_questions} questions", fontsize=10)


def _draw_speed(axes: Axes, part: MeasuredPair) -> None:
    rows = [part.conditions[condition] for condition in Condition]
    medians = [row.ttft_p50_ms / 1000 for row in rows]
    above = [max(0.0, row.ttft_p90_ms - row.ttft_p50_ms) / 1000 for row in rows]
    bars = axes.bar(
        _labels(part.block),
        medians,
        yerr=[[0.0] * len(rows), above],
        capsize=4,
        color=list(COLOURS.values()),
        ecolor="#374151",
    )
    for bar, row, whisker in zip(bars, rows, above, strict=True):
        faster = f"\n{row.speedup:.1f} × faster" if row.speedup >= _NOTABLE else ""
        axes.annotate(
            f"{bar.get_height():.2f} s{faster}",
            (bar.get_x() + bar.get_width() / 2, bar.get_height() + whisker),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
        )
    axes.set_ylim(0, 1.2 * max(map(sum, zip(medians, above, strict=True))))
    axes.set_ylabel("time to first token in s\n(bar: median, whisker: p90)")
    axes.set_title("Speed, the same requests", fontsize=10)


def _labels(block: tuple[int, int]) -> list[str]:
    names = {Condition.BLOCK: f"block\n[{block[0]}, {block[1]})"}
    return [names.get(condition, condition.title.replace(" ", "\n")) for condition in Condition]
