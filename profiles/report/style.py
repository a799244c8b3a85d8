"""How pictures look: sizes, colours that colour-blind readers can tell apart, and titles."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette.
BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
VERMILLION: Final = "#D55E00"
GREEN: Final = "#009E73"
PURPLE: Final = "#CC79A7"
SKY: Final = "#56B4E9"
INK: Final = "#222222"
GREY: Final = "#6b7280"
PALE: Final = "#9aa3af"
BAND: Final = "#e2ecf4"

_WIDTH_IN: Final = 8.0
_DPI: Final = 180
_TITLE_CHARACTERS: Final = 76
_X_CHARACTERS: Final = 88
_Y_CHARACTERS: Final = 56
"""Characters that fit along the sides of a picture with one pair of axes."""
_TEXT: Final = 9.5


def new_figure(title: str, height_in: float) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, height_in), facecolor="white")
    figure.set_layout_engine("constrained", h_pad=0.07)
    # Numbers stay on one line with what they count.
    lines = balanced(re.sub(r"(?<=\d) (?=\w|%)", "\u00a0", title), _TITLE_CHARACTERS)
    figure.suptitle(
        plain("\n".join(lines)), x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=INK
    )
    return figure


def balanced(text: str, longest: int) -> list[str]:
    """As few lines as fit, about equally long.

    >>> balanced("one two three four five", 20)
    ['one two three', 'four five']
    """
    fewest = textwrap.wrap(text, longest)
    widths = range(max(1, len(text) // max(1, len(fewest))), longest + 1)
    wrapped = (textwrap.wrap(text, width) for width in widths)
    return next((lines for lines in wrapped if len(lines) <= len(fewest)), fewest)


def label(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Names of the axes, a light grid and no frame."""
    place = axes.get_subplotspec()
    rows, columns = place.get_geometry()[:2] if place else (1, 1)
    longest, highest = _X_CHARACTERS // columns, _Y_CHARACTERS // rows
    up = "\n".join(textwrap.fill(line, highest) for line in y.splitlines())
    axes.set_xlabel(plain(textwrap.fill(x, longest)), fontsize=_TEXT, color=INK)
    axes.set_ylabel(plain(up), fontsize=_TEXT, color=INK)
    if title:
        axes.set_title(plain(textwrap.fill(title, longest)), fontsize=_TEXT, color=INK, loc="left")
    axes.tick_params(labelsize=9, colors=INK, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def grid(axes: Axes, which: str = "both") -> None:
    axes.grid(axis=which, color="#e5e7eb", linewidth=0.8)  # type: ignore[arg-type]


def whole_numbers(axes: Axes) -> None:
    """Ticks of the x axis are layers."""
    steps = MaxNLocator(nbins=16, integer=True, min_n_ticks=1, steps=[1, 2, 4, 5, 8, 10])
    axes.xaxis.set_major_locator(steps)


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """Under the picture, where it covers nothing; entries in the order of drawing."""
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(
        handles,
        [plain(it) for it in labels],
        loc="outside lower left",
        ncols=columns,
        fontsize=9,
        frameon=False,
        labelcolor=INK,
    )
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([20])


def plain(text: str) -> str:
    """Text in which no dollar sign begins a formula."""
    return text.replace("$", r"\$")


def save(figure: Figure, path: Path) -> None:
    # Without the time and the version of matplotlib, so that equal pictures are equal files.
    figure.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})
