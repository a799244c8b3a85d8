"""The profile in a terminal."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console
from sample_profile import bare, failed_profile, place_of, sample_profile, stretched

from cachetree.ids import Span
from profiles.evidence import MeasuredProfile
from profiles.report import derived, words
from profiles.report.terminal import table_of

PROFILE = sample_profile()


def shown(profile: MeasuredProfile, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table_of(profile))
    return out.getvalue()


def row(text: str, *beginning: str) -> list[str]:
    rows = [line.split() for line in text.splitlines()]
    (matching,) = [it for it in rows if tuple(it[: len(beginning)]) == beginning]
    return matching


def test_the_verdict_comes_first():
    assert " ".join(shown(PROFILE).split()).startswith(
        f"passed: {PROFILE.reason} pair: sender (0020a83c) → receiver (32030f87) recommended"
    )
    assert shown(failed_profile()).startswith("failed: no plan smaller than all layers")


def test_the_frontier_is_in_rows_and_the_recommended_block_is_marked():
    text = shown(PROFILE)
    plan = PROFILE.frontier[place_of(PROFILE, Span(2, 5))]
    cells, held_out = row(text, "*", "[2,", "5)"), plan.held_out
    expected = (
        f"3 {plan.train_quality:.3f} {held_out.mean:.3f} [{held_out.low:.3f}, {held_out.high:.3f}]"
    )
    assert cells[3:8] == expected.split()
    expected = f"{words.percent_kept(plan.tasks[0].bound)} {1e3 * plan.ttft_s:.1f} ms yes"
    assert cells[8:] == expected.split()
    single = PROFILE.frontier[place_of(PROFILE, Span(4, 5))]
    numbers = (single.train_quality, single.held_out.mean)
    assert row(text, "[4,", "5)")[2:5] == ["1", *(f"{it:.3f}" for it in numbers)]
    assert "* recommended" in " ".join(text.split())


def test_baselines_stand_between_full_prefill_and_full_reuse():
    text = shown(PROFILE)
    split, full_s = PROFILE.held_out, derived.full_prefill_s(PROFILE)
    full, reuse = split.full_prefill, split.full_reuse
    expected = f"{1e3 * full_s:.1f} ms 100 %"
    assert row(text, "full", "prefill", "12")[-4:] == expected.split()
    loss = f"{100 * (full.mean - reuse.mean):.1f}"
    expected = f"{reuse.mean:.3f} [{reuse.low:.3f}, {reuse.high:.3f}] {loss}"
    assert row(text, "full", "reuse", "0")[3:7] == expected.split()
    small = f"10.0 ms {100 * 0.01 / full_s:.0f} %"
    assert row(text, "smaller", "model")[-4:] == small.split()
    assert "smaller model" not in shown(bare(PROFILE))


def test_no_row_is_there_twice():
    """A split block has one row for each number of its runs."""
    rows = [" ".join(line.split()) for line in shown(PROFILE, 120).splitlines()]
    split = [re.match(r"\[\d+, \d+\) in \d+ runs", it) for it in rows]
    names = [it[0] for it in split if it]
    names += [it[: it.index("[")] for it in rows if it.startswith("critical")]
    assert len(names) == len(set(names)) > 4


def test_both_models_are_identified_and_differences_marked():
    text = shown(PROFILE)
    ids = [str(it.model_id)[:16] for it in (PROFILE.sender, PROFILE.receiver)]
    assert row(text, "*", "model_id")[2:] == ids
    assert row(text, "num_layers")[1:] == ["12", "12"]
    assert row(text, "architecture")[1:] == ["LlamaForCausalLM"] * 2
    other = replace(PROFILE, sender=replace(PROFILE.sender, head_dim=64))
    assert row(shown(other), "*", "head_dim")[2:] == ["64", "32"]


def test_it_says_what_is_free_how_far_times_hold_and_how_it_was_made():
    text = " ".join(shown(replace(PROFILE, first_difference=6)).split())
    assert "lossless whatever the gate says recomputing [6, 12)" in text
    costs = PROFILE.costs
    errors = f"{100 * costs.error:.0f} % in the median and {100 * max(costs.errors):.0f} % at most"
    assert f"error of predicted times {errors}, over {len(costs.errors)} plans" in text
    assert PROFILE.made.command in text and f"{PROFILE.made.prefix_passes:,} in all" in text


def test_answers_that_were_not_bounded_are_told_as_such():
    text = " ".join(shown(replace(PROFILE, made=replace(PROFILE.made, max_new=0))).split())
    assert "answers as long as each data set has them" in text and " 0 tokens" not in text


def test_brackets_of_names_are_not_markup():
    reason = "see [bold]here[/bold] and [/nothing]"
    made = replace(PROFILE.made, command="profile --data [red]x[/red].jsonl")
    text = shown(replace(PROFILE, reason=reason, made=made))
    assert reason in text and made.command in text


@pytest.mark.parametrize("width", [50, 80, 200])
def test_nothing_is_cut_off(width):
    for profile in (PROFILE, stretched(7), failed_profile()):
        text = shown(profile, width)
        assert "…" not in text
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_rows_of_numbers_fit_into_80_columns():
    text = shown(stretched(7))
    assert row(text, "*", "[14,", "35)")[-1] == "yes"
    assert row(text, "[28,", "35)")[-1] == "no"


def test_a_terminal_does_not_wait_for_the_library_of_the_pictures():
    code = "import sys, profiles.report; sys.exit('matplotlib' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
