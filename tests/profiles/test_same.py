"""`--metric same` compares a plan's answers with those of full prefill, without labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from measuring_parts import bench_of
from rich.console import Console
from shipped import ASKED, DATA, SHIPPED, WEIGHTS, flags
from test_evidence import COSTS
from test_profile_command import FAST, run

from profiles.compute.measuring import judging_steps, measure
from profiles.compute.study import HELD_OUT
from profiles.controls import measure_controls
from profiles.data.documents import Document
from profiles.data.metrics import Metric, same
from profiles.data.records import read_records, write_records
from profiles.evidence import MeasuredProfile, read_measured
from profiles.report.terminal import table_of
from profiles.stats.choice import qualities_of
from tools.pairs.questions import read_documents

TEMPLATE = ASKED[:2]


def unlabelled(name: str, number: int, folder: Path) -> str:
    """Write some of the shipped data without the answers."""
    records = read_records(DATA / f"{name}.jsonl")[: 3 * number]
    path = folder / f"{name}.jsonl"
    write_records([msgspec.structs.replace(it, answers=()) for it in records], path)
    return str(path)


@pytest.fixture(scope="module")
def pair():
    return SHIPPED[0].load()


@pytest.fixture(scope="module")
def documents(pair) -> list[Document]:
    read = read_documents(DATA / "held_out.jsonl", pair.tokenizer)[:4]
    return [replace(it, task=replace(it.task, metric=Metric.SAME)) for it in read]


def test_texts_are_the_same_if_only_white_space_differs():
    assert same(" a  b\n", "a b") == 1.0
    assert same("a B", "a b") == same("1.5", "15") == same("a b", "a b c") == 0.0
    assert same("", "") == 1.0


def test_answers_are_compared_with_full_prefills_own_and_not_with_the_datas(pair, documents):
    """The oracle decodes. The scores of the sender and of full reuse are the shares of equal
    texts."""
    with bench_of(pair, documents) as bench:
        judged = measure(bench, HELD_OUT, documents, judging_steps(documents, [], 12))
        for place, document in enumerate(documents):
            theirs = bench.sender.model.prefix(document.prefix, ()).kv
            own = bench.receiver.model.prefix(document.prefix, ()).kv
            texts = [
                [answerer.text(answer) for answer in answerer.answer(document, kv)]
                for answerer, kv in (
                    (bench.receiver, own),
                    (bench.sender, theirs),
                    (bench.receiver, theirs),
                )
            ]
            right, *others = texts
            expected = [[float(a == b) for a, b in zip(right, it, strict=True)] for it in others]
            assert [*judged.sender[place]] == expected[0]
            assert qualities_of(judged.full_reuse)[place] == expected[1]
            assert set(judged.full_prefill[place]) == {1.0}


def test_controls_ask_whether_the_answer_is_the_same_without_the_document(pair, documents):
    full = [[1.0] * 3] * len(documents)
    with bench_of(pair, documents) as bench:
        measure(bench, HELD_OUT, documents, judging_steps(documents, [], 12))
        (control,) = measure_controls(bench, documents, full, COSTS, Console(quiet=True)).values()
    assert (
        control.full_prefill == 1.0 and control.no_document < 0.3 and control.other_document < 0.3
    )
    assert control.in_two_parts == 1.0, "float32 rounds too little for near ties to matter here"


def test_metrics_with_gold_answers_are_not_asked_for_a_repeat(pair, documents):
    judged = [replace(it, task=replace(it.task, metric=Metric.F1)) for it in documents]
    with bench_of(pair, judged) as bench:
        full = [[1.0] * 3] * len(judged)
        (control,) = measure_controls(bench, judged, full, COSTS, Console(quiet=True)).values()
    assert control.in_two_parts is None


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, MeasuredProfile]:
    folder = tmp_path_factory.mktemp("same")
    out = folder / "pair.json"
    args = ["--data", unlabelled("train", 3, folder), "--max-new", "8"]
    args += ["--held-out", unlabelled("held_out", 3, folder), "--small", str(WEIGHTS / "sender")]
    args += [*FAST, "--group", "3", "--timing-seconds", "0", "--tolerance", "0.9"]
    status, said = run(*flags(SHIPPED[0]), *args, *TEMPLATE, "--metric", "same", "--out", str(out))
    assert status == 0, said
    return out, read_measured(out)


def test_prompts_without_answers_make_a_profile_of_which_the_verdict_recomputes(made):
    out, profile = made
    assert profile.metric == "same" and profile.passed
    assert profile.full_prefill_quality == 1.0 > profile.full_reuse_quality
    assert profile.recommended.quality > 0.8
    status, said = run("show", str(out), "--verify-verdict")
    assert status == 0 and "follows from the scores" in said
    console = Console(record=True, width=100, quiet=False, file=(out.parent / "said").open("w"))
    console.print(table_of(profile))
    assert "answers as full prefill" in console.export_text()


def test_a_smaller_model_is_compared_with_full_prefills_answers_too(made):
    _, profile = made
    (small,) = (it for it in profile.baselines if it.kind.value == "small_model")
    assert small.quality.mean == profile.held_out.sender.mean, "it is the sender here"


def test_other_metrics_refuse_prompts_without_answers_and_name_this_one(tmp_path):
    data = unlabelled("train", 3, tmp_path)
    status, said = run(*flags(SHIPPED[0]), "--data", data, *ASKED, "--out", str(tmp_path / "p"))
    assert status == 1 and "data.jsonl:1" not in said
    assert "train.jsonl:1 has no answers" in said and "--metric same" in said
    assert len(said.strip().splitlines()) == 1
