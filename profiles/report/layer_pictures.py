"""Pictures of single layers: how sensitive each is (fig. 7), and on which contexts (fig. 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from cachetree.evidence import MeasuredProfile
from profiles.report import derived, findings, style, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OTHER: Final = "other layers"
_ALL: Final = "layers"


def draw_sensitivity(profile: MeasuredProfile) -> Figure:
    figure = style.new_figure(findings.sensitivity(profile).title, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_losses(upper, profile)
    _draw_kl(lower, profile)
    style.whole_numbers(lower)
    lower.set_xlim(-0.7, len(profile.layers) - 0.3)
    style.legend_below(figure, upper, 3)
    return figure


def _draw_losses(axes: Axes, profile: MeasuredProfile) -> None:
    critical = derived.critical_layers(profile)
    losses = {it.layer: 100 * derived.loss_of(profile, it) for it in profile.layers}
    rest = [layer for layer in losses if layer not in critical]
    axes.bar(
        rest, [losses[it] for it in rest], color=style.BLUE, label=_OTHER if critical else _ALL
    )
    if critical:
        axes.bar(
            critical,
            [losses[it] for it in critical],
            color=style.ORANGE,
            edgecolor=style.INK,
            linewidth=0.5,
            hatch="///",
            label=(
                f"critical: at least {words.percent(derived.CRITICAL_SHARE)} of the largest loss "
                f"and {words.num_points(derived.CRITICAL_LOSS)}"
            ),
        )
    accepted = 100 * profile.tolerance * profile.train.full_prefill.mean
    if accepted < 2.5 * max(losses.values(), default=0.0):
        axes.axhline(
            accepted,
            color=style.INK,
            linewidth=1,
            linestyle="--",
            label=f"accepted loss ({accepted:.1f} points)",
        )
    axes.axhline(0, color=style.INK, linewidth=0.8)
    style.grid(axes, "y")
    metric = words.metric_name(profile.metric)
    style.label(axes, y=f"{metric} lost\n(points = hundredths)")


def _draw_kl(axes: Axes, profile: MeasuredProfile) -> None:
    """On a log scale, because the small ones rank the layers that no question tells apart."""
    values = [it.fidelity.kl for it in profile.layers]
    floor = _log_floor(values)
    critical = derived.critical_layers(profile)
    for it in profile.layers:
        colour = style.ORANGE if it.layer in critical else style.BLUE
        shown = max(it.fidelity.kl, floor)
        axes.vlines(it.layer, floor, shown, color=colour, linewidth=1.6)
        axes.plot(
            it.layer,
            shown,
            marker="o" if it.fidelity.kl > 0 else "v",
            markersize=6 if len(values) <= 40 else 3.5,
            markeredgecolor=style.INK,
            markeredgewidth=0.5,
            color=colour,
        )
    style.grid(axes, "y")
    zeros = "; triangle: exactly 0" if any(it <= 0 for it in values) else ""
    _log_axis(axes, floor)
    axes.set_ylim(top=2 * max(values) if floor else 1)
    style.label(
        axes,
        x="layer whose KV is the sender's (all others the receiver's own)",
        y=f"KL to full prefill\n(nats per token{', log' if floor else ''}{zeros})",
    )


def draw_spread(profile: MeasuredProfile) -> Figure:
    figure = style.new_figure(findings.spread(profile).title, 6.2)
    upper, lower = figure.subplots(2, 1, sharex=True)
    kl = [list(it.kl_by_context) for it in profile.layers]
    floor = _log_floor([value for values in kl for value in values])
    _draw_boxes(upper, profile, [[max(value, floor) for value in values] for values in kl])
    _log_axis(upper, floor)
    style.label(upper, y=f"KL to full prefill\n(nats per token{', log' if floor else ''})")
    _draw_boxes(lower, profile, [it.quality_by_context for it in profile.layers])
    full = profile.train.full_prefill.mean
    lower.axhline(
        full, color=style.INK, linewidth=1, linestyle="--", label="full prefill, mean of all"
    )
    style.label(
        lower,
        x="layer whose KV is the sender's (all others the receiver's own)",
        y=f"{words.metric_name(profile.metric)}\n(0 to 1, mean of a context)",
    )
    style.whole_numbers(lower)
    lower.set_xlim(-0.7, len(profile.layers) - 0.3)
    style.legend_below(figure, lower, 4)
    return figure


def _draw_boxes(axes: Axes, profile: MeasuredProfile, by_layer: Sequence[Sequence[float]]) -> None:
    """A box per layer and a dot per context, dots side by side in the contexts' order."""
    critical = derived.critical_layers(profile)
    small = len(profile.layers) > 40
    for kind, wanted, colour in (
        ("critical layers", True, style.ORANGE),
        (_OTHER if critical else _ALL, False, style.BLUE),
    ):
        rows = [
            (it.layer, values)
            for it, values in zip(profile.layers, by_layer, strict=True)
            if (it.layer in critical) is wanted and values
        ]
        if not rows:
            continue
        axes.boxplot(
            [list(values) for _, values in rows],
            positions=[layer for layer, _ in rows],
            widths=0.7,
            showfliers=False,
            manage_ticks=False,
            patch_artist=True,
            boxprops={"facecolor": f"{colour}40", "edgecolor": colour, "linewidth": 0.8},
            whiskerprops={"color": colour, "linewidth": 0.8},
            capprops={"linewidth": 0},
            medianprops={"color": style.INK, "linewidth": 1.2},
        )
        dots = [
            (layer + 0.5 * (context / max(1, len(values) - 1) - 0.5), value)
            for layer, values in rows
            for context, value in enumerate(values)
        ]
        axes.scatter(
            [x for x, _ in dots],
            [y for _, y in dots],
            s=2 if small else 7,
            color=colour,
            alpha=0.55,
            linewidths=0,
            label=f"{kind}: a dot per context",
        )
    style.grid(axes, "y")


def _log_floor(values: Sequence[float]) -> float:
    """Where a log axis of these values begins; zeros are drawn there. 0 where all are zero."""
    positive = [value for value in values if value > 0]
    return max(min(positive) / 2, max(positive) * 1e-7) if positive else 0.0


def _log_axis(axes: Axes, floor: float) -> None:
    """From `floor`; of zeros alone there is no logarithm."""
    if floor:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8 * floor)
