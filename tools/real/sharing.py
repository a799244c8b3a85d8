"""Make aLoRAs of the skills with `droidspeak distill`: they share KV exactly. Judge their answers.

    python -m tools.real distill SKILL --out DIR
    python -m tools.real judge SKILL DIR

Long documents hardly slow the training of an aLoRA down: their KV is the base's, and is computed
once. So three of four documents are long here.
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
from profiles.data.records import Record, write_records
from profiles.data.tasks import score
from profiles.distill.forward import ATTENTION, Reader
from profiles.distill.prompts import find_invocation, lessons_of, load_prompts
from profiles.distill.student import make_student
from profiles.stats.gate import interval
from tools.real.check import MAX_NEW, METRICS, TEMPLATE, options
from tools.real.packages import Package, read_packages
from tools.real.questions import SKILLS, TRAINED, Asked, document
from tools.real.train import WEIGHTS

SHIPPED: Final = Path("examples/real")
PACKAGES: Final = SHIPPED / "packages.jsonl"
LONG: Final = (15, 25)
"""Range of the number of records in a long document: about 1,200 to 2,000 tokens."""
SHORT: Final = (4, 8)
NUM_LONG: Final = 240
NUM_SHORT: Final = 80
NUM_QUESTIONS: Final = 16
"""Number of questions about each training document."""
FLAGS: Final = {
    "questions": ("--invocation", "question", "--steps", "1000", "--questions", "12"),
    "json": ("--invocation", "answer", "--steps", "600", "--questions", "8"),
}
"""Flags of `droidspeak distill` that made the shipped adapters, by skill."""
LONG300: Final = "long300"
"""Name of the set with 15 questions about each document of the set `long`."""
_DRAWS: Final = 10


def lessons(packages: Path, skill: str) -> Iterator[Record]:
    """Make training questions about documents of the part `train`: long ones, then short ones."""
    drawn, draw = read_packages(packages, "train"), TRAINED[skill]
    for number in range(NUM_LONG + NUM_SHORT):
        rng = Random(f"distill {skill} {number}")
        chosen = rng.sample(drawn, rng.randint(*(LONG if number < NUM_LONG else SHORT)))
        draws = range(_DRAWS * NUM_QUESTIONS)
        asked = dict.fromkeys(draw(rng.choice(chosen), chosen, rng) for _ in draws)
        yield from _records(skill, f"train-{number:03}", chosen, [*asked][:NUM_QUESTIONS])


def long_questions(packages: Path, skill: str) -> Iterator[Record]:
    """Ask about fifteen records of each `long` document, with equal odds for each kind."""
    drawn = read_packages(packages, "verify")[120:]
    for number in range(20):
        chosen, rng = drawn[25 * number : 25 * number + 25], Random(f"{LONG300} {number}")
        asked = [SKILLS[skill](it, chosen, rng) for it in rng.sample(chosen, 15)]
        yield from _records(skill, f"{LONG300}-{number:03}", chosen, asked)


def _records(
    skill: str, name: str, chosen: Sequence[Package], asked: Sequence[Asked]
) -> Iterator[Record]:
    context = document(chosen)
    for index, (question, answer) in enumerate(asked):
        yield Record(
            input=question,
            context=context,
            answers=(answer,),
            length=len(context.split()),
            dataset=f"packages_{skill}",
            id=f"{name}-{index:02}",
        )


def write_lessons(packages: Path, data: Path, skill: str) -> tuple[Path, Path]:
    """Write the training questions and the set `LONG300`, as `data/SKILL/SET.jsonl`."""
    files = data / skill / "train.jsonl", data / skill / f"{LONG300}.jsonl"
    files[0].parent.mkdir(parents=True, exist_ok=True)
    write_records(lessons(packages, skill), files[0])
    write_records(long_questions(packages, skill), files[1])
    return files


def distill(skill: str, base: Path, data: Path, out: Path, *flags: str) -> int:
    """Make the adapter with `droidspeak distill`, on one thread. `flags` are passed to the
    command."""
    learned, _ = write_lessons(PACKAGES, data, skill)
    command = [
        *("droidspeak", "distill", "--base", str(base), "--adapter", str(SHIPPED / skill)),
        *("--data", str(learned), "--held-out", str(data / skill / "held_out.jsonl")),
        *("--chat", "--template", TEMPLATE, "--metric", METRICS[skill].value),
        *("--max-new", str(MAX_NEW[skill]), "--labels", "--max-disk-gb", "14"),
        *("--out", str(out), *FLAGS[skill], *flags),
    ]
    tqdm.write(shlex.join(command))
    launched = [sys.executable, "-m", "sglang_droidspeak.cli", *command[1:]]
    return subprocess.run(launched, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def judge(skill: str, base: Path, adapter: Path, data: Path) -> None:
    """Show the adapter's quality on `held_out` and on long documents, with 95 % intervals by
    context. For `questions`, also show the quality by kind.

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
    _, long = write_lessons(PACKAGES, data, skill)
    stated = ",".join(map(str, config["alora_invocation_tokens"]))
    for file in (long, data / skill / "held_out.jsonl"):
        sources = load_prompts([str(file)], options(skill))
        asked = {it.name: it.record.input for source in sources for it in source.records}
        invocation = find_invocation(stated, sources[0].records[0], tokenizer)
        scored: dict[str, list[list[float]]] = defaultdict(list)
        for lesson in tqdm(
            lessons_of(sources, tokenizer, invocation, 8000), file.stem, leave=False
        ):
            questions = lesson.document.questions
            answers = reader.answer(lesson, range(len(questions)))
            by_kind = defaultdict(list)
            for question, said in zip(questions, answers, strict=True):
                text = tokenizer.decode(said.tokens, skip_special_tokens=True)
                quality = score(lesson.document.task, text, question.answers)
                for kind in kinds_of(skill, asked[question.name]):
                    by_kind[kind].append(quality)
            for kind, qualities in by_kind.items():
                scored[kind].append(qualities)
        for kind, contexts in sorted(scored.items()):
            shown, number = interval(contexts), sum(map(len, contexts))
            tqdm.write(
                f"{file.stem} {kind}: {shown.mean:.3f} "
                f"[{shown.low:.3f}, {shown.high:.3f}] of {number}"
            )


def _as_ordinary(adapter: Path, config: dict[str, Any], folder: Path) -> Path:
    """Copy an aLoRA without its invocation: the judge's own code decides when it acts."""
    (folder / WEIGHTS).symlink_to((adapter / WEIGHTS).resolve())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"alora_invocation_tokens": None}))
    return folder


def kinds_of(skill: str, question: str) -> tuple[str, ...]:
    if skill != "questions":
        return ("all",)
    return "all", "which package" if question.startswith("Which package") else "field"
