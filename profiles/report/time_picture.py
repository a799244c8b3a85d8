"""The cost model: how well it predicts, and what it predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from cachetree.evidence import HeldOutTime, MeasuredProfile
from profiles.report import derived, findings, style, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_LENGTHS: Final = 60


def draw_cost_model(profile: MeasuredProfile) -> Figure:
    figure = style.new_figure(findings.cost_model(profile).title, 4.6)
    if not profile.costs.held_out:
        _draw_by_length(figure.subplots(), profile)
        return figure
    left, right = figure.subplots(1, 2)
    _draw_errors(left, profile)
    _draw_by_length(right, profile)
    return figure


def _draw_errors(axes: Axes, profile: MeasuredProfile) -> None:
    found = profile.costs.held_out
    scale, unit = words.unit_of_time(max(it.measured_s for it in found))
    for name, marker, colour in (
        ("full prefill", "o", style.INK),
        ("a block recomputed", "s", style.BLUE),
        ("everything loaded", "^", style.ORANGE),
    ):
        chosen = [it for it in found if _kind(it, profile) == name]
        if chosen:
            axes.scatter(
                [scale * it.measured_s for it in chosen],
                [scale * it.predicted_s for it in chosen],
                marker=marker,
                s=34,
                color=colour,
                edgecolors=style.INK,
                linewidths=0.5,
                label=name,
                zorder=3,
            )
    times = [scale * time for it in found for time in (it.measured_s, it.predicted_s)]
    low, high = min(times) / 1.4, max(times) * 1.4
    axes.plot([low, high], [low, high], color=style.GREY, linewidth=1, label="exact", zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    # Within one decade more than its ends are numbered, over several only those.
    subs = (1, 2, 5) if high / low > 10 else (1, 1.5, 2, 3, 4, 6, 8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=subs if high / low <= 300 else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(NullLocator())
    style.grid(axes)
    style.label(
        axes,
        x=f"measured time to first token in {unit} (log)",
        y=f"predicted in {unit} (log)",
        title="At lengths that were not fitted",
    )
    _legend(axes)


def _kind(it: HeldOutTime, profile: MeasuredProfile) -> str:
    length = it.stop - it.start
    if not length:
        return "everything loaded"
    return "full prefill" if length == derived.num_layers(profile) else "a block recomputed"


def _draw_by_length(axes: Axes, profile: MeasuredProfile) -> None:
    costs, (_, suffix) = profile.costs, derived.lengths(profile)
    longest = derived.longest_prefix(profile)
    tokens = sorted({round(longest * i / _NUM_LENGTHS) for i in range(1, _NUM_LENGTHS + 1)} - {0})
    scale, unit = words.unit_of_time(costs.full_prefill_s(longest, suffix))
    chosen = derived.recommended(profile)
    curves = [("full prefill", style.INK, "-", [costs.full_prefill_s(n, suffix) for n in tokens])]
    if chosen is not None:
        times = [costs.ttft_s(chosen.runs, n, suffix) for n in tokens]
        curves.append(("recommended plan", style.BLUE, "--", times))
    curves.append(("full reuse", style.ORANGE, ":", [costs.ttft_s((), n, suffix) for n in tokens]))
    for name, colour, line, times in curves:
        axes.plot(
            tokens, [scale * it for it in times], color=colour, linestyle=line, lw=2, label=name
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    style.grid(axes)
    style.label(
        axes,
        x=f"prefix in tokens (and {suffix:,} after it)",
        y=f"predicted in {unit}",
        title="Predicted time to first token",
    )
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Under its own half, where it covers nothing."""
    axes.legend(
        fontsize=9,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.16),
        ncols=2,
        labelcolor=style.INK,
    )
