"""The recorded results of the drift guard equal those of its present code, for the recorded
distances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.guard_drift import GOAL, REAL, REAL_SET, SMALL, of_drifted, of_healthy
from profiles.data.records import context_digest
from profiles.evidence import read_measured
from tools.real.questions import records

ROOT = Path(__file__).parents[2]
PAIRS = {it.name: it for it in (SMALL, REAL)}


def recorded() -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks/results/guard_drift.json").read_bytes())["measured"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_the_recorded_figures_follow_from_the_recorded_distances(name):
    pair = PAIRS[name]
    healthy, *drifted = (it for it in recorded() if it["pair"] == name)
    assert healthy["mean"] < healthy["allowed"]
    assert of_healthy(pair, healthy["distances"]) == healthy["healthy"]
    assert healthy["healthy"]["alarms"] == 0 and healthy["healthy"]["compared"] < 0.1
    for row in drifted:
        assert dict(of_drifted(pair, healthy["distances"], row["distances"])) == row["found"]


def test_documents_of_another_task_are_found_soon():
    (row,) = (it for it in recorded() if (it["pair"], it["reads"]) == (SMALL.name, "code"))
    assert row["found"]["from the first on"]["within_200"] > 0.95
    assert row["found"]["after 1,000"]["within_200"] > 0.75 and GOAL == 200


@pytest.mark.parametrize("task", REAL.tasks)
def test_the_real_pair_reads_documents_that_its_profile_does_not_know(task):
    profile = read_measured(REAL.profile)
    known = {*profile.train.contexts, *profile.held_out.contexts, *profile.made.fitted}
    asked = records(REAL.profile.parent / "packages.jsonl", REAL_SET, task)
    assert known and known.isdisjoint(context_digest(it.context) for it in asked)
