"""The report on disk: pictures, and the page that carries them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachetree.evidence import MeasuredProfile
from profiles.report import findings, style
from profiles.report.block_picture import draw_blocks
from profiles.report.findings import Finding
from profiles.report.layer_pictures import draw_sensitivity, draw_spread
from profiles.report.page import Shown, page
from profiles.report.time_picture import draw_cost_model
from profiles.report.tradeoff_pictures import (
    draw_quality_by_layers,
    draw_quality_by_time,
    draw_train_held_out,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Picture:
    name: str
    """Of its file, without .png."""
    topic: str
    find: Callable[[MeasuredProfile], Finding]
    draw: Callable[[MeasuredProfile], Figure]


PICTURES: Final = (
    Picture("sensitivity", "Which layers are sensitive", findings.sensitivity, draw_sensitivity),
    Picture("spread", "Whether inputs agree", findings.spread, draw_spread),
    Picture("blocks", "Every block", findings.blocks, draw_blocks),
    Picture(
        "quality_by_layers",
        "Quality against compute",
        findings.quality_by_layers,
        draw_quality_by_layers,
    ),
    Picture(
        "quality_by_time", "Quality against time", findings.quality_by_time, draw_quality_by_time
    ),
    Picture(
        "train_held_out",
        "Training against held-out",
        findings.train_held_out,
        draw_train_held_out,
    ),
    Picture("cost_model", "The cost model", findings.cost_model, draw_cost_model),
)
"""In the order of the page."""


def write_files(profile: MeasuredProfile, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    shown: list[Shown] = []
    for it in PICTURES:
        path = folder / f"{it.name}.png"
        style.save(it.draw(profile), path)
        written.append(path)
        found = it.find(profile)
        shown.append(
            Shown(
                topic=it.topic,
                title=found.title,
                sentence=found.sentence,
                source=_data_uri(path.read_bytes()),
            )
        )
    index = folder / "index.html"
    index.write_text(page(profile, shown), encoding="utf-8")
    return [index, *written]


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
