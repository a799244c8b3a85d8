"""What a demo found: one value, as JSON and as a table."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich import box
from rich.table import Table

from profiles.environment import Environment
from sglang_droidspeak.demo.conditions import Condition
from sglang_droidspeak.demo.results import Quality, Reuse, Speed

ABSENT = "–"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one part of the demo was run on."""

    pair: str
    """In words, for captions."""
    num_layers: int
    block: tuple[int, int]
    """Layers recomputed under `block`, half-open."""
    dtype: str
    num_documents: int
    num_requests: int
    """Per condition."""
    tokens_per_document: float
    """Mean; what the sender read."""


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """`demo.json`."""

    version: int = 1
    quality: dict[Condition, Quality]
    speed: dict[Condition, Speed]
    quality_on: Part
    speed_on: Part
    failures: list[str]
    """Checks that did not hold; empty for a demo that counts."""
    elapsed_s: float
    environment: Environment


def write_json(report: DemoReport, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def table_of(report: DemoReport) -> Table:
    """F1 from the quality part, everything else from the speed part."""
    quality_on, speed_on = report.quality_on, report.speed_on
    table = Table(
        title="One receiver, four ways to read a document that another model has read",
        caption=(
            f"F1: {quality_on.num_requests} questions on {quality_on.num_documents} documents, "
            f"{quality_on.pair}, {_block(quality_on)}, {quality_on.dtype}\n"
            f"the rest: {speed_on.num_requests} documents of "
            f"{speed_on.tokens_per_document:,.0f} tokens, {speed_on.pair}, "
            f"{_block(speed_on)}, {speed_on.dtype}\n"
            f"{hardware(report.environment)}"
        ),
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("condition", no_wrap=True)
    for title in (
        "F1",
        "TTFT\np50 ms",
        "TTFT\np90 ms",
        "faster",
        "tokens\nreused",
        f"layers\nof {speed_on.num_layers}",
        "MB\nmoved",
        "overlap",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for condition in Condition:
        quality, speed = report.quality[condition], report.speed[condition]
        table.add_row(
            condition.title,
            f"{quality.f1:.3f}",
            f"{speed.ttft_p50_ms:,.0f}",
            f"{speed.ttft_p90_ms:,.0f}",
            f"{speed.speedup:.1f} ×",
            f"{speed.tokens_reused:,.0f}" if speed.tokens_reused else ABSENT,
            f"{_layers(condition, speed, speed_on.num_layers):.0f}",
            f"{speed.bytes_moved / 1e6:,.1f}" if speed.bytes_moved else ABSENT,
            _overlap(speed),
        )
    return table


def hardware(environment: Environment) -> str:
    """The machine in one line."""
    where = environment.accelerator or environment.processor
    return (
        f"{where}, {environment.num_cores} cores, load before the run {environment.load_before:.1f}"
    )


def _block(part: Part) -> str:
    return f"block [{part.block[0]}, {part.block[1]})"


def _layers(condition: Condition, speed: Speed, num_layers: int) -> float:
    """Layers computed for the document; a full prefill's are in no provenance."""
    return num_layers if condition is Condition.FULL_PREFILL else speed.layers_recomputed


def _overlap(reuse: Reuse) -> str:
    """Means something only where there is both a fetch and a recompute."""
    both = reuse.bytes_moved and reuse.layers_recomputed
    return f"{reuse.overlap:.0%}" if both else ABSENT
