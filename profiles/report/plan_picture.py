"""One picture of several profiles: quality of each kind of plan against the compute it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachetree.evidence import Interval, MeasuredProfile
from profiles.report import derived, plans, style, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS: Final = 3
_PANEL_IN: Final = 2.5
_LEGEND_IN: Final = 1.1
_SERIES: Final = {
    plans.REFRESHED: ("^", style.ORANGE, "refreshed layers alone"),
    plans.BLOCK: ("o", style.BLUE, "a block"),
    plans.BOTH: ("D", style.GREEN, "a block and refreshed layers"),
}


def draw_plans(profiles: plans.Profiles) -> Figure:
    rows = -(-len(profiles) // _COLUMNS)
    figure = style.new_figure(plans.finding(profiles), _LEGEND_IN + _PANEL_IN * rows)
    columns = min(_COLUMNS, len(profiles))
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes, (name, profile) in zip(panels, profiles.items(), strict=False):
        _draw(axes, name, profile)
    for axes in panels[len(profiles) :]:
        axes.remove()
    style.legend_below(figure, panels[0], _COLUMNS)
    return figure


def _draw(axes: Axes, name: str, profile: MeasuredProfile) -> None:
    split, whole = profile.held_out, plans.full_prefill_work(profile)
    axes.axhspan(
        profile.quality_floor,
        profile.full_prefill_quality,
        color=style.BAND,
        linewidth=0,
        label="accepted loss",
        zorder=0,
    )
    _mark(axes, [0.0], [split.full_reuse], "X", style.INK, "full reuse")
    for kind, (marker, colour, label) in _SERIES.items():
        points = plans.points_of(profile, kind)
        _mark(
            axes,
            [it.recipe.work for it in points],
            [it.held_out for it in points],
            marker,
            colour,
            label,
        )
    _mark(axes, [whole], [split.full_prefill], "s", style.INK, "full prefill")
    chosen = derived.recommended(profile)
    point = derived.point_of(profile, chosen) if chosen else None
    # An empty series keeps the legend of the first panel complete.
    axes.plot(
        [point.recipe.work] if point else [],
        [point.held_out.mean] if point else [],
        marker="o",
        markersize=12,
        markerfacecolor="none",
        markeredgecolor=style.VERMILLION,
        markeredgewidth=1.8,
        linestyle="none",
        label="recommended",
        zorder=6,
    )
    axes.set_ylim(-0.03, 1.06)
    style.grid(axes)
    style.label(
        axes,
        x=f"work in layers (of {derived.num_layers(profile)})",
        y=f"held-out {words.metric_name(profile.metric)}",
        title=f"{name}: {'passed' if profile.passed else 'failed'}",
    )


def _mark(
    axes: Axes, xs: list[float], found: list[Interval], marker: str, colour: str, label: str
) -> None:
    axes.errorbar(
        xs,
        [it.mean for it in found],
        yerr=[[it.mean - it.low for it in found], [it.high - it.mean for it in found]],
        color=colour,
        ecolor=f"{colour}99",
        marker=marker,
        markersize=5,
        linestyle="-" if len(xs) > 1 else "none",
        linewidth=1.2,
        elinewidth=1.0,
        capsize=2.0,
        label=label,
        zorder=4,
    )
