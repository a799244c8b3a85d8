"""Report of a demo: as JSON, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

import msgspec
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from profiles.environment import Environment
from sglang_droidspeak.demo.results import Condition, Measured

ABSENT = "–"


class MeasuredPair(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one pair of models, with all conditions on the same documents."""

    pair: str
    """Name of the pair, for captions."""
    num_layers: int
    block: tuple[int, int]
    """Layers that the condition `block` recomputes, half-open."""
    dtype: str
    metric: str
    """Metric of quality; empty if no answers are known."""
    num_documents: int
    num_questions: int
    tokens_per_document: float
    """Mean length of the documents that the sender reads, in tokens."""
    conditions: dict[Condition, Measured]


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `demo.json`."""

    version: int = 2
    pair: MeasuredPair
    ceiling: MeasuredPair | None
    """Measurements of two models of random weights: what reuse can save if the block is short. They
    say nothing about quality. None for a user's own pair."""
    failures: list[str]
    """Sentences about checks that failed. Empty for a valid demo."""
    notes: list[str] = []
    """Sentences about losses that these documents are too few to prove."""
    elapsed_s: float
    environment: Environment


def write_json(report: DemoReport, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def table_of(report: DemoReport) -> Table:
    """Return a table of the pair, with a row per condition. A line below the table has times of
    models with random weights."""
    pair = report.pair
    table = Table(
        title="One receiver, several ways to read a document that another model has read",
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
    for condition, measured in pair.conditions.items():
        # The provenance of a full prefill does not state its layers.
        num_computed = pair.num_layers if condition.is_full else measured.layers_recomputed
        # Overlap has a meaning only with both a fetch and a recompute.
        has_both = measured.bytes_moved and measured.layers_recomputed
        table.add_row(
            condition.title,
            ABSENT if measured.quality is None else f"{measured.quality:.3f}",
            f"{measured.ttft_p50_ms:,.0f}",
            f"{measured.ttft_p90_ms:,.0f}",
            f"{measured.speedup:.1f} ×",
            f"{measured.tokens_reused:,.0f}" if measured.tokens_reused else ABSENT,
            f"{num_computed:.0f}",
            f"{measured.bytes_moved / 1e6:,.1f}" if measured.bytes_moved else ABSENT,
            f"{measured.overlap:.0%}" if has_both else ABSENT,
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
    return [*lines, *report.notes, hardware(report.environment)]


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


_COLOURS = dict(
    zip(
        Condition,
        ("#6b7280", "#d97706", "#2563eb", "#059669", "#9ca3af", "#9ca3af"),
        strict=True,
    )
)
_NOTABLE = 1.05
"""Least speed-up that the picture states as a number."""


def draw(report: DemoReport, path: Path) -> None:
    """Draw the report into a PNG file: quality on the left, time on the right. Needs no display."""
    pair = report.pair
    start, stop = pair.block
    names = {it: it.title.replace(" ", "\n") for it in pair.conditions}
    names[Condition.BLOCK] = f"block\n[{start}, {stop})"
    rows, colours = [*pair.conditions.values()], [_COLOURS[it] for it in names]
    figure = Figure(figsize=(11.5, 4.8), layout="constrained")
    figure.suptitle(f"A prefix that another model has read: how good, how soon\n{described(pair)}")
    figure.supxlabel(hardware(report.environment), fontsize=8, color="#555555")
    left, right = figure.subplots(1, 2)

    qualities = [it.quality or 0.0 for it in rows]
    bars = left.bar(names.values(), qualities, color=colours)
    left.bar_label(bars, [f"{it:.3f}" for it in qualities], padding=2)
    left.set_ylim(0, 1.12)
    left.set_ylabel(f"{pair.metric} (0 to 1)")
    left.set_title(f"Quality: {pair.num_questions} questions", fontsize=10)

    medians = [it.ttft_p50_ms / 1000 for it in rows]
    above = [max(0.0, it.ttft_p90_ms - it.ttft_p50_ms) / 1000 for it in rows]
    whiskers = {"yerr": [[0.0] * len(rows), above], "capsize": 4, "ecolor": "#374151"}
    right.bar(names.values(), medians, color=colours, **whiskers)
    tops = [median + whisker for median, whisker in zip(medians, above, strict=True)]
    for place, (row, median, top) in enumerate(zip(rows, medians, tops, strict=True)):
        faster = f"\n{row.speedup:.1f} × faster" if row.speedup >= _NOTABLE else ""
        beside = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center"}
        right.annotate(f"{median:.2f} s{faster}", (place, top), **beside)
    right.set_ylim(0, 1.2 * max(tops))
    right.set_ylabel("time to first token in s\n(bar: median, whisker: p90)")
    right.set_title("Speed, the same requests", fontsize=10)
    figure.savefig(path, dpi=150)
