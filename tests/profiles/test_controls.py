"""Controls: questions that need no document say nothing about reuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measuring_parts import bench_of
from msgspec.structs import replace as changed
from rich.console import Console
from sample_profile import sample_profile
from shipped import DATA, SHIPPED, prompt_of
from test_evidence import COSTS
from test_gate import GOOD, TASK, TOLERANCE, split_of

from profiles.compute.models import Pair
from profiles.controls import measure_controls, with_context_of, without
from profiles.data.documents import Document
from profiles.data.records import read_records
from profiles.evidence import Controls
from profiles.report import tables
from profiles.stats.gate import controls_of, verdict
from tools.pairs.questions import read_documents

NUM_ASKED = 6
KEPT = Controls(num_contexts=24, full_prefill=0.5, no_document=0.05, other_document=0.125)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return SHIPPED[1].load()


@pytest.fixture(scope="module")
def documents(pair: Pair) -> list[Document]:
    return read_documents(DATA / "train.jsonl", pair.tokenizer)


def prompts(document: Document) -> list[tuple[int, ...]]:
    return [document.prefix + it.suffix for it in document.questions]


def test_without_its_document_a_prompt_is_the_rest_of_its_template(pair, documents):
    records = read_records(DATA / "train.jsonl")[:3]
    bare = [prompt for it in without(documents[0]) for prompt in prompts(it)]
    assert bare == [tuple(pair.tokenizer(f"<bos> {it.input}").input_ids) for it in records]


def test_without_an_opening_the_questions_first_token_is_the_prefix(documents):
    (first, *_) = without(replace(documents[0], opening=0))
    question = documents[0].questions[0].suffix[documents[0].tail :]
    assert (first.prefix, first.questions[0].suffix) == (question[:1], question[1:])


def test_without_an_opening_a_question_of_one_token_stays_a_question(documents):
    (asked, *_), tail = documents[0].questions, documents[0].tail
    short = replace(asked, suffix=asked.suffix[: tail + 1])
    (document,) = without(replace(documents[0], opening=0, questions=(short,)))
    assert document.questions[0].suffix == short.suffix[tail:]


def test_another_document_is_asked_about_in_whole(pair, documents):
    records = read_records(DATA / "train.jsonl")
    swapped = prompts(with_context_of(documents[1], documents[0]))
    asked = [prompt_of(changed(it, context=records[3].context)) for it in records[:3]]
    assert swapped == [tuple(pair.tokenizer(it).input_ids) for it in asked]


def test_biographies_are_not_answered_without_them(pair, documents, monkeypatch):
    monkeypatch.setattr("profiles.controls.NUM_CONTROLLED", NUM_ASKED)
    full = [[1.0] * 3] * NUM_ASKED + [[0.0] * 3] * (len(documents) - NUM_ASKED)
    with bench_of(pair, documents) as bench:
        controls = measure_controls(bench, documents, full, COSTS, Console(quiet=True))
        (control,) = controls.values()
        assert (control.num_contexts, control.full_prefill) == (NUM_ASKED, 1.0)
        assert control.no_document < 0.3 and control.other_document < 0.3
        alone = measure_controls(bench, documents[:1], full, COSTS, Console(quiet=True))
        assert not alone, "there is no other one"


@pytest.mark.parametrize(
    ("arm", "says"),
    [("no_document", "without the document"), ("other_document", "with another document")],
)
def test_a_task_that_keeps_more_than_half_without_its_documents_cannot_pass(arm, says):
    needless = changed(TASK, controls=changed(KEPT, **{arm: 0.255}))
    assert verdict([GOOD], split_of(needless), TOLERANCE) == (
        False,
        f"{says} full prefill keeps 51% of its quality on held-out questions, so this task cannot "
        "judge reuse; ask what only the document answers",
    )
    nothing = changed(TASK, controls=changed(KEPT, full_prefill=0.0, **{arm: 0.5}))
    assert verdict([GOOD], split_of(nothing), TOLERANCE)[0], "no share of nothing"
    half = changed(TASK, controls=changed(KEPT, **{arm: 0.25}))
    assert verdict([GOOD], split_of(half), TOLERANCE)[0]
    both = split_of(changed(TASK, controls=KEPT), needless)
    assert "of facts, so this task" in verdict([GOOD], both, TOLERANCE)[1]


def test_report_says_what_controls_keep_or_that_none_were_measured():
    said = controls_of(split_of(changed(TASK, controls=KEPT)))
    assert said == (
        "without the document 10% and with another document 25% of full prefill's quality is left"
    )
    profile = changed(sample_profile(), controls=said)
    assert dict(tables.summary(profile).rows)["controls"] == said
    old = changed(profile, controls=controls_of(split_of(TASK)))
    assert dict(tables.summary(old).rows)["controls"].startswith("not measured")
    assert verdict([GOOD], split_of(TASK), TOLERANCE)[0], "its verdict stays"
