import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import datasets as hub
import msgspec
import pytest

from cachetree.errors import ConfigError
from profiles.data.datasets import MathProblem, few_shot, load_sources, read_hub
from profiles.data.metrics import Metric
from profiles.data.records import Record, RecordError, write_records
from profiles.data.tasks import TASKS, TaskOptions

AS_SHIPPED = TaskOptions(template="<bos> {context} {input}", metric=Metric.F1, max_new=8)


def make_record(dataset="hotpotqa", context="rain", question="?", answers=("sun",), name=""):
    return Record(input=question, context=context, answers=answers, dataset=dataset, id=name)


def write_problems(path, num_problems):
    lines = [
        json.dumps({"question": f"{i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"})
        for i in range(num_problems)
    ]
    path.write_text("\n".join(lines) + "\n")


def test_a_records_data_set_says_how_it_is_asked(tmp_path):
    path = tmp_path / "data.jsonl"
    write_records([make_record("hotpotqa", name="a"), make_record("lcc", name="b")], path)
    (source,) = load_sources([str(path)], TaskOptions())
    assert source.name == "data.jsonl"
    assert [it.task for it in source.records] == [TASKS["hotpotqa"], TASKS["lcc"]]
    assert [it.name for it in source.records] == ["a", "b"]
    assert [it.place for it in source.records] == [f"{path}:1", f"{path}:2"]


def test_the_user_says_it_for_every_data_set(tmp_path):
    path = tmp_path / "data.jsonl"
    write_records([make_record("hotpotqa"), make_record("")], path)
    (source,) = load_sources([str(path)], AS_SHIPPED)
    assert {it.task.template for it in source.records} == {AS_SHIPPED.template}
    assert [it.task.name for it in source.records] == ["hotpotqa", ""]


def test_a_record_of_an_unknown_data_set_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    write_records([make_record(), make_record("other")], path)
    with pytest.raises(RecordError, match=r"data\.jsonl:2: data set 'other' is none.*--template"):
        load_sources([str(path)], TaskOptions())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (make_record(answers=()), "data.jsonl:2 has no answers"),
        (
            make_record(answers=("昨天下雨",)),
            "data.jsonl:2 has an answer in a script without spaces",
        ),
        (make_record("gsm8k", answers=("#### 3", "three")), "data.jsonl:2 has an answer without a"),
    ],
)
def test_answers_that_cannot_judge_are_named(tmp_path, record, message):
    path = tmp_path / "data.jsonl"
    write_records([make_record(), record], path)
    with pytest.raises(RecordError, match=message):
        load_sources([str(path)], TaskOptions())


def test_a_template_that_never_asks_is_refused_where_all_records_ask(tmp_path):
    path, silent = tmp_path / "data.jsonl", replace(AS_SHIPPED, template="{context}")
    write_records([make_record(), make_record()], path)
    with pytest.raises(ConfigError, match=r"'\{context\}' has no \{input\}.*data\.jsonl"):
        load_sources([str(path)], silent)
    write_records([make_record(), make_record(question="")], path)
    assert load_sources([str(path)], silent)


def test_names_are_unique_among_all_sources(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    write_records([make_record(name="a"), make_record(name="b"), make_record()], one)
    write_records([make_record(name="a")], two)
    sources = load_sources([str(one), str(two)], TaskOptions())
    names = [it.name for source in sources for it in source.records]
    assert names == [f"{one}:1", "b", f"{one}:3", f"{two}:1"]


def test_a_directory_is_a_source_per_known_data_set(tmp_path):
    for name in ("lcc", "hotpotqa", "novels"):
        write_records([make_record(name)], tmp_path / f"{name}.jsonl")
    sources = load_sources([str(tmp_path)], TaskOptions())
    assert [source.name for source in sources] == ["hotpotqa.jsonl", "lcc.jsonl"]
    sources = load_sources([str(tmp_path)], AS_SHIPPED)
    assert [it.name for it in sources] == ["hotpotqa.jsonl", "lcc.jsonl", "novels.jsonl"]


def test_a_directory_without_known_files_says_which_are_known(tmp_path):
    write_records([make_record()], tmp_path / "mine.jsonl")
    with pytest.raises(ConfigError, match=r"has no hotpotqa\.jsonl or 2wikimqa\.jsonl or"):
        load_sources([str(tmp_path)], TaskOptions())


def test_a_spec_that_names_nothing_says_what_there_is():
    with pytest.raises(ConfigError, match=r"'none\.jsonl' is no file .*longbench:NAME, gsm8k and"):
        load_sources(["none.jsonl"], TaskOptions())


def test_the_same_data_twice_is_refused(tmp_path):
    path = tmp_path / "lcc.jsonl"
    write_records([make_record("lcc")], path)
    for specs in ([str(path), str(path)], [str(tmp_path), str(path)]):
        with pytest.raises(ConfigError, match=r"lcc\.jsonl is given more than once"):
            load_sources(specs, TaskOptions())


def test_named_data_sets_come_from_the_users_folder(tmp_path):
    write_records([make_record("lcc", name="a")], tmp_path / "lcc.jsonl")
    write_problems(tmp_path / "gsm8k.jsonl", 9)
    sources = load_sources(["longbench:lcc", "gsm8k"], TaskOptions(), data_dir=tmp_path)
    assert [source.name for source in sources] == ["longbench:lcc", "gsm8k"]
    assert sources[0].records[0].name == "a"
    assert sources[1].records[0].name == f"{tmp_path}/gsm8k.jsonl:9"
    with pytest.raises(ConfigError, match="none is no directory"):
        load_sources(["longbench:lcc"], TaskOptions(), data_dir=tmp_path / "none")


def test_an_unknown_name_is_refused_before_it_is_looked_for():
    with pytest.raises(ConfigError, match="'hotpot' is none of hotpotqa"):
        load_sources(["longbench:hotpot"], TaskOptions())


def test_gsm8k_becomes_examples_and_questions(tmp_path):
    path = tmp_path / "test.jsonl"
    write_problems(path, 35)
    (source,) = load_sources([f"gsm8k:{path}"], TaskOptions())
    assert source.name == "test.jsonl"
    assert {it.task for it in source.records} == {TASKS["gsm8k"]}
    # Problems 0 to 7 and 8 to 15 are the examples of two contexts; the other 19 are questions.
    contexts = [it.record.context for it in source.records]
    assert [contexts.count(it) for it in dict.fromkeys(contexts)] == [9, 10]
    assert contexts[0].startswith("Question: 0 + 1?\nAnswer: 0 + 1 = 1\n#### 1\n\nQuestion: 1 + 1?")
    assert contexts[0].endswith("Question: 7 + 1?\nAnswer: 7 + 1 = 8\n#### 8\n\n")
    assert contexts[-1].startswith("Question: 8 + 1?")
    assert [it.record.input for it in source.records] == [f"{i} + 1?" for i in range(16, 35)]
    assert source.records[0].record.answers == ("16 + 1 = 17\n#### 17",)
    assert source.records[0].name == f"{path}:17"


@pytest.mark.parametrize("num_problems", [9, 16, 31, 32, 100])
def test_no_question_of_gsm8k_is_an_example(num_problems):
    problems = [
        (str(i), MathProblem(question=f"{i}?", answer=f"#### {i}")) for i in range(num_problems)
    ]
    records = few_shot(problems)
    assert len({it.input for _, it in records}) == len(records) > 0
    for _, record in records:
        assert f"Question: {record.input}\n" not in record.context


def test_bad_lines_of_gsm8k_are_named(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    write_problems(path, 8)
    with pytest.raises(RecordError, match=r"gsm8k\.jsonl:8: 8 problems are too few"):
        load_sources([f"gsm8k:{path}"], TaskOptions())
    path.write_text('{"question": "1 + 1?"}\n')
    with pytest.raises(RecordError, match=r"gsm8k\.jsonl:1 is not a GSM8K problem.*answer"):
        load_sources([f"gsm8k:{path}"], TaskOptions())
    with pytest.raises(RecordError, match="cannot be read"):
        load_sources([f"gsm8k:{tmp_path}/none"], TaskOptions())


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(hub.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")


def test_the_hubs_files_are_read_as_the_local_ones(tmp_path, hub_cache):
    records = [make_record("lcc", name=str(i), answers=("a", "b")) for i in range(3)]
    write_records(records, tmp_path / "lcc.jsonl")
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(tmp_path / "lcc.jsonl", "data/lcc.jsonl")
    rows = read_hub("json", f"zip://data/lcc.jsonl::{archive}", Record, "longbench:lcc")
    assert rows == records

    problems = [MathProblem(question="1 + 1?", answer="#### 2")]
    table = tmp_path / "test.parquet"
    hub.Dataset.from_list([msgspec.to_builtins(it) for it in problems]).to_parquet(table)
    assert read_hub("parquet", str(table), MathProblem, "gsm8k") == problems
    with pytest.raises(RecordError, match=r"gsm8k:1 does not have the fields.*input"):
        read_hub("parquet", str(table), Record, "gsm8k")
    with pytest.raises(RecordError, match="gsm8k cannot be had from the hub"):
        read_hub("parquet", str(tmp_path / "none.parquet"), Record, "gsm8k")


def test_without_a_hub_the_remedy_is_named():
    script = (
        "from profiles.data.datasets import load_sources\n"
        "from profiles.data.records import RecordError\n"
        "from profiles.data.tasks import TaskOptions\n"
        "for spec in ('longbench:hotpotqa', 'gsm8k'):\n"
        "    try:\n"
        "        load_sources([spec], TaskOptions())\n"
        "    except RecordError as error:\n"
        "        print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    longbench, gsm8k = ended.stdout.splitlines()
    assert longbench.startswith("longbench:hotpotqa cannot be had from the hub")
    assert gsm8k.startswith("gsm8k cannot be had from the hub")
    assert "download the file and give its path" in longbench
    assert "--data-dir" in gsm8k
