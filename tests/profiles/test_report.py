"""The report: the page, its pictures, and what they say about a profile."""

from __future__ import annotations

import base64
import doctest
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace
from sample_profile import all_dropped, bare, failed_profile, place_of, sample_profile, whole_model

from cachetree.ids import Span
from cachetree.planning import EMap
from profiles.evidence import MeasuredProfile, TaskLoss
from profiles.report import derived, tables, words
from profiles.report.page import write_report
from profiles.report.pictures import PICTURES

PROFILE = sample_profile()
NASTY = "</td><script>alert('x')</script>&amp;\"$x^{$"


class Page(HTMLParser):
    """The tags, attributes and text of a page. The text of the stylesheet is kept apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.style = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["style"] and not self.style:
            self.style = data
        else:
            self.text += data

    @property
    def before_tables(self) -> str:
        return self.text.split("Frontier")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "made" / "here"
    write_report(PROFILE, folder)
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "index.html").read_text())


def test_written_files_are_returned_with_the_page_first(folder, tmp_path):
    names = ["index.html", *(f"{it.name}.png" for it in PICTURES)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    (tmp_path / "index.html").write_text("an earlier one")
    assert write_report(PROFILE, tmp_path) == [tmp_path / name for name in names]
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_the_page_carries_every_picture_and_loads_nothing(folder, page):
    sources = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    assert len(sources) == len(PICTURES)
    for source, picture in zip(sources, PICTURES, strict=True):
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data) == (folder / f"{picture.name}.png").read_bytes()
    assert not {"script", "link", "iframe", "a", "object", "base"} & set(page.tags)
    assert not [it for it in page.attributes if it[1].startswith("on") or it[1] == "href"]
    assert "http" not in page.text and "url(" not in page.style and "@import" not in page.style
    assert "http" not in "".join(value for tag, _, value in page.attributes if tag != "img")


def test_the_verdict_comes_first_with_its_numbers(page):
    split, plan = PROFILE.held_out, derived.recommended(PROFILE)
    full_s, (n, m) = derived.full_prefill_s(PROFILE), PROFILE.held_out.mean_lengths
    wanted = ["Passed", PROFILE.reason, "[2, 5)", "3 of 12", f"{n} + {m} tokens"]
    wanted += [f"{it.mean:.3f}" for it in (plan.held_out, split.full_prefill, split.full_reuse)]
    share = f"{100 * plan.ttft_s / full_s:.0f} %"
    wanted.append(f"{1e3 * plan.ttft_s:.1f} ms, {share} of full prefill's {1e3 * full_s:.1f} ms")
    assert [it for it in wanted if it not in page.before_tables] == []
    assert str(PROFILE.sender.model_id) in page.text and str(PROFILE.receiver.model_id) in page.text


def test_every_picture_has_its_title_and_its_caption(page):
    alternatives = [value for tag, name, value in page.attributes if name == "alt"]
    assert alternatives == [it.title for it in PICTURES]
    assert [it.caption for it in PICTURES if it.caption not in page.text] == []


def test_recommended_rows_are_marked_and_the_frontier_is_narrow(page):
    assert ("tr", "class", "marked") in page.attributes
    assert "* [2, 5)" in page.text
    widths = [max(map(len, column)) for column in zip(*tables.frontier(PROFILE).rows, strict=True)]
    assert sum(widths) + 3 * len(widths) < 120, "more does not fit into 1280 pixels"


def test_provenance_is_on_the_page(page):
    made, split = PROFILE.made, PROFILE.held_out
    wanted = [made.command, made.hardware, made.date, made.template]
    wanted += [f"torch {made.versions['torch']}", f"{made.prefix_passes:,} in all"]
    wanted += [split.files[0].name, split.files[0].sha256, PROFILE.data_sha256]
    wanted.append(words.duration(made.elapsed_s))
    assert [it for it in wanted if it not in page.text] == []


def test_names_cannot_become_markup_or_formulas(tmp_path):
    file = replace(PROFILE.train.files[0], name=NASTY)
    made = replace(
        PROFILE.made, command=NASTY, device=NASTY, hardware=NASTY, versions={NASTY: NASTY}
    )
    profile = replace(
        PROFILE,
        reason=NASTY,
        metric=NASTY,
        made=made,
        train=replace(PROFILE.train, files=(file,)),
        sender=replace(PROFILE.sender, architecture=NASTY),
    )
    write_report(profile, tmp_path)
    page = Page((tmp_path / "index.html").read_text())
    assert "script" not in page.tags
    assert page.text.count(NASTY) >= 7


@pytest.mark.parametrize("picture", PICTURES, ids=lambda it: it.name)
def test_pictures_are_drawn(picture, folder):
    png = (folder / f"{picture.name}.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1440 and 700 <= height <= 1400
    assert len(png) > 40_000


@pytest.mark.parametrize(
    "profile",
    [failed_profile(), whole_model(PROFILE), all_dropped(PROFILE)],
    ids=["failed", "whole_model", "all_dropped"],
)
def test_a_pair_without_a_smaller_block_is_said_to_save_nothing(profile):
    assert derived.recommended(profile) is None
    assert said(profile)["recommended plan"] == "none: every prompt is a full prefill"


def test_a_plan_that_corrects_e_is_named_so():
    e_map = EMap(layer=2, dtype="float32", sha256="00")
    frontier = list(PROFILE.frontier)
    place = place_of(PROFILE, Span(2, 5))
    frontier[place] = replace(frontier[place], e_map=e_map)
    recommended = replace(PROFILE.recommended, e_map=e_map)
    profile = replace(PROFILE, frontier=tuple(frontier), recommended=recommended)
    assert said(profile)["recommended plan"] == "[2, 5), E corrected"
    assert "plan: [2, 5), E corrected;" in tables.tasks(profile).caption


def test_a_row_for_each_task_says_what_is_known_there(tmp_path):
    (facts,) = PROFILE.held_out.tasks
    code = replace(facts, name="code", metric="edit_similarity", num_contexts=7, full_prefill=0.8)
    place = place_of(PROFILE, Span(2, 5))
    point = PROFILE.frontier[place]
    lossy = TaskLoss(quality=0.75, bound=0.3142, needed=None)
    point = replace(point, tasks=(*point.tasks, lossy))
    two = replace(
        PROFILE,
        held_out=replace(PROFILE.held_out, tasks=(facts, code)),
        frontier=(*PROFILE.frontier[:place], point, *PROFILE.frontier[place + 1 :]),
    )
    (lost, _) = point.tasks
    numbers = (f"{facts.full_prefill:.3f}", f"{lost.quality:.3f}", words.percent_kept(lost.bound))
    rows = [(row[0], row[1], row[2], *row[-4:]) for row in tables.tasks(two).rows]
    assert rows == [
        (facts.name, "token F1", str(facts.num_contexts), *numbers, "yes"),
        ("code", "edit similarity", "7", "0.800", "0.750", "31.5 %", "no"),
    ]
    text = Page(write_report(two, tmp_path)[0].read_text()).text
    assert "Tasks" in text and "edit similarity" in text and "31.5 %" in text
    failed = failed_profile()
    first_tried = failed.frontier[failed.order[0]]
    assert f"plan: [{first_tried.start}, {first_tried.stop});" in tables.tasks(failed).caption


def said(profile: MeasuredProfile) -> dict[str, str]:
    return dict(tables.summary(profile).rows)


@pytest.mark.parametrize(
    ("first_difference", "free"),
    [
        (0, "nothing"),
        (1, "recomputing [1, 12)"),
        (5, "recomputing [5, 12)"),
        (12, "reusing all layers"),
    ],
)
def test_lossless_layers_are_reported(first_difference, free):
    summary = said(replace(PROFILE, first_difference=first_difference))
    assert summary["lossless whatever the gate says"] == free


def test_critical_layers_follow_the_rule():
    layers = [
        replace(it, layer=place, fidelity=replace(it.fidelity, kl=kl))
        for place, (it, kl) in enumerate(
            zip(PROFILE.layers, (0.08, 0.02, 0.019, 0.0), strict=False)
        )
    ]
    assert derived.critical_layers(replace(PROFILE, layers=tuple(layers))) == (0, 1)
    # A quarter of the largest, but less than a hundredth of a nat.
    small = replace(PROFILE, layers=tuple(layers[2:]))
    assert derived.critical_layers(small) == (2,)
    assert derived.critical_layers(replace(PROFILE, layers=tuple(layers[3:]))) == ()


def test_blocks_within_the_tolerance():
    least = 0.95 * PROFILE.train.full_prefill.mean
    qualities = (None, least - 1e-6, least + 1e-6, 1.0)
    blocks = [replace(it, quality=q) for it, q in zip(PROFILE.measured, qualities, strict=False)]
    assert derived.within_tolerance(replace(PROFILE, measured=tuple(blocks))) == (*blocks[2:],)


def test_a_block_that_saves_no_time_is_said_to_take_more():
    full_s = derived.full_prefill_s(PROFILE)
    frontier = [replace(it, ttft_s=2 * full_s) for it in PROFILE.frontier]
    slow = said(replace(PROFILE, frontier=tuple(frontier)))
    n, m = PROFILE.held_out.mean_lengths
    cell = slow[f"predicted TTFT for {n} + {m} tokens"]
    assert f"200 % of full prefill's {words.seconds(full_s)}" in cell


def test_an_unchecked_cost_model_is_said_to_be_unchecked():
    assert said(bare(PROFILE))["error of predicted times"] == "not checked"


def test_examples_in_docstrings_hold():
    failed, attempted = doctest.testmod(words)
    assert failed == 0 and attempted > 0
