"""Skills as adapters that share exactly: what they learn from, and the product's command for it.

    python -m tools.real distill --out DIR
    python -m tools.real judge DIR

An aLoRA learns from long documents at the price of its questions, because the documents' KV is the
base's and is computed once. So three of four documents are long here.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from tqdm import tqdm

from profiles.adapters import ADAPTER_CONFIG
from profiles.answerers import ends_of
from profiles.compute.models import ModelSource, load_model, load_tokenizer
from profiles.data.metrics import Metric
from profiles.data.records import Record, write_records
from profiles.data.tasks import TaskOptions, score
from profiles.distill.forward import ATTENTION, Reader
from profiles.distill.prompts import find_invocation, lessons_of, load_prompts
from profiles.distill.student import make_student
from profiles.stats.gate import interval
from tools.real.check import TEMPLATE
from tools.real.packages import Package, read_packages
from tools.real.questions import Asked, askable, document
from tools.real.train import WEIGHTS

SKILL: Final = "questions"
LONG: Final = (15, 25)
"""Records of a long document, about 1,200 to 2,000 tokens."""
SHORT: Final = (4, 8)
NUM_LONG: Final = 240
NUM_SHORT: Final = 80
NUM_QUESTIONS: Final = 16
"""About each document."""
HARDER: Final = ("Which package", "What does")
"""Beginnings of questions that are asked twice as often as others."""
RECIPE: Final = (
    *("--labels", "--invocation", "question", "--steps", "1000", "--questions", "12"),
    *("--max-disk-gb", "14"),
)
"""Flags of the shipped adapter."""
LONG300: Final = "long300"
"""Set of the skill `questions`: 15 questions about each document of `long`."""
_DRAWS: Final = 10


def lessons(packages: Path) -> Iterator[Record]:
    """Questions about the training part's records, drawn from seeds."""
    drawn = read_packages(packages, "train")
    for number in range(NUM_LONG + NUM_SHORT):
        rng = Random(f"distill {SKILL} {number}")
        chosen = rng.sample(drawn, rng.randint(*(LONG if number < NUM_LONG else SHORT)))
        asked = dict.fromkeys(_harder(chosen, rng) for _ in range(_DRAWS * NUM_QUESTIONS))
        yield from _records("train", number, document(chosen), [*asked][:NUM_QUESTIONS])


def long_questions(packages: Path) -> Iterator[Record]:
    """Fifteen questions about each document of the set `long`."""
    drawn = read_packages(packages, "verify")[120:]
    for number in range(20):
        chosen, rng = drawn[25 * number : 25 * number + 25], Random(f"long300 {number}")
        asked = [rng.choice(askable(it, chosen)) for it in rng.sample(chosen, 15)]
        yield from _records(LONG300, number, document(chosen), asked)


def _harder(chosen: Sequence[Package], rng: Random) -> Asked:
    asked = askable(rng.choice(chosen), chosen)
    weights = [2 if it[0].startswith(HARDER) else 1 for it in asked]
    return rng.choices(asked, weights)[0]


def _records(name: str, number: int, context: str, asked: Sequence[Asked]) -> Iterator[Record]:
    for index, (question, answer) in enumerate(asked):
        yield Record(
            input=question,
            context=context,
            answers=(answer,),
            length=len(context.split()),
            dataset=f"packages_{SKILL}",
            id=f"{name}-{number:03}-{index:02}",
        )


def write_lessons(packages: Path, out: Path) -> tuple[Path, Path]:
    """Write what is learned and what is judged on long documents, as `out/questions/SET.jsonl`."""
    files = out / SKILL / "train.jsonl", out / SKILL / f"{LONG300}.jsonl"
    files[0].parent.mkdir(parents=True, exist_ok=True)
    write_records(lessons(packages), files[0])
    write_records(long_questions(packages), files[1])
    return files


def distill(base: Path, shipped: Path, data: Path, out: Path, *flags: str) -> int:
    """Make the adapter by the product's command, on one thread; more flags are the command's."""
    learned, _ = write_lessons(shipped / "packages.jsonl", data)
    command = [
        *("droidspeak", "distill", "--base", str(base), "--adapter", str(shipped / SKILL)),
        *("--data", str(learned), "--held-out", str(data / SKILL / "held_out.jsonl")),
        *("--chat", "--template", TEMPLATE, "--metric", "f1", "--max-new", "16"),
        *("--out", str(out), *flags),
    ]
    tqdm.write(shlex.join(command))
    launched = [sys.executable, "-m", "sglang_droidspeak.cli", *command[1:]]
    return subprocess.run(launched, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def judge(base: Path, adapter: Path, sets: Sequence[Path]) -> None:
    """Show the adapter's quality on sets, by kind of question, with 95 % intervals by context.

    The adapter reads the base's KV up to its invocation, as a server that reuses does.
    """
    torch.set_num_threads(1)
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    source = ModelSource(path=base)
    model, tokenizer = load_model(source, dtype=torch.bfloat16), load_tokenizer(source)
    model.set_attn_implementation(ATTENTION)
    with tempfile.TemporaryDirectory() as folder:
        ordinary = _as_ordinary(adapter, config, Path(folder))
        student = make_student(model, config["r"], 0, ordinary)
    reader = Reader(model, ends_of(model, tokenizer), as_base=student.disable_adapter)
    options = TaskOptions(template=TEMPLATE, metric=Metric.F1, max_new=16, chat=True)
    stated = ",".join(map(str, config["alora_invocation_tokens"]))
    for file in sets:
        sources = load_prompts([str(file)], options)
        asked = {it.name: it.record.input for source in sources for it in source.records}
        invocation = find_invocation(stated, sources[0].records[0], tokenizer)
        scored: dict[str, list[list[float]]] = defaultdict(list)
        for lesson in tqdm(
            lessons_of(sources, tokenizer, invocation, 8000), file.stem, leave=False
        ):
            questions = lesson.document.questions
            answers = reader.answer(lesson, range(len(questions)))
            found = defaultdict(list)
            for question, said in zip(questions, answers, strict=True):
                text = tokenizer.decode(said.tokens, skip_special_tokens=True)
                quality = score(lesson.document.task, text, question.answers)
                for kind in ("all", kind_of(asked[question.name])):
                    found[kind].append(quality)
            for kind, qualities in found.items():
                scored[kind].append(qualities)
        for kind, contexts in sorted(scored.items()):
            it, number = interval(contexts), sum(map(len, contexts))
            tqdm.write(
                f"{file.stem} {kind}: {it.mean:.3f} [{it.low:.3f}, {it.high:.3f}] of {number}"
            )


def _as_ordinary(adapter: Path, config: dict[str, Any], folder: Path) -> Path:
    """Copy an activated adapter without its invocation: the judge decides where it acts."""
    (folder / WEIGHTS).symlink_to((adapter / WEIGHTS).resolve())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"alora_invocation_tokens": None}))
    return folder


def kind_of(question: str) -> str:
    return "which package" if question.startswith("Which package") else "field"
