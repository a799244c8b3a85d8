"""The benchmark of the profiler runs, and notices where two ways of measuring disagree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import profiler
from profiles.stats.measured import Score

SCORE = Score(kl=0.5, agreement=1.0, own_nll=4.0, quality=1.0)


@pytest.mark.slow
def test_it_measures_a_context_both_ways_and_says_so_in_one_line(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.profiler", "--num-documents", "1"]
    command += ["--times", "0"]  # A busy machine times one document anyhow.
    done = subprocess.run(
        [*command, "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert (result["num_contexts"], result["num_questions"]) == (1, 3)
    sweep, alone, batched = result["contenders"].values()
    assert sweep["passes_per_context"] == [13]
    assert alone["passes_per_context"] == batched["passes_per_context"] == [80]
    assert alone["times_the_sweep"] == pytest.approx(alone["wall_s"] / sweep["wall_s"])
    assert alone["times_the_sweep"] > result["times_demanded"] == 0
    for comparison in result["comparisons"].values():
        assert comparison["num_answers"] == (78 + 1 + 12) * 3
        assert 0 <= comparison["largest"] < 1e-4
    assert result["environment"]["processor"]
    assert {"torch", "transformers"} <= result["environment"]["versions"].keys()


@pytest.mark.parametrize(
    ("change", "margin", "problem"),
    [
        ({}, 9.0, None),
        ({"kl": 0.50005, "own_nll": 4.0003}, 9.0, None),
        ({"kl": 0.501}, 9.0, "kl is 0.5 and 0.501"),
        ({"own_nll": 4.01}, 9.0, "own_nll is 4 and 4.01"),
        ({"quality": 0.5}, 9.0, "F1 is 1.0 and 0.5"),
        ({"quality": 0.5}, 1e-5, None),
        ({"agreement": 0.5}, 9.0, "agreement 1.000 and 0.500"),
    ],
)
def test_a_disagreement_is_found_unless_it_is_rounding(change, margin, problem):
    ours = [profiler.Found(SCORE, 0.0)] * 1000
    changed = profiler.Found(msgspec.structs.replace(SCORE, **change), margin)
    alone = [*[profiler.Found(SCORE, 9.0)] * 999, changed]
    comparison = profiler.Comparison(tolerance=1e-4)
    comparison.compare({"full reuse": ours}, {"full reuse": alone})
    found = comparison.verdict()
    assert comparison.num_answers == 1000
    assert len(found) == (problem is not None)
    if problem is not None:
        assert found[0].startswith("full reuse: ")
        assert problem in found[0]


def test_too_many_near_ties_are_a_disagreement():
    near = profiler.Found(msgspec.structs.replace(SCORE, quality=0.0), 1e-5)
    comparison = profiler.Comparison(tolerance=1e-4)
    ours = [profiler.Found(SCORE, 0.0)] * 100
    alone = [*[profiler.Found(SCORE, 9.0)] * 98, near, near]
    comparison.compare({"full reuse": ours}, {"full reuse": alone})
    assert comparison.verdict() == ["2 near-ties; at most 0.1 are allowed"]


def test_what_only_one_has_measured_is_a_disagreement():
    found = [profiler.Found(SCORE, 0.0)]
    comparison = profiler.Comparison(tolerance=1e-4)
    comparison.compare({"a": found, "b": found}, {"a": found})
    assert comparison.verdict() == ["measured by one only: ['b']"]


def races(*, sweep_passes=13, alone_passes=80, alone_s=30.0):
    run = profiler.Run
    return {
        profiler.SWEEP: [run(10.0, 10.0, sweep_passes, {})],
        profiler.ALONE: [run(alone_s, alone_s, alone_passes, {})],
        profiler.BATCHED: [run(20.0, 20.0, 80, {})],
    }


@pytest.mark.parametrize(
    ("race", "problem"),
    [
        ({}, None),
        ({"sweep_passes": 14}, "sweep: [14] prefix passes over a context, not 13"),
        ({"alone_passes": 79}, "each block on its own: [79] prefix passes over a context, not 80"),
        ({"alone_s": 29.0}, "each block on its own took 2.90 times as long; 3.00 is demanded"),
    ],
)
def test_passes_and_times_are_demanded(race, problem):
    comparisons = {profiler.ALONE: profiler.Comparison(tolerance=1e-4)}
    found = profiler.problems_of(races(**race), comparisons, 12, 3.0)
    assert found == ([] if problem is None else [problem])


def test_a_disagreement_is_a_problem_of_the_race():
    comparison = profiler.Comparison(tolerance=1e-4)
    comparison.compare({"a": []}, {"b": []})
    found = profiler.problems_of(races(), {profiler.ALONE: comparison}, 12, 3.0)
    assert found == ["each block on its own: measured by one only: ['a', 'b']"]
