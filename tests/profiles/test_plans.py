"""Several profiles side by side: the table, the sentence and the picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from msgspec.structs import replace
from sample_profile import bare, failed_profile, graded_profile, sample_profile

from cachetree.evidence import FrontierPoint, Interval, MeasuredProfile, TaskLoss
from cachetree.ids import Span
from cachetree.planning.profile import BlockQuality
from profiles.report import plans, write_comparison
from profiles.report.plan_picture import draw_plans


def point(
    block: Span, refreshed: tuple[int, ...], quality: float, profile: MeasuredProfile
) -> FrontierPoint:
    lost = round(1 - quality / profile.held_out.full_prefill.mean, 4)
    return replace(
        profile.frontier[0],
        start=block.start,
        stop=block.stop,
        refreshed=refreshed,
        held_out=Interval(mean=quality, low=quality, high=quality),
        tasks=(TaskLoss(quality=quality, bound=lost, needed=None),),
    )


def with_refreshed(profile: MeasuredProfile) -> MeasuredProfile:
    """The sample with plans of the other kinds, one of them recommended."""
    added = (
        point(Span(0, 0), (3, 4), 0.4, profile),
        point(Span(0, 0), tuple(range(12)), 0.5, profile),
        point(Span(3, 5), (1, 2), 0.98, profile),
    )
    return replace(
        profile,
        frontier=tuple(sorted((*profile.frontier, *added), key=lambda it: it.recipe.work)),
        recommended=BlockQuality(start=3, stop=5, refreshed=(1, 2), quality=0.98),
    )


PROFILES = {
    "a to b": with_refreshed(sample_profile()),
    "b to a": bare(failed_profile()),
    "c to d": graded_profile(32),
}


def test_every_kind_has_a_row_between_its_bounds() -> None:
    table = plans.plans({"a to b": PROFILES["a to b"]})
    assert [row[:4] for row in table.rows] == [
        ("a to b", "full reuse", "0.0", "100 %"),
        # Refreshed layers take E, twice as many bytes as their KV here, but layer 0 takes none.
        ("", "[3, 5) refreshed", "0.4", "117 %"),
        ("", "[2, 5)", "2.2", "92 %"),
        ("", "[3, 5) with [1, 3) refreshed", "1.6", "117 %"),
        ("", "full prefill", "11.2", "0 %"),
    ]
    assert [row[-1] for row in table.rows] == ["–", "no", "yes", "yes", "–"]
    assert table.marked == {3}


def test_a_pair_without_refreshed_plans_has_rows_of_its_blocks() -> None:
    rows = plans.plans({"b to a": PROFILES["b to a"]}).rows
    assert [row[-1] for row in rows] == ["–", "no", "–"]


def test_the_sentence_counts_pairs_and_names_the_largest_loss() -> None:
    said = plans.finding(PROFILES)
    passed = [it for it in PROFILES.values() if it.passed]
    lost = max(1 - it.recommended.quality / it.full_prefill_quality for it in passed)
    assert said.startswith(f"{len(passed)} of 3 pairs passed; the plans that they recommend lost ")
    assert f"lost up to {100 * lost:.1f} %" in said
    assert "refreshed layers in 1, refreshed layers alone in 0 of 3 pairs" in said
    failed = plans.finding({"b to a": PROFILES["b to a"]})
    assert failed.startswith("0 of 1 pair passed. Within")


def test_the_files(tmp_path: Path) -> None:
    table, picture = write_comparison(PROFILES, tmp_path / "made")
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = table.read_text().splitlines()
    assert sum(line.startswith("|") for line in lines) == 2 + len(plans.plans(PROFILES).rows)
    assert any("**[3, 5) with [1, 3) refreshed**" in line for line in lines)
    assert lines[-1] == f"{plans.finding(PROFILES)}."


@pytest.mark.parametrize("number", [1, 3, 4])
def test_a_panel_for_each_pair_and_all_of_its_points(number: int) -> None:
    profiles = {f"{i}": PROFILES["a to b"] for i in range(number)}
    figure = draw_plans(profiles)
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == number
    for axes in figure.axes:
        by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        blocks = [it for it in PROFILES["a to b"].frontier if not it.refreshed]
        drawn = by_label["a block"].lines[0].get_xydata().tolist()
        assert drawn == [[it.recipe.work, it.held_out.mean] for it in blocks if len(it.block) < 12]
        assert len(by_label["refreshed layers alone"].lines[0].get_xdata()) == 2
        assert by_label["recommended"].get_xydata().tolist() == [[1.6, 0.98]]
