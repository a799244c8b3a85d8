"""`droidspeak distill` on a small pair: what it learns, what it writes, what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from distill_parts import record, write_base, write_prompts, write_teacher
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cachetree.checkpoint.adapters import read_invocation
from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions
from profiles.distill import training
from profiles.distill.forward import ATTENTION, Branches, Reader, read_document
from profiles.distill.prompts import find_invocation, lessons_of, load_prompts
from profiles.distill.student import adapter_parameters, export_adapter, make_student
from sglang_droidspeak.cli import main
from tools.merge import merge_folder

TEMPLATE = "{context}\n\n{input}"
FAILED_GATE = 3
WEIGHTS = "adapter_model.safetensors"


def run(*args: object) -> tuple[int, str]:
    """Run the command in this process. Return its status and output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["distill", *map(str, args)])
    return status, said.getvalue()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def teacher(base: Path) -> Path:
    return write_teacher(base, base.parent / "teacher")


@pytest.fixture(scope="module")
def prompts(base: Path) -> Path:
    return write_prompts(base.parent / "prompts.jsonl", [record(i) for i in range(36)])


def flags(base: Path, data: Path, out: Path) -> list[object]:
    asked = ["--template", TEMPLATE, "--max-new", 4, "--dtype", "float32", "--device", "cpu"]
    return ["--base", base, "--data", data, "--out", out, "--rank", 4, *asked]


def test_an_adapter_comes_nearer_to_its_teacher(base, teacher, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("profiles.distill.distiller.slow_dtype", lambda *_: ("a slow dtype",))
    out = tmp_path / "out"
    arguments = [*flags(base, prompts, out), "--adapter", teacher, "--chat"]
    status, said = run(*arguments, "--steps", 40, "--rate", "3e-3", "--held-out-share", "0.25")
    assert status == FAILED_GATE, "so few contexts cannot prove it"
    assert "a slow dtype" in said
    result = json.loads((out / "distilled.json").read_text())
    assert result["reason"] in said.replace("\n", " ")
    assert [it["step"] for it in result["curve"]] == [0, 5, 10, 20, 40]
    assert result["curve"][-1]["kl"] < result["curve"][0]["kl"] / 2
    (task,) = result["tasks"]
    assert (task["num_contexts"], task["num_questions"]) == (3, 9)
    assert task["teacher"]["mean"] == 1.0, "without answers the teacher's are right"
    assert "Passed" not in (out / "report.html").read_text()
    assert not list(tmp_path.glob(".out.*")), "what is complete needs no state"


def test_peft_computes_the_same_from_the_folder(base, teacher, prompts, tmp_path):
    options = TaskOptions(template=TEMPLATE, metric=Metric.F1, max_new=4, chat=True)
    tokenizer, sources = AutoTokenizer.from_pretrained(base), load_prompts([prompts], options)
    model = AutoModelForCausalLM.from_pretrained(base)
    student = make_student(model, 4, 0, teacher)
    for parameter in adapter_parameters(student).values():
        parameter.data = parameter.data.bfloat16().float()
    for stated in ("answer", "question"):
        invocation = find_invocation(stated, sources[0].records[0], tokenizer)
        lesson = lessons_of(sources, tokenizer, invocation, 1000)[0]
        out = export_adapter(student, tmp_path / stated, invocation.ids)
        assert read_invocation(out) == invocation.ids
        reader = Reader(model, frozenset(), as_base=student.disable_adapter)
        with torch.no_grad():
            ours = reader.along(lesson, [0, 1], [(3,), (3,)])
        activated = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
        for question, row in enumerate(ours):
            prompt = lesson.document.prefix + lesson.document.questions[question].suffix
            with torch.no_grad():
                theirs = activated(input_ids=torch.tensor([prompt])).logits[0, -1]
            torch.testing.assert_close(row, theirs, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_can_be_the_teacher(base, teacher, prompts, tmp_path):
    merge_folder(base, teacher, tmp_path / "whole")
    kl = []
    for teaching in (["--adapter", teacher], ["--teacher", tmp_path / "whole"]):
        out = tmp_path / teaching[0].strip("-")
        status, said = run(*flags(base, prompts, out), *teaching, "--steps", 1)
        assert status == FAILED_GATE, said
        kl.append(json.loads((out / "distilled.json").read_text())["curve"][0]["kl"])
    assert 0 < kl[0] < kl[1], "from a LoRA the adapter begins as its teacher, else as the base"


@pytest.mark.parametrize("labels", ["only", "both"])
def test_answers_in_the_data_are_learned(labels, base, teacher, tmp_path):
    records = [record(i, answers=["oak"]) for i in range(36)]
    data, out = write_prompts(tmp_path / "data.jsonl", records), tmp_path / "out"
    arguments = [*flags(base, data, out), "--labels", labels, "--invocation", "question"]
    arguments += ["--adapter", teacher] if labels == "both" else []
    status, _ = run(*arguments, "--steps", 40, "--rate", "1e-2")
    result = json.loads((out / "distilled.json").read_text())
    first, *_, last = result["curve"]
    assert last["quality"] > first["quality"]
    if labels == "only":
        assert (status, result["passed"], last["quality"]) == (0, None, 1.0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.decode(read_invocation(out)) == "\n\n"


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    base, teacher, prompts, tmp_path, monkeypatch
):
    arguments = [*flags(base, prompts, tmp_path / "whole"), "--adapter", teacher, "--steps", 6]
    run(*arguments)
    monkeypatch.setattr(training, "SAVE_EVERY_S", 0.0)
    take = training.Trainer.step
    beside: list[tuple[int, str]] = []

    def stopping(self: training.Trainer, *args: object) -> float:
        if self.num_done == 3:
            beside.append(run(*arguments))
            raise KeyboardInterrupt
        return take(self, *args)

    arguments[arguments.index("--out") + 1] = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        patched.setattr(training.Trainer, "step", stopping)
        status, said = run(*arguments)
    assert (status, "continues from here" in said) == (130, True)
    [(refused, why)] = beside
    assert refused and "this training already runs in another process" in why
    assert not (tmp_path / "stopped").exists()
    run(*arguments)
    whole, stopped = (load_file(tmp_path / it / WEIGHTS) for it in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


@pytest.mark.parametrize("architecture", ["granite", "qwen3", "phi3"])
def test_other_classes_run_through_their_own_forward(architecture, tmp_path):
    base = write_base(tmp_path / "base", architecture)
    data = write_prompts(tmp_path / "data.jsonl", [record(i, answers=["oak"]) for i in range(12)])
    status, said = run(*flags(base, data, tmp_path / "out"), "--labels", "--steps", 2)
    assert status == 0, said


def test_branches_are_prompts_of_their_own_and_take_the_gradients_of_sdpa(base):
    document, questions = tuple(range(40, 70)), [(5, 6, 7, 8), (9, 10)]
    gradients = []
    for attention in (ATTENTION, "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(base, attn_implementation=attention)
        branches = Branches(model, read_document(model, document), 2)
        logits = branches.grow(questions, [2, 1])
        with torch.no_grad():
            for rows, asked, count in (
                (logits[:2], questions[0], 2),
                (logits[2:], questions[1], 1),
            ):
                alone = model(input_ids=torch.tensor([[*document, *asked]])).logits[0, -count:]
                torch.testing.assert_close(rows, alone, rtol=1e-4, atol=1e-4)
        logits.log_softmax(-1)[:, 3].sum().backward()
        gradients.append({name: it.grad for name, it in model.named_parameters()})
    for name, ours in gradients[0].items():
        torch.testing.assert_close(ours, gradients[1][name], rtol=1e-3, atol=1e-5)


SPACE = {"context": "red sea.\n"}
BAD = [
    ([], SPACE, [], r"data.jsonl:3: its context ends in white space, .*; strip the context"),
    ([], {"input": "And?\n\nNow?"}, [], r"data.jsonl:3: the invocation '\\n\\n' is .* again"),
    (["--invocation", "7,999"], {}, [], r"--invocation has the id 999, and .* 259 tokens"),
    (["--invocation", "hello"], {}, [], r"--invocation 'hello' is not in the template after"),
    (["--template", "{context}{input}"], {}, [], r"the invocation has no tokens, because"),
    (["--labels"], {}, [], r"data.jsonl:1 has no answers, from which --labels learns"),
    ([], {"answers": 1}, [], r"data.jsonl:3 is not a prompt with context and input: Expected"),
    (["--rank", "1"], {}, [], r"--rank is 1, and the teacher .* has 2; give at least that"),
    (["--steps", "0"], {}, [], r"--steps is 0; it has to be at least 1"),
    ([], {}, ["--adapter"], r"no teacher is given; name one by --adapter or --teacher, or"),
]


@pytest.mark.parametrize(("more", "change", "without", "expected"), BAD)
def test_unsafe_distillation_is_refused_in_one_line(
    more, change, without, expected, base, teacher, tmp_path
):
    records = [record(i) for i in range(36)]
    records[2] = {**records[2], **change}
    data = write_prompts(tmp_path / "data.jsonl", records)
    arguments = [*flags(base, data, tmp_path / "out"), "--adapter", teacher]
    for name in without:
        place = arguments.index(name)
        del arguments[place : place + 2]
    status, said = run(*arguments, *more)
    assert status == 1, said
    assert re.search(expected, " ".join(said.split())), said
    assert "Traceback" not in said


def test_data_without_room_for_held_out_contexts_are_refused(base, teacher, tmp_path):
    data = write_prompts(tmp_path / "data.jsonl", [record(i) for i in range(3)])
    status, said = run(*flags(base, data, tmp_path / "out"), "--adapter", teacher)
    assert (status, "cannot be split" in said) == (1, True)


def test_an_adapter_of_another_base_is_refused(base, prompts, tmp_path):
    other = write_base(tmp_path / "other", intermediate_size=96)
    teacher = write_teacher(other, tmp_path / "teacher")
    status, said = run(*flags(base, prompts, tmp_path / "out"), "--adapter", teacher)
    assert (status, "give the base that it was trained on" in said) == (1, True)


def test_white_space_before_a_header_is_shown(base, teacher, tmp_path):
    records = [record(i) for i in range(12)]
    records[2] = {**records[2], **SPACE}
    data = write_prompts(tmp_path / "data.jsonl", records)
    arguments = [*flags(base, data, tmp_path / "out"), "--adapter", teacher, "--chat", "--steps", 1]
    _, said = run(*arguments)
    assert "white space ends the context of 1 prompt" in " ".join(said.split())


def test_without_peft_the_command_says_what_to_install(
    base, teacher, prompts, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "peft", None)
    status, said = run(*flags(base, prompts, tmp_path / "out"), "--adapter", teacher)
    assert (status, said.count("\n")) == (1, 1)
    assert "pip install '/path/to/this/checkout[train]'" in said
