"""The gate's rates in worlds of known loss: the fast form of `benchmarks.gate_power`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.gate_power import TOLERANCE, WORLDS, most_false, rate
from benchmarks.result import RESULTS
from profiles.stats.gate import proven_after, still_open
from profiles.stats.measured import mean_of

NUM_RUNS = 150


@pytest.mark.parametrize("world", WORLDS)
def test_the_loss_of_a_world_is_as_stated(world):
    """Each context has the same weight, so forty questions of one context do not count as forty
    losses."""
    full, plan = WORLDS[world](np.random.default_rng(0), np.full(30_000, 2), 0.05)
    assert 1 - mean_of(plan) / mean_of(full) == pytest.approx(0.05, abs=0.006)


@pytest.mark.parametrize("world", WORLDS)
def test_a_plan_that_loses_what_is_accepted_hardly_ever_passes(world):
    """Here the gate looks after every context."""
    rates = rate(world, (300, 6), TOLERANCE, NUM_RUNS)
    assert rates["passed"] <= most_false(NUM_RUNS)


@pytest.mark.parametrize(
    ("world", "size", "loss", "least"),
    [
        ("even", (120, 6), 0.01, 0.8),
        ("even", (300, 2), 0.01, 0.95),
        ("even", (300, 6), 0.023, 0.95),
        ("clustered", (300, 6), 0.023, 0.6),
        ("rare large", (300, 6), 0.01, 0.8),
    ],
)
def test_a_plan_that_loses_less_passes(world, size, loss, least):
    rates = rate(world, size, loss, 60)
    assert rates["passed"] >= least
    assert rates["contexts_taken"] < size[0], "it stops there"


def test_one_lost_context_ruins_no_bet():
    right, lost = [[1.0]] * 76, [[1.0]] * 75 + [[0.0]]
    after = proven_after([*right[:1], *right * 3], [*lost[-1:], *right * 3], TOLERANCE)
    assert after is not None and after < 150


def test_a_plan_is_asked_about_until_it_is_proven_or_hopeless():
    full = [[1.0]] * 200
    good, bad = [[1.0]] * 71, [[0.0]] * 20
    tasks = [0] * 200
    assert still_open(full, [good], tasks, TOLERANCE, 200) == []
    assert still_open(full, [good[:70]], tasks, TOLERANCE, 200) == [0]
    assert still_open(full, [bad], tasks, TOLERANCE, 200) == []
    assert still_open(full, [bad[:2]], tasks, TOLERANCE, 200) == [0]
    few, begun = tasks[:60], [good[:1]]
    assert still_open(full[:60], begun, few, TOLERANCE, 60) == [], "sixty cannot prove it"
    assert still_open(full[:60], begun, few, TOLERANCE, 71) == [0], "others may come"


def test_plans_behind_a_hopeless_one_are_not_tried():
    full, tasks = [[1.0]] * 200, [0] * 200
    good, bad, begun = [[1.0]] * 71, [[0.0]] * 20, [[1.0]] * 20
    assert still_open(full, [begun, bad, begun], tasks, TOLERANCE, 200) == [0]
    assert still_open(full, [begun, good, begun], tasks, TOLERANCE, 200) == [0, 2]


def test_a_plan_is_proven_at_every_task():
    """The second task has every other context, so the plan was tried on 72 contexts of each
    task."""
    tasks = [0, 1] * 100
    full = [[1.0]] * 200
    assert still_open(full, [[[1.0]] * 140], tasks, TOLERANCE, 200) == [0]
    assert still_open(full, [[[1.0]] * 144], tasks, TOLERANCE, 200) == []
    lossy = [[float(it % 2 == 0)] for it in range(60)]
    assert still_open(full, [lossy], tasks, TOLERANCE, 200) == [], "hopeless at the second"


def test_the_kept_rates_are_as_promised():
    recorded = json.loads((RESULTS / "gate_power.json").read_bytes())
    assert {it["world"] for it in recorded["false_passes"]} == {*WORLDS}
    assert all(it["passed"] <= most_false(recorded["runs"]) for it in recorded["false_passes"])
    even = [it for it in recorded["power"] if it["world"] == "even" and it["loss"] == 0.023]
    assert max(it["passed"] for it in even) > 0.9
