"""Prompts in request logs: what SGLang writes, what the prompts share, and what cannot be used."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.request_logger import RequestLogger
from shipped import DATA, SHIPPED, WEIGHTS, by_context, context_prompt, flags, prompt_of
from test_profile_command import FAST, run

from cachetree import ConfigError
from profiles.compute.models import ModelSource, load_tokenizer
from profiles.controls import with_context_of, without
from profiles.data.documents import common_contexts, data_files
from profiles.data.logs import SLACK, Asked, contexts_of, documents_of, read_logs, shorter
from profiles.data.metrics import Metric
from profiles.data.records import RecordError, read_records
from profiles.data.tasks import TaskOptions
from profiles.evidence import read_measured
from profiles.settings import Settings
from profiles.splits import load_splits
from sglang_droidspeak.cli import main

PAGE = 16
TASK = TaskOptions(template="{context}{input}", metric=Metric.SAME, max_new=8).task_for("")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelSource(path=WEIGHTS / "receiver"))


def log_of(folder: Path, requests: list[dict], level: int = 3, form: str = "json") -> Path:
    """Write SGLang's own log of these requests to a folder."""
    logger = RequestLogger(True, level, form, [str(folder)])
    for number, request in enumerate(requests):
        asked = GenerateReqInput(rid=str(number), sampling_params={"max_new_tokens": 4}, **request)
        logger.log_received_request(asked)
    (target,) = logger.targets
    for handler in [*target.handlers]:
        handler.close()
        target.removeHandler(handler)
    assert not logging.getLogger(target.name).handlers
    (path,) = folder.glob("*.log")
    return path


def prompts(number: int, name: str = "held_out") -> list[str]:
    return [prompt_of(it) for it in read_records(DATA / f"{name}.jsonl")[: 3 * number]]


def read_log(path: Path, tokenizer):
    (log,) = read_logs([path], tokenizer)
    return log


def documents(path: Path, tokenizer, asked_of: str | None = None):
    (source,), contexts = loaded([path], tokenizer, asked_of)
    return source, contexts


def loaded(paths: list[Path], tokenizer, asked_of: str | None = None):
    return documents_of(read_logs(paths, tokenizer), TASK, asked_of, tokenizer, PAGE, None)


def test_texts_and_tokens_of_sglangs_log_are_the_prompts_that_it_served(tokenizer, tmp_path):
    texts = prompts(3)
    ids = [tuple(tokenizer(it).input_ids) for it in texts]
    requests = [{"text": texts[0]}, {"text": texts[1:4], "lora_path": ["json", None, "json"]}]
    requests += [{"input_ids": list(it), "lora_path": "json"} for it in ids[4:]]
    log = read_log(log_of(tmp_path, requests), tokenizer)
    assert [it.ids for it in log.asked] == ids
    assert [it.model for it in log.asked] == ["base", "json", "base", *["json"] * 6]
    assert log.asked[2].place.endswith(".log:2:2")


def test_requests_of_the_openai_api_are_written_by_the_chat_template(tokenizer, tmp_path):
    tokenizer.chat_template = "{% for it in messages %}<bos> {{ it.content }}{% endfor %} answer :"
    parts = [{"type": "text", "text": "meet"}, {"type": "text", "text": "lupil"}]
    lines = [
        {"model": "base:json", "messages": [{"role": "user", "content": parts}]},
        {"custom_id": "1", "body": {"model": "m", "prompt": "<bos> meet lupil"}},
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "content": "meet", "tool_calls": [{"id": "1"}]}]},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("a line of the server\n" + "\n".join(map(json.dumps, lines)) + "\n{}\n")
    log = read_log(path, tokenizer)
    assert [tokenizer.decode(it.ids) for it in log.asked] == [
        "<bos> meet lupil answer :",
        "<bos> meet lupil",
    ]
    assert [it.model for it in log.asked] == ["json", "m"]
    assert log.unusable == {"is no prompt of text alone": 2}


def asked(*prompts: str) -> list[Asked]:
    return [Asked(ids=tuple(map(ord, it)), model="m", place="") for it in prompts]


def shared_by(*prompts: str) -> list[tuple[int, int]]:
    contexts = contexts_of(asked(*prompts), page_size=4)
    return [(it.num_shared, len(it.asked)) for it in contexts]


def test_documents_are_the_contexts_and_not_what_precedes_all_of_them():
    system = "S" * 40
    documents = [system + letter * 30 for letter in "abcde"]
    lines = [it + question for it in documents for question in ("one", "two", "ten")]
    assert shared_by("unlike", *lines) == [(70, 3)] * 5, "ten and two begin alike"


def test_questions_that_begin_alike_make_no_context_of_their_own():
    assert shared_by("d" * 64 + "what is a", "d" * 64 + "what is b", "d" * 64 + "ask") == [(64, 3)]


def test_the_turns_of_a_talk_are_a_context_once():
    turns = ["t" * 40, "t" * 40 + "u" * 40, "t" * 40 + "u" * 40 + "v" * 40]
    (context,) = shared_by(*turns)
    assert context[1] >= 2


def test_a_prompt_that_two_models_were_asked_is_shared_and_a_repeat_is_not():
    (one,) = asked("p" * 20)
    other = Asked(ids=one.ids, model="other", place="")
    (context,) = contexts_of([one, other, one], page_size=4)
    assert (context.num_shared, len(context.asked)) == (19, 2)
    assert contexts_of([one, one], page_size=4) == []


def test_contexts_of_a_log_are_those_of_its_data(tokenizer, tmp_path):
    """Each context has three questions. The opening and the tail are found, too, so the controls
    ask the right questions."""
    texts = prompts(6)
    source, contexts = documents(log_of(tmp_path, [{"text": it} for it in texts]), tokenizer)
    written = {tuple(tokenizer(it).input_ids) for it in texts}
    assert {it.prefix + of.suffix for it in contexts for of in it.questions} == written
    assert {len(it.questions) for it in contexts} == {3} and len(contexts) == 6
    assert "18 prompts; 6 contexts of 1" in source.note and "with 3 prompts each" in source.note
    for context in contexts:
        assert len(context.prefix) % PAGE == 0 and context.opening < PAGE
        for bare in without(context):
            assert tokenizer.decode([*bare.prefix, *bare.questions[0].suffix]).endswith("?")
            assert len(bare.prefix) + len(bare.questions[0].suffix) < 20
        swapped = with_context_of(contexts[0], context)
        assert swapped.prefix == contexts[0].prefix


def hourly(folder: Path, *hours: list[str]) -> list[Path]:
    """Write one log for each hour. All have the same file name, in folders of their own."""
    files = [folder / f"{hour}" / "requests.jsonl" for hour in range(len(hours))]
    for file, texts in zip(files, hours, strict=True):
        file.parent.mkdir()
        file.write_text("".join(json.dumps({"prompt": it}) + "\n" for it in texts))
    return files


def test_several_logs_make_the_contexts_of_one(tokenizer, tmp_path):
    """The first log has two questions about each document, and the second one has the third."""
    texts = prompts(6)
    first, second = [it for at, it in enumerate(texts) if at % 3], texts[::3]
    whole, of_hours = tmp_path / "whole", tmp_path / "hours"
    whole.mkdir()
    of_hours.mkdir()
    _, expected = loaded(hourly(whole, texts), tokenizer)
    files = hourly(of_hours, first, second)
    sources, contexts = loaded(files, tokenizer)
    assert [it.context for it in contexts] == [it.context for it in expected]
    assert [len(it.questions) for it in contexts] == [3] * 6
    assert [(it.name, len(it.records)) for it in sources] == [
        (str(files[0]), 12),
        (str(files[1]), 6),
    ]
    assert {it.note for it in sources} == {sources[0].note}
    assert sources[0].note.startswith("2 logs: 18 prompts; 6 contexts")
    described = data_files(sources, contexts)
    assert [it.num_questions for it in described] == [12, 6], "places are unique"


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_context_has_a_name_that_every_log_of_it_knows(page_size):
    """A log adds a common start of its questions to a context: at most a page, or an eighth. The
    names of one log's version must be known to the other's. A profile has only `context`."""
    for true in range(page_size, 40 * page_size):
        slack = max(page_size, true // SLACK)
        for more in {0, 1, page_size // 2, slack - 1, slack}:
            for others in {0, 1, page_size // 2, slack - 1, slack}:
                ours, theirs = true + more, true + others
                name = shorter(ours, page_size) // page_size
                least = shorter(shorter(theirs, page_size), page_size) // page_size
                assert least <= name <= true // page_size, (true, more, others)


def of_two_logs(folder: Path) -> tuple[Path, Path]:
    """Write two logs about the same documents. In the second one all questions begin alike."""
    contexts = [context_prompt(it) for it, _ in by_context(read_records(DATA / "held_out.jsonl"))]
    first = [f"{it} {of}" for it in contexts[:6] for of in ("who is this ?", "where is that ?")]
    later = [f"{it} tell me {of}" for it in contexts[:6] for of in ("who ?", "where ?")]
    return tuple(hourly(folder, first, later))


def test_a_context_of_another_log_is_recognised(tokenizer, tmp_path):
    one, other = (documents(it, tokenizer)[1] for it in of_two_logs(tmp_path))
    assert [it.context for it in one] != [it.context for it in other]
    for ours, theirs in ((one, other), (other, one)):
        assert len({it.context for it in ours}) == len(common_contexts(ours, theirs)) == 6
        assert all(it.context in of.names for it, of in zip(ours, theirs, strict=True))
        assert common_contexts(ours[:3], theirs[3:]) == set()


def test_a_second_log_of_the_same_contexts_does_not_judge(tokenizer, tmp_path):
    first, later = (f"log:{it}" for it in of_two_logs(tmp_path))
    settings = Settings(data=(first,), held_out=(later,), max_new=8)
    with pytest.raises(ConfigError, match="6 contexts are both in --data and in --held-out"):
        load_splits(settings, tokenizer, 1024)


def test_short_documents_behind_a_long_system_prompt_are_contexts_of_their_own(tokenizer, tmp_path):
    """Each is just longer than an eighth of what all share. So its shortest name would be one of
    what all share."""
    words = prompts(1)[0].split()
    system, letters = " ".join((words * 20)[:400]), sorted({*words})[:8]
    texts = [f"{system} {' '.join([it] * 53)} {of}" for it in letters for of in ("who", "what")]
    _, contexts = documents(*hourly(tmp_path, texts), tokenizer)
    assert len({it.context for it in contexts}) == len(contexts) == 8


def test_a_prompt_of_an_earlier_log_was_asked_first(tokenizer, tmp_path):
    logs = read_logs(hourly(tmp_path, prompts(2), prompts(1)), tokenizer)
    assert [it.number for log in logs for it in log.asked] == [*range(9)]


def test_a_folder_is_read_by_the_names_of_its_files(tokenizer, tmp_path):
    """SGLang's handler renames a file after its hour. An hour without requests is no error."""
    texts = prompts(2)
    hours = {"log": texts[4:], "log.01": texts[:2], "log.03": texts[3:4]}
    hours |= {"log.02": texts[2:3], "log.00": []}
    for name, asked in hours.items():
        lines = ["a line of the server", *(json.dumps({"prompt": it}) for it in asked)]
        (tmp_path / f"host.{name}").write_text("\n".join(lines))
    (tmp_path / "folder").mkdir()
    logs = read_logs([tmp_path], tokenizer)
    ids = [tuple(tokenizer(it).input_ids) for it in texts]
    assert [it.ids for log in logs for it in log.asked] == ids
    with pytest.raises(RecordError, match=r"host\.log is given more than once"):
        read_logs([tmp_path, tmp_path / "host.log"], tokenizer)
    with pytest.raises(RecordError, match="folder has no prompt, as no line is a request"):
        read_logs([tmp_path / "folder"], tokenizer)


def test_a_log_that_is_given_twice_is_refused(tokenizer, tmp_path):
    (file,) = hourly(tmp_path, prompts(2))
    again = tmp_path / "again.jsonl"
    again.symlink_to(file)
    with pytest.raises(RecordError, match=r"requests\.jsonl is given more than once"):
        read_logs([file, again], tokenizer)


def test_only_prompts_of_one_model_are_asked_about_what_others_read_too(tokenizer, tmp_path):
    requests = [
        {"text": it, "lora_path": "json" if number % 3 else None}
        for number, it in enumerate(prompts(4))
    ]
    path = log_of(tmp_path, requests)
    _, contexts = documents(path, tokenizer, "json")
    assert {len(it.questions) for it in contexts} == {2} and len(contexts) == 4
    _, base = documents(path, tokenizer, "base")
    assert {len(it.questions) for it in base} == {1}
    assert [it.context for it in base] == [it.context for it in contexts]


@pytest.mark.parametrize(
    ("level", "form", "says"),
    [
        (1, "json", "has no text at this --log-requests-level"),
        (2, "json", "is cut in the middle at this --log-requests-level"),
        (3, "text", "is logged in SGLang's text format"),
    ],
)
def test_a_log_without_whole_prompts_is_refused_with_its_remedy(
    tokenizer, tmp_path, level, form, says
):
    requests = [{"text": "<bos> " + "meet " * 900}, {"input_ids": [5] * 3000}]
    with pytest.raises(RecordError) as caught:
        read_log(log_of(tmp_path, requests, level, form), tokenizer)
    assert says in str(caught.value)
    assert "--log-requests-level 3 --log-requests-format json" in str(caught.value)


STRAY = {
    '{"body": "x"}': "is no request: Expected `object`, got `str`",
    '{"prompt": true}': "is no request: Expected `str | array | null`, got `bool` - at `$.prompt`",
    '{"messages": [{"content": "x"}]}': "Object missing required field `role` - at `$.messages[…]`",
    '{"messages": [{"role": "user", "content": "x"}]}': "is a chat without a prompt: the chat",
    '{"text": "x", "lora_path": []}': "names adapters for another number of prompts",
    '{"prompt": ["x", 5]}': "is no prompt of text alone",
    '{"input_ids": [5, [5]]}': "is no prompt of text alone",
    '{"input_ids": [[]]}': "is no prompt of text alone",
    '{"input_ids": [5, -1]}': "has the token -1",
    '{"input_ids": [5, 99999]}': "has the token 99999",
    "[" * 9000 + "{": "",
    '{"a":' * 9000: "maximum recursion depth exceeded",
}


@pytest.mark.parametrize(("line", "why"), STRAY.items(), ids=range(len(STRAY)))
def test_a_line_that_is_no_request_is_counted_with_its_reason(
    tokenizer, tmp_path, monkeypatch, line, why
):
    refusing = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(tokenizer, "chat_template", refusing)
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{line}\n{{"prompt": "meet"}}\n')
    assert sum(read_log(path, tokenizer).unusable.values()) == bool(why)
    path.write_text(f"{line}\n")
    with pytest.raises(RecordError) as caught:
        read_log(path, tokenizer)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_prompts_that_share_nothing_and_too_few_contexts_are_refused(tokenizer, tmp_path):
    alone = log_of(tmp_path, [{"text": it} for it in prompts(6)[::3]])
    with pytest.raises(RecordError, match=r"6 prompts; no context that is shared .*too few"):
        documents(alone, tokenizer)
    one = log_of(tmp_path / "one", [{"text": it} for it in prompts(1)])
    with pytest.raises(RecordError, match=r"1 contexts of .*too few contexts"):
        documents(one, tokenizer)
    with pytest.raises(RecordError, match=r"has no prompt, as no line is a request"):
        read_log(DATA / "train.jsonl", tokenizer)


@pytest.mark.parametrize("flag", [("--metric", "f1"), ("--chat",), ("--template", "{context}")])
def test_flags_about_gold_answers_and_templates_are_refused_beside_a_log(tmp_path, flag):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a"}\n')
    args = ["--from-log", str(path), *flag, "--out", str(tmp_path / "pair.json")]
    status, said = run(*flags(SHIPPED[0]), *args)
    assert status == 1 and "a request log has whole prompts without gold answers" in said


def test_a_log_alone_makes_a_profile(tmp_path):
    path = log_of(tmp_path, [{"text": it} for it in prompts(6)])
    out = tmp_path / "pair.json"
    args = ["--from-log", str(path), "--max-new", "8", "--out", str(out), "--tolerance", "0.9"]
    status, said = run(*flags(SHIPPED[0]), *args, *FAST, "--group", "4", "--timing-seconds", "0")
    assert status == 0, said
    assert "6 contexts of" in said
    profile = read_measured(out)
    assert (profile.metric, profile.full_prefill_quality) == ("same", 1.0)
    assert profile.held_out.num_contexts == 3
    assert profile.controls.startswith("without the document 0%")
    status, said = run("show", str(out), "--verify-verdict")
    assert status == 0, said
    _, later = of_two_logs(tmp_path)
    args = ["verify", str(out), *flags(SHIPPED[0]), *FAST, "--from-log", str(later)]
    status, said = run(*args)
    assert status == 1 and "6 of 6 contexts (100%) are the profile's own" in said
    status, said = run("calibrate", *args[1:])
    assert "held-out contexts are not in --data" not in said, said


def test_a_flag_before_an_action_is_named_as_it_was_given(capsys):
    with pytest.raises(SystemExit):
        main(["profile", "--data", "x", "verify", "pair.json"])
    assert "give --data after verify" in capsys.readouterr().err


def test_a_log_or_folder_that_cannot_be_read_is_named(tmp_path, tokenizer, monkeypatch):
    absent = tmp_path / "absent.log"
    with pytest.raises(RecordError, match=rf"^request log {absent} cannot be read: No such file"):
        read_logs([absent], tokenizer)

    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(RecordError, match=rf"^request log {tmp_path} cannot be read: Permission"):
        read_logs([tmp_path], tokenizer)
