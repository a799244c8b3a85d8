"""Draw the pictures of the documentation: `python -m tools.pictures`.

Each PNG in `docs/_static` has a digest of its data inside. A picture is drawn again only if its
data has changed. A test compares the digests, not the pixels.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from profiles.evidence import read_measured
from profiles.report.pictures import BAND, GREEN, INK, ORANGE, PALE, PICTURES
from sglang_droidspeak.demo.config import REAL_PROFILE
from sglang_droidspeak.demo.report import DemoReport, draw
from tools import tables

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs/_static"
DEMO: Final = tables.RESULTS / "demo.json"
(QUALITY,) = (it for it in PICTURES if it.name == "quality")
PACKAGES: Final = {
    "sglang": (0.2, 0.87, "SGLang"),
    "sglang_droidspeak": (0.2, 0.5, "sglang_droidspeak\nthe extension in a server"),
    "profiles": (0.8, 0.5, "profiles\nmeasures pairs of models"),
    "transformers": (0.8, 0.87, "transformers"),
    "cachetree": (0.5, 0.12, "cachetree\nfinds, plans and moves caches"),
}
"""Boxes of the drawing of packages: centre, as shares of the drawing, and text."""


def timeline_data() -> dict[str, float]:
    """Seconds of a full prefill, and of a reuse that fetches and recomputes for equally long."""
    results = tables.read("partial_prefill")
    full, _, block, _ = results["rows"]
    times = {"full": full["ttft_p50_ms"], "block": results["recompute_ms"]}
    times |= {"new": block["forward_ms"], "reuse": results["links"][1]["pipelined_ms"]}
    return {name: value / 1e3 for name, value in times.items()}


def timeline(data: dict[str, float], path: Path) -> None:
    full, block, new, reuse = (data[it] for it in ("full", "block", "new", "reuse"))
    figure = Figure(figsize=(5.6, 2.4), layout="constrained")
    axes = figure.subplots()
    start = reuse - new - block
    bars = [(0, 0.0, full, PALE), (1, start, block, GREEN), (1, start + block, new, PALE)]
    for row, left, width, colour in [*bars, (2, 0.0, block, ORANGE)]:
        axes.barh(row, width, left=left, color=colour, height=0.62)
    first = f"computes all layers, first word at {full:.2f} s"
    texts = [(0.0, first), (reuse, f"computes a few layers, first word at {reuse:.2f} s")]
    for row, (end, text) in enumerate([*texts, (block, "loads the other layers")]):
        axes.text(end + 0.1, row, text, va="center", fontsize=9)
    rows = ["SGLang alone:\nprocessor", "with reuse:\nprocessor", "with reuse:\nnetwork"]
    axes.set_yticks(range(3), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * full)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def packages_data() -> list[tuple[str, str]]:
    """Return pairs of packages for the drawing's arrows: the first imports the second."""
    edges = set()
    for name in ("cachetree", "profiles", "sglang_droidspeak"):
        for file in (ROOT / name).rglob("*.py"):
            imported = re.findall(r"(?m)^\s*(?:from|import) (\w+)", file.read_text())
            edges |= {(name, it) for it in imported if it in PACKAGES and it != name}
    return sorted(edges)


def packages(data: list[tuple[str, str]], path: Path) -> None:
    figure = Figure(figsize=(5.2, 3.0))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    boxes = {}
    for name, (x, y, words) in PACKAGES.items():
        colour = BAND if name in ("sglang", "transformers") else "white"
        box = {"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": INK}
        text = axes.text(x, y, words, ha="center", va="center", fontsize=9, bbox=box)
        boxes[name] = text.get_bbox_patch()
    # Gives the boxes their sizes: arrows begin and end at the boxes.
    figure.draw_without_rendering()
    for importer, imported in data:
        arrow = {"arrowstyle": "->", "patchA": boxes[importer], "patchB": boxes[imported]}
        axes.annotate("", PACKAGES[imported][:2], PACKAGES[importer][:2], arrowprops=arrow)
    figure.savefig(path, dpi=180)


def frontier_data() -> list[Any]:
    """Block, quality and predicted TTFT of each plan that beats all plans with less work."""
    return [
        [str(it.block), it.held_out.mean, it.ttft_s] for it in read_measured(REAL_PROFILE).frontier
    ]


def dashboard_data() -> tuple[list[str], list[dict[str, Any]]]:
    """Titles of two panels of the Grafana dashboard, and the requests of a run that they count.

    Each panel is the rate of one counter by one label. All reused KV of the run is approximate.
    """
    queries = [
        "sum by (outcome) (rate(droidspeak:requests_total[$__rate_interval]))",
        "sum by (kind) (rate(droidspeak:reused_tokens_total[$__rate_interval]))",
    ]
    panels = json.loads((ROOT / "deploy/grafana/droidspeak.json").read_bytes())["panels"]
    shown = {it["targets"][0]["expr"]: it["title"] for it in panels if it.get("targets")}
    run = [it for it in tables.read("serving_study/trace_requests") if it["arm"] == "adaptive"]
    keys = ("outcome", "reused_tokens")
    counted = [{"end_s": it["tokens_s"][-1]} | {key: it[key] for key in keys} for it in run]
    return [shown[it] for it in queries], sorted(counted, key=lambda it: it["end_s"])


def dashboard(data: tuple[list[str], list[dict[str, Any]]], path: Path) -> None:
    titles, counted = data
    outcomes = sorted({it["outcome"] for it in counted})
    requests = {name: [float(it["outcome"] == name) for it in counted] for name in outcomes}
    tokens = {"approximate": [it["reused_tokens"] for it in counted]}
    figure = Figure(figsize=(5.6, 4.4), layout="constrained")
    times, window_s = range(int(counted[-1]["end_s"]) + 2), 8
    for axes, title, lines in zip(
        figure.subplots(2, sharex=True), titles, (requests, tokens), strict=True
    ):
        for (name, counts), colour in zip(lines.items(), (GREEN, ORANGE, INK), strict=False):
            ended = [*zip((it["end_s"] for it in counted), counts, strict=True)]
            rates = [
                sum(n for s, n in ended if now - window_s < s <= now) / window_s for now in times
            ]
            axes.plot(times, rates, color=colour, label=name)
        axes.set_title(f"{title}, per second", loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", frameon=False, fontsize=8)
    axes.set_xlabel("seconds")
    figure.savefig(path, dpi=120)


MADE: Final[dict[str, tuple[Callable[[], Any], Callable[[Any, Path], None]]]] = {
    "timeline": (timeline_data, timeline),
    "packages": (packages_data, packages),
    "demo": (
        DEMO.read_text,
        lambda text, path: draw(msgspec.json.decode(text, type=DemoReport), path),
    ),
    "dashboard": (dashboard_data, dashboard),
    "frontier": (frontier_data, lambda _, path: QUALITY.save(read_measured(REAL_PROFILE), path)),
}
"""Functions by name of a picture: one returns the picture's data, and one draws it from them."""


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def shown(name: str) -> str:
    """Digest that the picture's file has of its data. Empty if the file does not exist."""
    path = FOLDER / f"{name}.png"
    return str(Image.open(path).info.get("made of", "")) if path.exists() else ""


def write() -> None:
    for name, (read, make) in MADE.items():
        data = read()
        if shown(name) != digest(data):
            path, notes = FOLDER / f"{name}.png", PngInfo()
            notes.add_text("made of", digest(data))
            make(data, path)
            Image.open(path).convert("P", colors=128).save(path, pnginfo=notes, optimize=True)


if __name__ == "__main__":
    write()
