"""The pictures of a report. Colours are Okabe and Ito's, which colour-blind readers can tell apart.

A picture has the same text for every profile. The tables have the numbers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl
import numpy as np
from matplotlib.collections import PathCollection
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from profiles.evidence import (
    BaselineKind,
    Interval,
    MeasuredBlock,
    MeasuredProfile,
)
from profiles.report import derived, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar

BLUE, ORANGE, VERMILLION = "#0072B2", "#E69F00", "#D55E00"
GREEN, PURPLE, INK, PALE, BAND = "#009E73", "#CC79A7", "#222222", "#9aa3af", "#e2ecf4"

_STYLE: Final = Path(__file__).with_name("pictures.mplstyle")
_MARKS: Final = {
    "block": ("o", BLUE),
    words.BASELINES[BaselineKind.CACHEBLEND]: ("s", ORANGE),
    words.BASELINES[BaselineKind.TOKEN_SELECTION]: ("p", PALE),
    words.BASELINES[BaselineKind.CRITICAL_LAYERS]: ("^", PURPLE),
    words.BASELINES[BaselineKind.SPLIT_BLOCK]: ("D", GREEN),
    words.BASELINES[BaselineKind.SMALL_MODEL]: ("P", VERMILLION),
    "full reuse": ("X", INK),
    "full prefill": ("*", INK),
}
_SMALLEST_KL: Final = 1e-4
"""Smallest KL that is drawn, as a share of the largest KL. Blocks with less KL look alike."""
_MOST_TICKS: Final = 13
_LAYER: Final = "layer whose KV is the sender's (all others the receiver's own)"


@dataclass(frozen=True, slots=True)
class Picture:
    name: str
    """Name of the picture's file, without .png."""
    title: str
    caption: str
    fill: Callable[[Figure, MeasuredProfile], None]

    def draw(self, profile: MeasuredProfile) -> Figure:
        with mpl.rc_context(fname=_STYLE):
            figure = Figure()
            self.fill(figure, profile)
        return figure

    def save(self, profile: MeasuredProfile, path: Path) -> None:
        """Save without time and matplotlib's version, so that equal pictures are equal files."""
        figure = self.draw(profile)
        with mpl.rc_context(fname=_STYLE):
            figure.savefig(path, format="png", metadata={"Software": None})


def _sensitivity(figure: Figure, profile: MeasuredProfile) -> None:
    axes = figure.subplots()
    critical = set(derived.critical_layers(profile))
    values = [value for it in profile.layers for value in it.kl_by_context if value > 0]
    floor = max(min(values) / 2, max(values) * 1e-7) if values else 0.0
    for name, colour, is_critical in (("critical", ORANGE, True), ("other layers", BLUE, False)):
        chosen = {
            it.layer: [max(kl, floor) for kl in it.kl_by_context]
            for it in profile.layers
            if (it.layer in critical) == is_critical
        }
        if chosen:
            _boxes(axes, chosen, colour)
            axes.plot([], [], "s", color=colour, label=name)
    if floor:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8 * floor)
    _label(axes, x=_LAYER, y="KL to full prefill (nats per token)")
    axes.set_xlim(-0.7, len(profile.layers) - 0.3)
    _whole_numbers(axes)
    _legend(figure, axes, 3)


def _boxes(axes: Axes, by_layer: Mapping[int, Sequence[float]], colour: str) -> None:
    """Draw a box per layer and a dot per context, dots side by side in the contexts' order."""
    axes.boxplot(
        list(by_layer.values()),
        positions=list(by_layer),
        widths=0.7,
        showfliers=False,
        manage_ticks=False,
        patch_artist=True,
        boxprops={"facecolor": f"{colour}40", "edgecolor": colour, "linewidth": 0.8},
        whiskerprops={"color": colour, "linewidth": 0.8},
        capprops={"linewidth": 0},
        medianprops={"color": INK, "linewidth": 1.2},
    )
    for layer, values in by_layer.items():
        places = layer + 0.5 * (np.arange(len(values)) / max(1, len(values) - 1) - 0.5)
        axes.scatter(places, values, s=3, color=colour, alpha=0.55, linewidths=0)


def _blocks(figure: Figure, profile: MeasuredProfile) -> None:
    left, right = figure.subplots(1, 2)
    grid = _Grid(profile.measured)
    dropped = grid.table([(it, 0.0) for it in profile.measured if it.quality is None])
    left.imshow(dropped, cmap=ListedColormap([BAND]))
    quality = grid.table([(it, it.quality) for it in profile.measured])
    known = [profile.train.full_prefill.mean, *quality.compressed()]
    bar = _shade(left, quality, Normalize(min(*known, max(known) - 1e-3), max(known)), "cividis")
    bar.locator = MaxNLocator(4)
    bar.update_ticks()
    kl = [it.fidelity.kl for it in profile.measured]
    most = max(kl) or 1.0
    least = min(max(min(kl), most * _SMALLEST_KL), most / 2)
    table = grid.table([(it, max(it.fidelity.kl, least)) for it in profile.measured])
    bar = _shade(right, table, LogNorm(least, most), "cividis_r")
    ticks = np.geomspace(least, most, 4)
    bar.set_ticks(list(ticks), labels=[words.small(tick) for tick in ticks])
    bar.minorticks_off()
    for axes in (left, right):
        _mark(axes, profile, grid)
    metric = words.metric_name(profile.metric)
    _label(left, x="last recomputed layer", y="first recomputed layer", columns=2)
    _label(left, title=f"{metric}, training split", columns=2)
    _label(right, x="last recomputed layer", title="KL to full prefill, log", columns=2)
    left.plot([], [], "s", color=BAND, label="not decoded")
    _legend(figure, left, 3)


def _mark(axes: Axes, profile: MeasuredProfile, grid: _Grid) -> None:
    """Mark the blocks within the tolerance, and the recommended plan."""
    plan = derived.recommended(profile)
    recommended = [it for it in profile.measured if plan and it.block == plan.block]
    within = f"within {words.stated_percent(profile.tolerance)} of full prefill"
    for chosen, marker, size, name in (
        (derived.within_tolerance(profile), "o", 3, within),
        (recommended, "*", 11, "recommended block"),
    ):
        places = np.array([grid.place(it) for it in chosen]).reshape(-1, 2)
        axes.plot(places[:, 1], places[:, 0], marker, ms=size, mec=INK, mfc="white", label=name)
    axes.grid(visible=False)
    grid.number(axes)


class _Grid:
    """Cells of a picture's blocks: a row for each first layer, a column for each last layer."""

    def __init__(self, measured: Sequence[MeasuredBlock]) -> None:
        self._starts = sorted({it.start for it in measured})
        self._stops = sorted({it.stop for it in measured})

    def place(self, block: MeasuredBlock) -> tuple[int, int]:
        return self._starts.index(block.start), self._stops.index(block.stop)

    def table(self, values: Sequence[tuple[MeasuredBlock, float | None]]) -> np.ma.MaskedArray:
        """Return a table with each block's value in its cell. Cells without a value are masked."""
        table = np.full((len(self._starts), len(self._stops)), np.nan)
        for block, value in values:
            table[self.place(block)] = np.nan if value is None else value
        return np.ma.masked_invalid(table)

    def number(self, axes: Axes) -> None:
        every = -(-max(len(self._starts), len(self._stops)) // _MOST_TICKS)
        for axis, numbers in (
            (axes.yaxis, self._starts),
            (axes.xaxis, [it - 1 for it in self._stops]),
        ):
            axis.set_ticks(range(0, len(numbers), every), map(str, numbers[::every]))


def _shade(axes: Axes, table: np.ma.MaskedArray, norm: Normalize, colours: str) -> Colorbar:
    image = axes.imshow(table, norm=norm, cmap=colours)
    bar = axes.figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    return bar


def _quality(figure: Figure, profile: MeasuredProfile) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    num_layers, recommended = profile.receiver.num_layers, derived.recommended(profile)
    scale, unit = words.unit_of_time(derived.full_prefill_s(profile))
    answered = [it for it in profile.measured if it.quality is not None]
    xs, ys = [len(it.block) for it in answered], [it.quality for it in answered]
    left.scatter(xs, ys, s=8, color=PALE, linewidths=0, label="decoded blocks, training split")
    plans = profile.frontier
    places = [("block", len(it.block), scale * it.ttft_s, it.held_out) for it in plans]
    timed = [it for it in derived.ways(profile) if it.ttft_s is not None]
    places += [(it.kind, it.layers, scale * it.ttft_s, it.quality) for it in timed]
    full = profile.full_prefill_quality
    floor = full * (1.0 - profile.tolerance)
    for axes, of_axes in ((left, 1), (right, 2)):
        axes.axhspan(floor, full, color=BAND, linewidth=0, label="accepted loss", zorder=0)
        for name in _MARKS:
            series = [(it[of_axes], it[-1]) for it in places if it[0] == name]
            if series:
                _draw(axes, series, name)
        axes.set_xlim(left=-0.03 * max(it[of_axes] for it in places))
    if recommended is not None:
        for axes, x in ((left, len(recommended.block)), (right, scale * recommended.ttft_s)):
            ring = {"ms": 13, "mfc": "none", "mec": VERMILLION, "mew": 2}
            axes.plot(x, recommended.held_out.mean, "o", **ring, label="recommended", zorder=6)
    n, m = profile.held_out.mean_lengths
    metric = words.metric_name(profile.metric)
    _label(left, x=f"recomputed layers of {num_layers}", y=f"held-out {metric}", columns=2)
    time = f"predicted TTFT in {unit} ({n:,} + {m:,} tokens, {profile.made.device})"
    _label(right, x=time, columns=2)
    _whole_numbers(left)
    _legend(figure, left, 3)


def _draw(axes: Axes, series: Sequence[tuple[float, Interval]], name: str) -> None:
    """Draw points with their intervals."""
    marker, colour = _MARKS[name]
    means, low, high = np.array([(it.mean, it.low, it.high) for _, it in series]).T
    axes.errorbar(
        [x for x, _ in series],
        means,
        yerr=[np.maximum(means - low, 0), np.maximum(high - means, 0)],
        color=colour,
        ecolor=f"{colour}99",
        marker=marker,
        markeredgecolor=INK,
        linestyle="-" if name == "block" else "none",
        label=name,
        zorder=4,
    )


def _label(axes: Axes, *, x: str = "", y: str = "", title: str = "", columns: int = 1) -> None:
    """Break names into as many lines as they need. A dollar sign in a name begins no formula."""
    for text, longest, say in (
        (x, 88 // columns, axes.set_xlabel),
        (y, 56, axes.set_ylabel),
        (title, 76 // columns, axes.set_title),
    ):
        if text:
            lines = [textwrap.fill(line, longest) for line in text.splitlines()]
            say("\n".join(lines).replace("$", r"\$"))


def _whole_numbers(axes: Axes) -> None:
    """Put the x axis's ticks at whole layers."""
    steps = MaxNLocator(nbins=16, integer=True, min_n_ticks=1, steps=[1, 2, 4, 5, 8, 10])
    axes.xaxis.set_major_locator(steps)


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Draw the legend under the picture, where it covers nothing. Entries are in the order of
    drawing."""
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([20])


PICTURES: Final = (
    Picture(
        "sensitivity",
        "Which layers are sensitive",
        "How far the receiver's next tokens move when one layer's KV is the sender's and all "
        "others are its own, on the training split, with a dot for every context. Orange layers "
        "are critical: they move them at least a quarter as far as the most sensitive one, and a "
        "hundredth of a nat.",
        _sensitivity,
    ),
    Picture(
        "blocks",
        "Every block",
        "Each cell is a block, from single layers on the diagonal to all of them in the upper "
        "right corner. Blocks with a dot are good enough on the training split; answers of pale "
        "ones were not decoded, because others stay closer to full prefill and are no larger. All "
        "cells are of E as it is; the plan at the star may correct it.",
        _blocks,
    ),
    Picture(
        "quality",
        "Quality against compute and time",
        "Better is up and to the left. Plans of the frontier and what one could do instead, with "
        "their 95 % intervals on the held-out split, against the layers that they compute and the "
        "time to the first token that the cost model predicts. What the gate does not ask about "
        "was measured on few of the contexts, as the tables say, and the accepted loss is of all.",
        _quality,
    ),
)
"""All pictures, in the order of the page."""
