"""Every picture of a report is legible for any profile, and is drawn from the right numbers."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from msgspec.structs import replace
from sample_profile import (
    all_dropped,
    bare,
    failed_profile,
    identical,
    one_group,
    sample_profile,
    stretched,
)

from profiles.evidence import Interval, MeasuredProfile
from profiles.report.pictures import PICTURES, Picture

PROFILE = sample_profile()
LONG = "something that takes a long time to say"


def long_names(profile: MeasuredProfile) -> MeasuredProfile:
    made = replace(profile.made, device=f"{LONG} and does not end there")
    return replace(profile, metric=LONG, made=made)


CASES = {
    "sample": PROFILE,
    "failed": failed_profile(),
    "84_layers": stretched(7),
    "groups": stretched(3, 3),
    "one_group": bare(one_group(PROFILE)),
    "identical": identical(PROFILE),
    "all_dropped": all_dropped(PROFILE),
    "long_names": long_names(PROFILE),
}


def _pixels(picture: Picture, profile: MeasuredProfile) -> bytes:
    """Return the pixels of the picture, drawn small."""
    figure = picture.draw(profile)
    figure.set_dpi(40)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return bytes(canvas.buffer_rgba())


@pytest.fixture(scope="module")
def drawn_before() -> dict[str, bytes]:
    return {it.name: _pixels(it, PROFILE) for it in PICTURES}


def _changed_layer(profile: MeasuredProfile) -> MeasuredProfile:
    layers = list(profile.layers)
    layers[7] = replace(layers[7], fidelity=replace(layers[7].fidelity, kl=9.0))
    return replace(profile, layers=tuple(layers))


def _changed_contexts(profile: MeasuredProfile) -> MeasuredProfile:
    layers = list(profile.layers)
    layers[7] = replace(layers[7], kl_by_context=(9.0,) * len(layers[7].kl_by_context))
    return replace(profile, layers=tuple(layers))


def _changed_blocks(profile: MeasuredProfile) -> MeasuredProfile:
    measured = [replace(it, quality=0.98) if it.start == 3 else it for it in profile.measured]
    return replace(profile, measured=tuple(measured))


def _changed_frontier(profile: MeasuredProfile) -> MeasuredProfile:
    held_out = Interval(mean=0.1, low=0.0, high=0.2)
    frontier = (replace(profile.frontier[0], held_out=held_out), *profile.frontier[1:])
    return replace(profile, frontier=frontier)


def _changed_time(profile: MeasuredProfile) -> MeasuredProfile:
    frontier = [replace(it, ttft_s=it.ttft_s / 2) for it in profile.frontier]
    return replace(profile, frontier=tuple(frontier))


def _changed_baselines(profile: MeasuredProfile) -> MeasuredProfile:
    better = Interval(mean=0.95, low=0.9, high=0.99)
    first = replace(profile.baselines[0], quality=better)
    return replace(profile, baselines=(first, *profile.baselines[1:]))


@pytest.mark.parametrize(
    ("change", "drawn"),
    [
        (_changed_layer, {"sensitivity"}),
        (_changed_contexts, {"sensitivity"}),
        (_changed_blocks, {"blocks", "quality"}),
        (_changed_frontier, {"quality"}),
        (_changed_time, {"quality"}),
        (_changed_baselines, {"quality"}),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_a_changed_profile_changes_what_shows_it(change, drawn, drawn_before):
    changed = change(PROFILE)
    now = {it.name: _pixels(it, changed) for it in PICTURES}
    assert {name for name in now if now[name] != drawn_before[name]} == drawn


class Recorder(RendererAgg):
    """Notes where each line of text was drawn, horizontal or vertical."""

    def __init__(self, figure: Figure) -> None:
        super().__init__(*(figure.get_size_inches() * figure.dpi), figure.dpi)
        self.drawn: list[tuple[str, Bbox]] = []

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext: Text | None = None) -> None:
        width, height, descent = self.get_text_width_height_descent(s, prop, ismath)
        up = self.height - y
        level = Bbox.from_bounds(x, up - descent, width, height)
        upright = Bbox.from_bounds(x - height + descent, up, height, width)
        if s.strip():
            self.drawn.append((s, upright if angle == 90 else level))
        super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)


def _overlaps(figure: Figure) -> list[str]:
    """Return the texts that touch each other or leave the figure."""
    recorder = Recorder(figure)
    figure.draw(recorder)
    texts = recorder.drawn
    assert len(texts) > 5
    touching = [
        f"{text} / {other}"
        for place, (text, box) in enumerate(texts)
        for other, far in texts[place + 1 :]
        if box.padded(-1).overlaps(far.padded(-1))
    ]
    page = figure.bbox.padded(1)
    outside = [
        text
        for text, box in texts
        if not (page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1))
    ]
    return touching + outside


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("picture", PICTURES, ids=lambda it: it.name)
def test_no_text_of_a_picture_touches_another(picture, case):
    assert _overlaps(picture.draw(CASES[case])) == []


def test_touching_text_would_be_seen():
    figure = Figure()
    figure.subplots().set_xlabel("x")
    assert _overlaps(figure) == []
    figure.text(0.5, 0.5, "one")
    figure.text(0.5, 0.5, "another")
    figure.text(0.9, 0.1, "too long for what is left of the picture")
    assert len(_overlaps(figure)) == 2
