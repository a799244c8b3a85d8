"""Pictures of what quality costs: in layers, in time, and on questions that chose nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachetree.evidence import BaselineKind, Interval, MeasuredProfile
from profiles.report import derived, findings, style, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS: Final = {
    BaselineKind.CACHEBLEND: ("s", style.ORANGE),
    BaselineKind.CRITICAL_LAYERS: ("^", style.PURPLE),
    BaselineKind.SPLIT_BLOCK: ("D", style.GREEN),
    BaselineKind.SMALL_MODEL: ("P", style.VERMILLION),
}


def draw_quality_by_layers(profile: MeasuredProfile) -> Figure:
    figure = style.new_figure(findings.quality_by_layers(profile).title, 5.4)
    axes = figure.subplots()
    num_layers = derived.num_layers(profile)
    answered = [it for it in profile.measured if it.quality is not None]
    axes.scatter(
        [len(it.block) for it in answered],
        [it.quality for it in answered],
        s=12,
        color=style.PALE,
        linewidths=0,
        label="every block, training split",
    )
    _draw_levels(axes, profile)
    xs = [float(len(it.block)) for it in derived.blocks(profile)]
    _draw_frontier(axes, profile, xs)
    seen = list(xs)
    for it in profile.baselines:
        x = _beside(it.recomputed_layers, seen, 0.012 * num_layers)
        seen.append(x)
        _draw_point(axes, x, it.quality, it.kind)
    axes.set_xlim(-0.02 * num_layers, 0.02 * num_layers + max([num_layers, *seen]))
    style.whole_numbers(axes)
    _finish(figure, axes, profile, f"recomputed layers of {num_layers}")
    return figure


def draw_quality_by_time(profile: MeasuredProfile) -> Figure:
    figure = style.new_figure(findings.quality_by_time(profile).title, 5.2)
    axes = figure.subplots()
    full_s = derived.full_prefill_s(profile)
    scale, unit = words.unit_of_time(full_s)
    _draw_band(axes, profile)
    _draw_frontier(axes, profile, [scale * it.ttft_s for it in derived.blocks(profile)])
    for x, it, marker, name in (
        (full_s, profile.held_out.full_prefill, "o", "full prefill"),
        (derived.full_reuse_s(profile), profile.held_out.full_reuse, "X", "full reuse"),
    ):
        named = f"{name} {words.quality(it.mean)}"
        _draw_mark(axes, scale * x, it, marker, style.INK, named)
    for baseline in profile.baselines:
        _draw_point(axes, scale * baseline.ttft_s, baseline.quality, baseline.kind)
    axes.set_xlim(left=0)
    n, m = derived.lengths(profile)
    _finish(
        figure,
        axes,
        profile,
        f"predicted time to first token in {unit} ({n:,} + {m:,} tokens, {profile.made.device})",
    )
    if full_s:
        above = axes.secondary_xaxis(
            "top",
            functions=(
                lambda x: 100 * x / (scale * full_s),
                lambda x: x * scale * full_s / 100,
            ),
        )
        above.set_xlabel("% of full prefill's time", fontsize=9, color=style.INK)
        above.tick_params(labelsize=9, colors=style.INK)
        above.spines["top"].set_visible(False)
    return figure


def draw_train_held_out(profile: MeasuredProfile) -> Figure:
    figure = style.new_figure(findings.train_held_out(profile).title, 4.8)
    axes = figure.subplots()
    num_layers = derived.num_layers(profile)
    xs = [len(it.block) for it in derived.blocks(profile)]
    axes.plot(
        xs,
        [it.train_quality for it in derived.blocks(profile)],
        marker="s",
        markersize=5,
        color=style.ORANGE,
        linestyle="--",
        label="training split, which chose the blocks",
    )
    _draw_bars(axes, profile, [float(x) for x in xs], "held-out split, with its 95 % interval")
    chosen = derived.recommended_block(profile)
    for it in derived.blocks(profile):
        if it.block == chosen:
            _draw_ring(axes, len(chosen), it.held_out.mean, f"recommended {words.span(chosen)}")
    for split, name, colour in (
        (profile.train, "training", style.ORANGE),
        (profile.held_out, "held-out", style.BLUE),
    ):
        axes.axhline(
            split.full_prefill.mean,
            color=colour,
            linewidth=1,
            linestyle=":",
            label=f"full prefill, {name}: {words.quality(split.full_prefill.mean)}",
        )
    axes.set_xlim(0, 1.02 * num_layers)
    style.whole_numbers(axes)
    _finish(figure, axes, profile, f"recomputed layers of {num_layers}", 2)
    return figure


def _draw_band(axes: Axes, profile: MeasuredProfile) -> None:
    axes.axhspan(
        profile.quality_floor,
        profile.full_prefill_quality,
        color=style.BAND,
        linewidth=0,
        label=f"accepted loss ({words.percent(profile.tolerance)})",
        zorder=0,
    )


def _draw_levels(axes: Axes, profile: MeasuredProfile) -> None:
    _draw_band(axes, profile)
    full = profile.full_prefill_quality
    axes.axhline(full, color=style.INK, linewidth=1.2, label=f"full prefill {words.quality(full)}")
    reuse = profile.full_reuse_quality
    axes.axhline(
        reuse,
        color=style.INK,
        linewidth=1.2,
        linestyle=":",
        label=f"full reuse {words.quality(reuse)}",
    )


def _draw_frontier(axes: Axes, profile: MeasuredProfile, xs: list[float]) -> None:
    _draw_bars(axes, profile, xs, "frontier, held-out, 95 % interval")
    chosen = derived.recommended_block(profile)
    for x, it in zip(xs, derived.blocks(profile), strict=True):
        if it.block == chosen:
            _draw_ring(axes, x, it.held_out.mean, f"recommended {words.span(chosen)}")


def _draw_bars(axes: Axes, profile: MeasuredProfile, xs: list[float], name: str) -> None:
    held_out = [it.held_out for it in derived.blocks(profile)]
    axes.errorbar(
        xs,
        [it.mean for it in held_out],
        yerr=_whiskers(held_out),
        color=style.BLUE,
        ecolor=f"{style.BLUE}99",
        marker="o",
        markersize=5,
        linewidth=1.5,
        elinewidth=1.2,
        capsize=2.5,
        label=name,
        zorder=5,
    )


def _draw_ring(axes: Axes, x: float, y: float, name: str) -> None:
    axes.plot(
        x,
        y,
        marker="o",
        markersize=13,
        markerfacecolor="none",
        markeredgecolor=style.VERMILLION,
        markeredgewidth=2,
        linestyle="none",
        label=name,
        zorder=6,
    )


def _draw_point(axes: Axes, x: float, it: Interval, kind: BaselineKind) -> None:
    marker, colour = _MARKS[kind]
    _draw_mark(axes, x, it, marker, colour, words.BASELINES[kind])


def _draw_mark(axes: Axes, x: float, it: Interval, marker: str, colour: str, name: str) -> None:
    """A point with its interval; a name is in the legend once."""
    taken = name in axes.get_legend_handles_labels()[1]
    axes.errorbar(
        [x],
        [it.mean],
        yerr=_whiskers([it]),
        color=colour,
        marker=marker,
        markersize=8,
        markeredgecolor=style.INK,
        markeredgewidth=0.6,
        elinewidth=1.2,
        capsize=2.5,
        linestyle="none",
        label="_" if taken else name,
        zorder=4,
    )


def _whiskers(found: list[Interval]) -> list[list[float]]:
    """Never negative: a mean may lie outside its bootstrapped interval by a rounding."""
    below = [max(0.0, it.mean - it.low) for it in found]
    above = [max(0.0, it.high - it.mean) for it in found]
    return [below, above]


def _beside(x: float, taken: list[float], step: float) -> float:
    """The next free place to the right, so that points at one compute stand side by side."""
    while any(abs(x - it) < 0.9 * step for it in taken):
        x += step
    return x


def _finish(figure: Figure, axes: Axes, profile: MeasuredProfile, x: str, columns: int = 3) -> None:
    style.grid(axes)
    style.label(axes, x=x, y=f"{words.metric_name(profile.metric)} (0 to 1)")
    style.legend_below(figure, axes, columns)
