"""The sender's documents and the receiver's questions, as tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from profiles.evidence import MeasuredProfile, read_measured
from sglang_droidspeak.cli import main
from sglang_droidspeak.demo import DemoConfig
from sglang_droidspeak.demo.config import DemoFailed
from sglang_droidspeak.demo.results import Condition, rotated
from sglang_droidspeak.demo.run import random_documents

SMALL = DemoConfig.small()


def test_documents_are_asked_as_the_profile_was_made():
    profile = read_measured(SMALL.profile)
    documents = SMALL.documents(profile)
    assert sum(len(it.questions) for it in documents) == 72
    assert {it.task.template for it in documents} == {profile.made.template}
    assert {it.task.max_new for it in documents} == {profile.made.max_new}
    assert all(len(it.prefix) % 16 == 0 for it in documents)


def test_only_the_first_questions_can_be_asked():
    documents = replace(SMALL, num_questions=4).documents(read_measured(SMALL.profile))
    assert [len(it.questions) for it in documents] == [3, 1]


def test_only_the_first_documents_can_be_asked_about():
    few = replace(SMALL, num_documents=2)
    whole, documents = (it.documents(read_measured(it.profile)) for it in (SMALL, few))
    assert documents == whole[:2]


def made_with(tmp_path: Path, **changes: object) -> MeasuredProfile:
    """Return the small pair's profile as if it had been made with other settings."""
    content = json.loads(SMALL.profile.read_text())
    content["made"] |= changes
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(content))
    return read_measured(path)


def longest(config: DemoConfig, profile: MeasuredProfile) -> int:
    documents = config.documents(profile)
    return max(len(it.prefix) + len(q.suffix) for it in documents for q in it.questions)


def test_prompts_are_cut_to_what_the_profile_and_the_servers_take(tmp_path):
    assert longest(SMALL, made_with(tmp_path)) > 128
    assert longest(SMALL, made_with(tmp_path, max_prompt_tokens=96)) == 96
    of_the_server = replace(SMALL, options={"context-length": 128})
    assert longest(of_the_server, made_with(tmp_path)) == 128 - 8
    assert longest(of_the_server, made_with(tmp_path, max_prompt_tokens=96)) == 96
    receiver = Path(shutil.copytree(SMALL.receiver, tmp_path / "receiver"))
    config = json.loads((receiver / "config.json").read_text())
    positions = config | {"max_position_embeddings": 120}
    (receiver / "config.json").write_text(json.dumps(positions))
    assert longest(replace(SMALL, receiver=receiver), made_with(tmp_path, max_new=2)) == 120 - 7


def test_data_may_be_a_folder_of_several_sets_with_metrics_of_their_own(tmp_path):
    record = json.loads(SMALL.data.read_text().splitlines()[0])
    for name in ("hotpotqa", "multi_news"):
        lines = [json.dumps(record | {"dataset": name, "_id": f"{name}{i}"}) for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = replace(SMALL, data=tmp_path, num_questions=3)
    for template in "", "{context} {input}":
        documents = config.documents(made_with(tmp_path, template=template, metric=None))
        assert [(it.task.name, it.task.metric, len(it.questions)) for it in documents] == [
            ("hotpotqa", "f1", 2),
            ("multi_news", "rouge_l", 1),
        ]
    documents = config.documents(made_with(tmp_path, template="", metric="edit_similarity"))
    assert {it.task.metric for it in documents} == {"edit_similarity"}, "as it was stated"


@pytest.mark.parametrize("flag", ["--num-questions", "--num-documents"])
def test_nothing_to_ask_is_refused_before_a_server_starts(flag, capsys):
    assert main(["demo", flag, "0"]) == 1
    assert f"{flag} is 0; it has to be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("correction", [True, False])
def test_the_plan_is_shown_with_e_as_it_is_where_that_is_asked(correction, tmp_path):
    content = json.loads(SMALL.profile.read_text())
    layer = content["recommended"]["start"]
    e_map = {"layer": layer, "rank": None, "dtype": "float32", "sha256": "0" * 64}
    content["recommended"]["e_map"] = e_map
    profile = tmp_path / "pair.json"
    profile.write_text(json.dumps(content))
    subject, _ = replace(SMALL, profile=profile, correction=correction).pair()
    assert subject.e_maps_of == (profile if correction else None)
    assert subject.title.endswith("E corrected") == correction


def test_random_documents_differ_from_their_first_page_on():
    documents = random_documents()
    assert len({it.prefix[:16] for it in documents}) == len(documents) == 3
    assert {(len(it.prefix) % 16, len(it.questions)) for it in documents} == {(0, 1)}


def test_no_condition_always_comes_first():
    every = list(Condition)
    assert {rotated(every, index)[0] for index in range(len(every))} == {*every}
    assert all({*rotated(every, index)} == {*every} for index in range(4))


def test_one_server_needs_a_receiver_that_is_an_adapter(capsys):
    own = [f"--{it}={getattr(SMALL, it)}" for it in ("sender", "receiver", "profile", "data")]
    assert main(["demo", *own, "--servers", "1"]) == 1
    assert "--servers is 1; that needs --receiver-lora" in capsys.readouterr().err


def test_an_activated_adapter_on_other_weights_is_refused():
    with pytest.raises(DemoFailed, match="it shares the sender's KV only on the sender's own"):
        replace(SMALL, activated_lora=SMALL.sender).pair()
