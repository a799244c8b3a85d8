"""The prompts in data/longbench_prompts.json are LongBench's, with `<C>` and `<Q>` filled in."""

import json
from pathlib import Path

import pytest

from cachetree.errors import ConfigError
from profiles.data.metrics import Metric
from profiles.data.tasks import DEFAULT_MAX_NEW, TASKS, AnswerPart, Task, TaskOptions, score

PUBLISHED = json.loads((Path(__file__).parent / "data/longbench_prompts.json").read_text())


def make_task(template="{context} {input}", metric=Metric.F1, max_new=8, **fields):
    return Task(name="t", template=template, metric=metric, max_new=max_new, **fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_prompts_are_the_published_ones(name):
    task, prompt = TASKS[name], PUBLISHED[name]
    assert task.prompt("<C>", "<Q>") == prompt
    assert prompt.startswith(task.shared("<C>"))
    assert task.shared("<C>").endswith("<C>")


def test_every_longbench_task_has_its_published_length_and_metric():
    assert {name: (task.metric.value, task.max_new) for name, task in TASKS.items()} == {
        "hotpotqa": ("f1", 32),
        "2wikimqa": ("f1", 32),
        "musique": ("f1", 32),
        "narrativeqa": ("f1", 128),
        "qasper": ("f1", 128),
        "multifieldqa_en": ("f1", 64),
        "gov_report": ("rouge_l", 512),
        "qmsum": ("rouge_l", 512),
        "multi_news": ("rouge_l", 512),
        "trec": ("classification", 64),
        "triviaqa": ("f1", 32),
        "samsum": ("rouge_l", 128),
        "passage_count": ("count", 32),
        "passage_retrieval_en": ("retrieval", 32),
        "lcc": ("edit_similarity", 64),
        "repobench-p": ("edit_similarity", 64),
        "gsm8k": ("exact_number", 256),
    }
    assert PUBLISHED.keys() == TASKS.keys() - {"gsm8k"}


def test_a_chat_wraps_what_longbench_wraps():
    """LongBench's `pred.py` puts few-shot and code prompts into no chat. A user's own template is
    always put into a message."""
    bare = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    asked = {name: TaskOptions(chat=True).task_for(name).chat for name in TASKS}
    assert {name for name, chat in asked.items() if not chat} == bare
    assert TaskOptions(chat=True, template="{context} {input}").task_for("trec").chat
    assert not TaskOptions(chat=True).task_for("lcc_e").chat


def test_a_prompt_of_gsm8k_goes_on_with_its_examples():
    context = "Question: 1 + 1?\nAnswer: 1 + 1 = 2\n#### 2\n\n"
    assert TASKS["gsm8k"].prompt(context, "2 + 2?") == f"{context}Question: 2 + 2?\nAnswer:"


def test_braces_in_texts_are_texts():
    task = make_task("{{x}} {context} {{y}} {input}!{input}")
    assert task.prompt("{a}", "{input}") == "{x} {a} {y} {input}!{input}"
    assert task.opening == "{x} "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("<bos> {input}", "has {input} before {context}.*put {context} first"),
        ("<bos>", "has no {context}.*'<bos> {context} {input}'"),
        ("{context} {question}", "has {question}; use {context} and {input}"),
        ("{context} {}", "has {};"),
        ("{context!r} {input}", "has {context!r};"),
        ("{context:>9} {input}", "has {context:>9};"),
        ("{context} {input.x}", "has {input.x};"),
        ("{context} {context}", "{context} twice"),
        ("{context} } {input}", "malformed.*write {{"),
        ("{context} {input", "malformed"),
    ],
)
def test_useless_templates_are_named_with_a_remedy(template, message):
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")) as caught:
        make_task(template)
    assert repr(template) in str(caught.value)


def test_an_answer_needs_room():
    with pytest.raises(ConfigError, match="max_new is 0"):
        make_task(max_new=0)


CODE = "\n\n# a comment\n```\nx = 1  // no\n    return  x\nmore"


@pytest.mark.parametrize(
    ("part", "text", "expected"),
    [
        (AnswerPart.WHOLE, CODE, CODE),
        (AnswerPart.CODE_LINE, CODE, "    return  x"),
        (AnswerPart.CODE_LINE, "# only a comment", ""),
        (AnswerPart.FIRST_LINE, "\n\nred lamp\nQuestion: what?", "red lamp"),
        (AnswerPart.BEFORE_NEXT_QUESTION, "4 #### 4\n\nQuestion: 5?\nAnswer: 5", "4 #### 4\n\n"),
    ],
)
def test_the_part_of_an_answer_that_is_judged(part, text, expected):
    task = make_task(metric=Metric.EDIT_SIMILARITY, answer_part=part)
    assert score(task, text, [expected]) == 1.0
    assert score(task, text, [expected + "!!!!"]) < 1.0


def test_after_few_shot_examples_the_first_line_counts():
    parts = {name for name, task in TASKS.items() if task.answer_part is AnswerPart.FIRST_LINE}
    assert parts == {"trec", "triviaqa", "samsum"}
    assert score(TASKS["trec"], "\nDate\nType: City", ["Date"], ["City", "Date"]) == 1.0


def test_a_number_after_the_next_question_does_not_count():
    assert score(TASKS["gsm8k"], " so it is 5\n\nQuestion: what is 7?", ["#### 5"]) == 1.0


def test_the_user_may_change_a_known_task():
    options = TaskOptions(metric=Metric.F1, max_new=7)
    task = options.task_for("lcc")
    assert (task.metric, task.max_new) == (Metric.F1, 7)
    assert (task.template, task.answer_part) == (TASKS["lcc"].template, AnswerPart.CODE_LINE)
    assert TaskOptions().task_for("lcc_e") == TASKS["lcc"]


def test_an_unknown_data_set_needs_a_template_and_a_metric():
    for options in (
        TaskOptions(),
        TaskOptions(metric=Metric.F1),
        TaskOptions(template="{context}"),
    ):
        with pytest.raises(
            ConfigError, match=r"'other' is none of hotpotqa, .*--template and --met"
        ):
            options.task_for("other")
    task = TaskOptions(template="<bos> {context} {input}", metric=Metric.ROUGE_L).task_for("other")
    assert (task.name, task.max_new) == ("other", DEFAULT_MAX_NEW)
    assert task.prompt("c", "i") == "<bos> c i"
