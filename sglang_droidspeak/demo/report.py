"""What a demo found: one value, as JSON and as a table."""

from __future__ import annotations

from pathlib import Path

import msgspec
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
        table.add_row(
            condition.title,
            ABSENT if found.quality is None else f"{found.quality:.3f}",
            f"{found.ttft_p50_ms:,.0f}",
            f"{found.ttft_p90_ms:,.0f}",
            f"{found.speedup:.1f} ×",
            f"{found.tokens_reused:,.0f}" if found.tokens_reused else ABSENT,
            f"{_layers(condition, found, pair.num_layers):.0f}",
            f"{found.bytes_moved / 1e6:,.1f}" if found.bytes_moved else ABSENT,
            _overlap(found),
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


def _layers(condition: Condition, found: Measured, num_layers: int) -> float:
    """Layers computed for the document; a full prefill's are in no provenance."""
    return num_layers if condition is Condition.FULL_PREFILL else found.layers_recomputed


def _overlap(found: Measured) -> str:
    """Means something only where there is both a fetch and a recompute."""
    both = found.bytes_moved and found.layers_recomputed
    return f"{found.overlap:.0%}" if both else ABSENT
