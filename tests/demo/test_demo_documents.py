"""What the sender reads and the receiver is asked, as tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from profiles.evidence import read_measured
from sglang_droidspeak.demo import DemoConfig
from sglang_droidspeak.demo.results import Condition, rotated
from sglang_droidspeak.demo.run import random_documents

SMALL = DemoConfig.small()


def test_documents_are_asked_as_the_profile_was_made() -> None:
    profile = read_measured(SMALL.profile)
    documents = SMALL.documents(profile)
    assert sum(len(it.questions) for it in documents) == 72
    assert {it.task.template for it in documents} == {profile.made.template}
    assert {it.task.max_new for it in documents} == {profile.made.max_new}
    assert all(len(it.prefix) % 16 == 0 for it in documents)


def test_only_the_first_questions_can_be_asked() -> None:
    documents = replace(SMALL, num_questions=4).documents(read_measured(SMALL.profile))
    assert [len(it.questions) for it in documents] == [3, 1]


def test_a_few_questions_of_a_few_documents_can_be_asked() -> None:
    few = replace(SMALL, num_documents=2, num_questions_each=2)
    whole, documents = (it.documents(read_measured(it.profile)) for it in (SMALL, few))
    assert [it.prefix for it in documents] == [it.prefix for it in whole[:2]]
    assert [it.questions for it in documents] == [it.questions[:2] for it in whole[:2]]


@pytest.mark.parametrize("correction", [True, False])
def test_the_plan_is_shown_with_e_as_it_is_where_that_is_asked(
    correction: bool, tmp_path: Path
) -> None:
    found = json.loads(SMALL.profile.read_text())
    layer = found["recommended"]["start"]
    e_map = {"layer": layer, "rank": None, "dtype": "float32", "sha256": "0" * 64}
    found["recommended"]["e_map"] = e_map
    profile = tmp_path / "pair.json"
    profile.write_text(json.dumps(found))
    subject, _ = replace(SMALL, profile=profile, correction=correction).pair()
    assert subject.e_maps_of == (profile if correction else None)
    assert subject.title.endswith("E corrected") == correction


def test_random_documents_differ_from_their_first_page_on() -> None:
    documents = random_documents()
    assert len({it.prefix[:16] for it in documents}) == len(documents) == 3
    assert {(len(it.prefix) % 16, len(it.questions)) for it in documents} == {(0, 1)}


def test_no_condition_always_comes_first() -> None:
    assert {rotated(index)[0] for index in range(4)} == set(Condition)
    assert all(set(rotated(index)) == set(Condition) for index in range(4))
