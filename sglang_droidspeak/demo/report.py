"""What a demo found: one value, as JSON, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from profiles.environment import Environment
from sglang_droidspeak.demo.results import Condition, Measured

ABSENT = "–"


class MeasuredPair(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of models, all conditions on the same documents."""

    pair: str
    """In words, for captions."""
    num_layers: int
    block: tuple[int, int]
    """Layers recomputed under `block`, half-open."""
    dtype: str
    metric: str
    """Empty where no answers are known."""
    num_documents: int
    num_questions: int
    tokens_per_document: float
    """Mean; what the sender read."""
    conditions: dict[Condition, Measured]


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """`demo.json`."""

    version: int = 2
    pair: MeasuredPair
    ceiling: MeasuredPair | None
    """Random weights: what the mechanism can save where a pair needs few layers, and nothing about
    quality. None for a user's own pair."""
    failures: list[str]
    """Checks that did not hold; empty for a demo that counts."""
    elapsed_s: float
    environment: Environment


def write_json(report: DemoReport, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def table_of(report: DemoReport) -> Table:
    """The pair, a row per condition; the ceiling is a line below."""
    pair = report.pair
    table = Table(
        title="One receiver, four ways to read a document that another model has read",
        caption="\n".join(_captions(report)),
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("condition", no_wrap=True)
    for title in (
        pair.metric,
        "TTFT\np50 ms",
        "TTFT\np90 ms",
        "faster",
        "tokens\nreused",
        f"layers\nof {pair.num_layers}",
        "MB\nmoved",
        "overlap",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for condition in Condition:
        found = pair.conditions[condition]
        # A full prefill's layers are in no provenance.
        is_full = condition is Condition.FULL_PREFILL
        num_computed = pair.num_layers if is_full else found.layers_recomputed
        # Overlap means something only where there is both a fetch and a recompute.
        has_both = found.bytes_moved and found.layers_recomputed
        table.add_row(
            condition.title,
            ABSENT if found.quality is None else f"{found.quality:.3f}",
            f"{found.ttft_p50_ms:,.0f}",
            f"{found.ttft_p90_ms:,.0f}",
            f"{found.speedup:.1f} ×",
            f"{found.tokens_reused:,.0f}" if found.tokens_reused else ABSENT,
            f"{num_computed:.0f}",
            f"{found.bytes_moved / 1e6:,.1f}" if found.bytes_moved else ABSENT,
            f"{found.overlap:.0%}" if has_both else ABSENT,
        )
    return table


def _captions(report: DemoReport) -> list[str]:
    lines = [f"{report.pair.num_questions} questions, {described(report.pair)}"]
    if report.ceiling is not None:
        full, block = (
            report.ceiling.conditions[it] for it in (Condition.FULL_PREFILL, Condition.BLOCK)
        )
        lines += [
            f"The mechanism's ceiling, time alone: {described(report.ceiling)}: "
            f"{full.ttft_p50_ms:,.0f} ms by full prefill, {block.ttft_p50_ms:,.0f} with the "
            f"block, {block.speedup:.1f} × faster"
        ]
    return [*lines, hardware(report.environment)]


def described(part: MeasuredPair) -> str:
    return (
        f"{part.num_documents} documents of {part.tokens_per_document:,.0f} tokens, {part.pair}, "
        f"block [{part.block[0]}, {part.block[1]}) of {part.num_layers} layers, {part.dtype}"
    )


def hardware(environment: Environment) -> str:
    where = environment.accelerator or environment.processor
    return (
        f"{where}, {environment.num_cores} cores, load before the run {environment.load_before:.1f}"
    )


COLOURS = {
    Condition.FULL_PREFILL: "#6b7280",
    Condition.FULL_REUSE: "#d97706",
    Condition.BLOCK: "#2563eb",
    Condition.ALL_LAYERS: "#9ca3af",
}

_NOTABLE = 1.05
"""Speed-up from which it is written."""


def draw(report: DemoReport, path: Path) -> None:
    """Write a PNG, without a display: quality on the left, time on the right."""
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
