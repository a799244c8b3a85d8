"""The profile in a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console
from sample_profile import failed_profile, graded_profile, sample_profile

from profiles.evidence import Baseline, BaselineKind, MeasuredProfile
from profiles.report.terminal import table_of

PROFILE = sample_profile()


def shown(profile: MeasuredProfile, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table_of(profile))
    return out.getvalue()


def row(text: str, *beginning: str) -> list[str]:
    rows = [line.split() for line in text.splitlines()]
    (found,) = [it for it in rows if tuple(it[: len(beginning)]) == beginning]
    return found


def test_the_verdict_comes_first() -> None:
    first, *_ = shown(PROFILE).splitlines()
    assert first.rstrip() == f"passed: {PROFILE.reason}"
    assert shown(failed_profile()).startswith("failed: no block smaller than all layers")


def test_the_frontier_is_in_rows_and_the_recommended_block_is_marked() -> None:
    text = shown(PROFILE)
    found = row(text, "*", "[2,", "5)")
    assert found[3:8] == ["3", "0.970", "0.986", "[0.953,", "1.000]"]
    assert found[8:] == ["4.9", "%", "10.3", "ms", "yes"]
    assert row(text, "[4,", "5)")[2:5] == ["1", "0.307", "0.299"]
    assert "* recommended" in " ".join(text.split())


def test_baselines_stand_between_full_prefill_and_full_reuse() -> None:
    text = shown(PROFILE)
    assert row(text, "full", "prefill", "12")[-4:] == ["13.9", "ms", "100", "%"]
    assert row(text, "full", "reuse", "0")[3:7] == ["0.167", "[0.061,", "0.272]", "82.6"]
    assert row(text, "CacheBlend")[1:3] == ["3", "0.481"]
    assert row(text, "critical", "layers", "alone")[-4:] == ["8.60", "ms", "62", "%"]
    assert "smaller model" in text
    assert "smaller model" not in shown(graded_profile())


def test_no_row_is_there_twice() -> None:
    whole = replace(PROFILE, baselines=PROFILE.baselines + split_in(2) + split_in(4))
    rows = [" ".join(line.split()) for line in shown(whole, 120).splitlines()]
    names = [
        it[: it.index("[")] for it in rows if it.startswith(("block in", "CacheBlend", "critical"))
    ]
    assert len(names) == len(set(names)) > 4


def split_in(number: int) -> tuple[Baseline, ...]:
    """The same result in so many runs of the same layers."""
    (first,) = (it for it in PROFILE.baselines if it.kind is BaselineKind.SPLIT_BLOCK)
    runs = tuple((layer, layer + 1) for layer in range(20, 20 + number))
    return (replace(first, runs=runs),)


def test_both_models_are_identified_and_differences_marked() -> None:
    text = shown(PROFILE)
    ids = [str(it.model_id)[:16] for it in (PROFILE.sender, PROFILE.receiver)]
    assert row(text, "*", "model_id")[2:] == ids
    assert row(text, "num_layers")[1:] == ["12", "12"]
    assert row(text, "architecture")[1:] == ["LlamaForCausalLM"] * 2
    other = replace(PROFILE, sender=replace(PROFILE.sender, head_dim=64))
    assert row(shown(other), "*", "head_dim")[2:] == ["64", "32"]


def test_it_says_what_is_free_how_far_times_hold_and_how_it_was_made() -> None:
    text = " ".join(shown(replace(PROFILE, first_difference=6)).split())
    assert "lossless whatever the gate says recomputing [6, 12)" in text
    assert "error of predicted times 4 % in the median and 11 % at most, over 9 plans" in text
    assert PROFILE.made.command in text and "720 in all" in text


def test_brackets_of_names_are_not_markup() -> None:
    reason = "see [bold]here[/bold] and [/nothing]"
    made = replace(PROFILE.made, command="profile --data [red]x[/red].jsonl")
    text = shown(replace(PROFILE, reason=reason, made=made))
    assert reason in text and made.command in text


@pytest.mark.parametrize("width", [50, 80, 200])
def test_nothing_is_cut_off(width: int) -> None:
    for profile in (PROFILE, graded_profile(80), failed_profile()):
        text = shown(profile, width)
        assert "…" not in text
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_rows_of_numbers_fit_into_80_columns() -> None:
    text = shown(graded_profile(80))
    assert row(text, "*", "[9,", "66)")[-3:] == ["833", "ms", "yes"]
    assert row(text, "[10,", "16)")[-3:] == ["277", "ms", "no"]


def test_a_terminal_does_not_wait_for_the_library_of_the_pictures() -> None:
    code = "import sys, profiles.report; sys.exit('matplotlib' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
