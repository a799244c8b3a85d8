"""The heat map: quality and KL of every contiguous block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle

from cachetree.evidence import MeasuredBlock, MeasuredProfile
from cachetree.ids import Span
from profiles.report import derived, findings, style, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_MAX_TICKS: Final = 13
_SMALLEST_KL: Final = 1e-4
"""Of the largest; below it blocks look alike."""


class _Grid:
    """Where each block is: a row per first layer, a column per last one."""

    def __init__(self, measured: Sequence[MeasuredBlock]) -> None:
        self.starts = sorted({it.start for it in measured})
        self.stops = sorted({it.stop for it in measured})

    def place(self, block: Span) -> tuple[int, int] | None:
        """Row and column; None for a block that is not of the grid."""
        if block.start not in self.starts or block.stop not in self.stops:
            return None
        return self.starts.index(block.start), self.stops.index(block.stop)

    def table(
        self, measured: Sequence[MeasuredBlock], value: Callable[[MeasuredBlock], float | None]
    ) -> NDArray[numpy.float64]:
        """Values at their places, NaN where there are none."""
        table = numpy.full((len(self.starts), len(self.stops)), numpy.nan)
        for it in measured:
            found, place = value(it), self.place(it.block)
            if found is not None and place is not None:
                table[place] = found
        return table


def draw_blocks(profile: MeasuredProfile) -> Figure:
    figure = style.new_figure(findings.blocks(profile).title, 5.65)
    left, right = figure.subplots(1, 2)
    grid = _Grid(profile.measured)
    _draw_quality(left, profile, grid)
    _draw_kl(right, profile, grid)
    for axes in (left, right):
        _mark_recommended(axes, profile, grid)
    style.legend_below(figure, left, 3)
    return figure


def _draw_quality(axes: Axes, profile: MeasuredProfile, grid: _Grid) -> None:
    table = grid.table(profile.measured, lambda it: it.quality)
    known = table[~numpy.isnan(table)]
    low = float(known.min()) if known.size else 0.0
    high = max(profile.train.full_prefill.mean, float(known.max()) if known.size else 1.0)
    _draw_table(axes, grid, table, Normalize(min(low, high - 1e-3), high), "cividis")
    _hatch_dropped(axes, profile, grid)
    _enclose_good(axes, profile, grid)
    style.label(
        axes,
        x="last recomputed layer",
        y="first recomputed layer",
        title=f"{words.metric_name(profile.metric)} on the training split (0 to 1)",
    )


def _draw_kl(axes: Axes, profile: MeasuredProfile, grid: _Grid) -> None:
    values = [it.fidelity.kl for it in profile.measured if it.fidelity.kl > 0]
    high = max(values, default=1.0)
    low = max(min(values, default=high * _SMALLEST_KL), high * _SMALLEST_KL)
    low = min(low, high / 2)
    table = grid.table(profile.measured, lambda it: max(it.fidelity.kl, low))
    bar = _draw_table(axes, grid, table, LogNorm(low, high), "cividis_r")
    ticks = numpy.geomspace(low, high, 4)
    bar.set_ticks(list(ticks), labels=[words.small(tick) for tick in ticks])
    bar.minorticks_off()
    style.label(axes, x="last recomputed layer", title="KL to full prefill (nats per token, log)")


def _draw_table(
    axes: Axes, grid: _Grid, table: NDArray[numpy.float64], norm: Normalize, colours: str
) -> Colorbar:
    image = axes.imshow(
        numpy.ma.masked_invalid(table), norm=norm, cmap=colours, interpolation="nearest"
    )
    bar = axes.figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.9, pad=0.02)
    bar.ax.tick_params(labelsize=9, colors=style.INK)
    bar.outline.set_visible(False)
    _ticks(axes, grid)
    return bar


def _ticks(axes: Axes, grid: _Grid) -> None:
    most = max(len(grid.starts), len(grid.stops))
    every = next(step for step in (1, 2, 4, 5, 8, 10, 20, most) if most <= step * _MAX_TICKS)
    rows = range(0, len(grid.starts), every)
    columns = range(0, len(grid.stops), every)
    axes.set_yticks(list(rows), [str(grid.starts[row]) for row in rows])
    axes.set_xticks(list(columns), [str(grid.stops[column] - 1) for column in columns])


def _hatch_dropped(axes: Axes, profile: MeasuredProfile, grid: _Grid) -> None:
    dropped = [grid.place(it.block) for it in profile.measured if it.quality is None]
    title = "dropped early"
    for row, first, length in _stretches([place for place in dropped if place is not None]):
        axes.add_patch(
            Rectangle(
                (first - 0.5, row - 0.5),
                length,
                1,
                facecolor="#eef0f3",
                edgecolor="#9aa3af",
                hatch="////",
                linewidth=0,
                label=title,
            )
        )
        title = "_"


def _stretches(places: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours of a row as one: row, first column, length."""
    found: list[tuple[int, int, int]] = []
    for row, column in sorted(places):
        if found and found[-1][0] == row and sum(found[-1][1:]) == column:
            found[-1] = (row, found[-1][1], found[-1][2] + 1)
        else:
            found.append((row, column, 1))
    return found


def _enclose_good(axes: Axes, profile: MeasuredProfile, grid: _Grid) -> None:
    """A line between the blocks within the tolerance and the others."""
    whole = Span(0, derived.num_layers(profile))
    spans = [it.block for it in derived.within_tolerance(profile)]
    good = {place for span in (*spans, whole) if (place := grid.place(span)) is not None}
    title = f"within {words.percent(profile.tolerance)} of full prefill"
    lines: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for row, column in good:
        sides = {
            (row - 1, column): ((column - 0.5, row - 0.5), (column + 0.5, row - 0.5)),
            (row + 1, column): ((column - 0.5, row + 0.5), (column + 0.5, row + 0.5)),
            (row, column - 1): ((column - 0.5, row - 0.5), (column - 0.5, row + 0.5)),
            (row, column + 1): ((column + 0.5, row - 0.5), (column + 0.5, row + 0.5)),
        }
        lines += [line for place, line in sides.items() if place not in good]
    for start, stop in lines:
        axes.plot(
            [start[0], stop[0]],
            [start[1], stop[1]],
            color=style.VERMILLION,
            linewidth=1.8,
            solid_capstyle="round",
            clip_on=False,
            label=title,
        )
        title = "_"


def _mark_recommended(axes: Axes, profile: MeasuredProfile, grid: _Grid) -> None:
    chosen = derived.recommended_block(profile)
    place = grid.place(chosen) if chosen else None
    if chosen is None or place is None:
        return
    row, column = place
    axes.plot(
        column,
        row,
        marker="*",
        markersize=11,
        color="white",
        markeredgecolor=style.INK,
        markeredgewidth=1,
        linestyle="none",
        clip_on=False,
        label=f"recommended {words.span(chosen)}",
    )
