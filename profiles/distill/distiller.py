"""Run `droidspeak distill`: train an adapter that reads its base's KV without loss, and judge it.

prompts ─► train ─► the teacher's answers ─► training steps ─► adapter
           held out ─► the adapter beside its teacher ─► gate ─► verdict and report
"""

from __future__ import annotations

import datetime
import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from cachetree import ConfigError, ModelIdentity, claim
from cachetree.checkpoint import read_model_identity, read_shape, user_cache
from profiles.adapters import with_adapter
from profiles.answerers import SAMPLE_TOKENS, ends_of
from profiles.compute.models import (
    ARCHITECTURES,
    ModelSource,
    load_model,
    load_tokenizer,
    require_plain_layers,
)
from profiles.compute.room import GIB
from profiles.data.documents import split_documents
from profiles.distill.evidence import Distilled
from profiles.distill.forward import ATTENTION, KeptKV, Reader, Said, check_forward
from profiles.distill.judge import NUM_SHOWN, Judge, verdict
from profiles.distill.prompts import (
    Invocation,
    Lesson,
    ending_in_space,
    find_invocation,
    lessons_of,
    load_prompts,
)
from profiles.distill.settings import DistillSettings
from profiles.distill.student import export_adapter, make_student, require_peft
from profiles.distill.training import (
    Recipe,
    Step,
    Trainer,
    draw_steps,
    labels_of,
    read_answers,
    write_answers,
)
from profiles.environment import read_environment, slow_dtype
from profiles.progress import shown
from profiles.report.distilled import write_page
from profiles.report.words import counted, duration
from profiles.settings import choose_device
from profiles.splits import hardly_enough
from profiles.stats.artifact import Data

PACKAGES: Final = ("sglang-droidspeak", "torch", "transformers", "peft")
_DECISIVE: Final = ("dtype", "labels", "steps", "questions", "rank", "peak_rate", "seed")
"""Settings that change the trained adapter, in addition to models and prompts."""
_CURVE: Final = (1, 2, 4, 8)
"""Points of the learning curve: training step 0, and the number of steps divided by each of
these."""
_LEARNED: Final[Mapping[str | None, str]] = {
    None: "the teacher's answers",
    "only": "the data's answers",
    "both": "the data's answers and the teacher's distributions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Lessons to learn from and lessons to judge on. They share no context."""

    train: list[Lesson]
    held_out: list[Lesson]
    invocation: Invocation


class Distiller:
    """One run of `droidspeak distill`: its prompts, its models, and its state on disk."""

    def __init__(self, settings: DistillSettings, console: Console) -> None:
        require_peft()
        transformers.utils.logging.disable_progress_bar()
        self._settings, self._console = settings, console
        self._device = choose_device(settings.device)
        self._dtype = getattr(torch, settings.dtype)
        self._source, self._teacher = ModelSource(path=settings.base), settings.source_of_teacher
        self._models = [
            read_model_identity(it.path, user_cache(), it.adapter)
            for it in (self._source, self._teacher)
            if it is not None
        ]
        _require_one_tokenizer(self._models)
        self._tokenizer = load_tokenizer(self._source)
        self.prompts = load_lessons(settings, self._tokenizer, console)
        self.state = self._place_of_state()
        held_out = Data(files=(), documents=[it.document for it in self.prompts.held_out])
        slow = slow_dtype(self._dtype, self._device)
        for line in (*slow, *hardly_enough(held_out, settings.tolerance)):
            console.print(line, highlight=False, soft_wrap=True)

    def _place_of_state(self) -> Path:
        """Make the folder of the run's state beside `--out`. Its name has a digest of everything
        that changes the trained adapter."""
        out, prompts = self._settings.out, self.prompts
        chosen = [getattr(self._settings, it) for it in _DECISIVE]
        asked = [_asked(it) for it in (*prompts.train, *prompts.held_out)]
        decisive = self._models, chosen, asked, len(prompts.held_out), prompts.invocation
        digest = hashlib.sha256(msgspec.json.encode(decisive)).hexdigest()[:12]
        folder = out.with_name(f".{out.name}.{digest}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def run(self) -> Distilled:
        """Train and judge the adapter, and write its folder with its evidence.

        Raises ConfigError if another process makes the same adapter.
        """
        with (self.state / "lock").open("wb") as lock:
            claim(lock, "this training")
            return self._run()

    def _run(self) -> Distilled:
        settings, prompts, num_steps = self._settings, self.prompts, self._settings.steps
        steps = draw_steps(prompts.train, num_steps, settings.questions, settings.seed)
        answered = self._ask_teacher(sorted({it.place for it in steps}))
        file = self.state / "judged.jsonl"
        judge = Judge(prompts.held_out, answered, self._tokenizer, file)
        base = self._load(self._source)
        student = make_student(base, settings.rank, settings.seed, settings.adapter)
        kept_kv = KeptKV(self.state / "kv", settings.max_disk_gb * GIB)
        ends = ends_of(base, self._tokenizer)
        reader = Reader(student.get_base_model(), ends, kept_kv, student.disable_adapter)
        recipe = Recipe(
            num_steps=num_steps,
            rate=settings.peak_rate,
            from_labels=settings.labels is not None,
        )
        trainer = Trainer(reader, student, self.state / "state.safetensors", recipe)
        self._train(trainer, steps, partial(self._show, judge, reader))
        places = range(len(prompts.held_out))
        with shown(self._console, "judging", len(places)) as done:
            scored = judge.scores(reader, num_steps, places, done)
        tasks = judge.tasks(scored, settings.tolerance)
        passed, reason = verdict(tasks, settings.tolerance)
        distilled = Distilled(
            base=self._models[0].model_id,
            teacher=self._models[-1].model_id if self._teacher else None,
            learned_from=_LEARNED[settings.labels],
            invocation=prompts.invocation.text,
            invocation_tokens=prompts.invocation.ids,
            num_contexts=len({it.place for it in steps}),
            num_questions=len({(it.place, asked) for it in steps for asked in it.questions}),
            steps=num_steps,
            rank=settings.rank,
            tasks=tasks,
            num_shown=min(NUM_SHOWN, len(places)),
            curve=tuple(judge.curve()),
            tolerance=settings.tolerance,
            passed=passed,
            reason=reason,
            command=settings.command,
            versions=dict(read_environment(PACKAGES).versions),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        export_adapter(student, settings.out, prompts.invocation.ids)
        write_page(distilled, settings.out)
        shutil.rmtree(self.state)
        return distilled

    def _show(self, judge: Judge, reader: Reader, step: int) -> None:
        """Score the first held-out contexts, if the curve has a point at this training step."""
        num_steps = self._settings.steps
        if step in {0, *(num_steps // it for it in _CURVE)}:
            shown_of = range(min(NUM_SHOWN, len(self.prompts.held_out)))
            judge.scores(reader, step, shown_of, lambda _: None)

    def _ask_teacher(self, places: Sequence[int]) -> list[list[Said]]:
        """Ask the teacher for all answers that are not stored yet. Return its answers to the
        held-out questions.

        The teacher's model is freed before the return.
        """
        if self._teacher is None:
            return []
        labels, prompts = self._settings.labels, self.prompts
        learned = [] if labels == "only" else [self._asked(it) for it in places]
        judging = [
            (it, self.state / f"held_out/{place}.safetensors", False)
            for place, it in enumerate(prompts.held_out)
        ]
        missing = [it for it in (*learned, *judging) if not it[1].exists()]
        if missing:
            model = self._load(self._teacher)
            teacher = Reader(model, ends_of(model, self._tokenizer))
            sizes = [len(it.document.prefix) for it, *_ in missing]
            began = time.monotonic()
            write_answers(teacher, *missing[0])
            total_s = (time.monotonic() - began) * sum(sizes) / sizes[0]
            with shown(self._console, "teacher", total_s) as done:
                done(total_s * sizes[0] / sum(sizes))
                for asked, size in zip(missing[1:], sizes[1:], strict=True):
                    write_answers(teacher, *asked)
                    done(total_s * size / sum(sizes))
        return [read_answers(file) for _, file, _ in judging]

    def _asked(self, place: int) -> tuple[Lesson, Path, bool]:
        """Return a training lesson, the file of its answers, and whether these are the data's
        answers."""
        file = self.state / f"train/{place}.safetensors"
        return self.prompts.train[place], file, self._settings.labels is not None

    def _targets(self, place: int) -> list[Said]:
        """Return the answers that a training lesson teaches: the data's or the teacher's."""
        if self._settings.labels == "only":
            return labels_of(self.prompts.train[place])
        return read_answers(self._asked(place)[1])

    def _train(self, trainer: Trainer, steps: Sequence[Step], show: Callable[[int], None]) -> None:
        """Take the remaining training steps. The first step's time predicts that of the others."""
        sizes = [_size_of(self.prompts.train[it.place], it) for it in steps]
        first = trainer.num_done
        show(first)
        if first == len(steps):
            return
        began = time.monotonic()
        self._step(trainer, steps[first])
        per_size_s = (time.monotonic() - began) / sizes[first]
        total_s, done_s = (per_size_s * sum(it) for it in (sizes, sizes[: first + 1]))
        self._console.print(
            f"{counted(len(steps), 'step')}, about {duration(total_s - done_s)} left",
            highlight=False,
        )
        with shown(self._console, "training", total_s, done_s) as done:
            for number in range(first + 1, len(steps)):
                show(number)
                self._step(trainer, steps[number])
                done(per_size_s * sizes[number])
        trainer.save()
        show(len(steps))

    def _step(self, trainer: Trainer, step: Step) -> None:
        lesson = self.prompts.train[step.place]
        loss = trainer.step(lesson, step.questions, self._targets(step.place))
        tokens = len(lesson.document.prefix)
        said = {"step": trainer.num_done, "tokens": tokens, "loss": round(loss, 4)}
        with (self.state / "losses.jsonl").open("ab") as log:
            log.write(msgspec.json.encode(said) + b"\n")

    def _load(self, source: ModelSource) -> PreTrainedModel:
        """Load a model as the profiler does, or as transformers does if the profiler does not know
        its class."""
        if read_shape(source.path)["architecture"] in ARCHITECTURES:
            model = load_model(source, dtype=self._dtype, device=self._device)
        else:
            model = _load_other(source, self._dtype).to(self._device)
        model.set_attn_implementation(ATTENTION if self._device.type == "cpu" else "sdpa")
        first = self.prompts.train[0]
        sample = *first.document.prefix[:SAMPLE_TOKENS], *first.before(0), *first.after(0)
        check_forward(model, sample)
        return model.requires_grad_(False)


def load_lessons(
    settings: DistillSettings, tokenizer: PreTrainedTokenizerBase, console: Console
) -> Prompts:
    """Load prompts, cut them at the invocation and split them by context. Raises ConfigError and
    RecordError."""
    config = transformers.AutoConfig.from_pretrained(settings.base)
    sources = load_prompts(settings.data, settings.options)
    judging = load_prompts(settings.held_out, settings.options)
    invocation = find_invocation(settings.invocation, sources[0].records[0], tokenizer)
    if spaced := ending_in_space([*sources, *judging]):
        console.print(
            f"white space ends the context of {counted(len(spaced), 'prompt')}, {spaced[0]} first; "
            "prompts that are sent to a server have to end it alike",
            highlight=False,
            soft_wrap=True,
        )
    learned = [it for source in sources for it in source.records]
    if unanswered := [it.place for it in learned if not it.record.answers and settings.labels]:
        raise ConfigError(f"{unanswered[0]} has no answers, from which --labels learns")
    records = [*learned, *(it for source in judging for it in source.records)]
    most = config.max_position_embeddings - max(it.task.max_new for it in records)
    most = min(settings.max_prompt_tokens or most, most)
    train = lessons_of(sources, tokenizer, invocation, most)
    if judging:
        held_out = lessons_of(judging, tokenizer, invocation, most)
        if shared := {it.document.context for it in train} & {
            it.document.context for it in held_out
        }:
            raise ConfigError(
                f"{len(shared)} contexts are both in --data and in --held-out; the adapter has to "
                "be judged on others than it learned from"
            )
        return Prompts(train=train, held_out=held_out, invocation=invocation)
    split = split_documents(
        [it.document for it in train],
        held_out_share=settings.held_out_share,
        seed=settings.seed,
    )
    contexts = {it.context for it in split[0]}
    return Prompts(
        train=[it for it in train if it.document.context in contexts],
        held_out=[it for it in train if it.document.context not in contexts],
        invocation=invocation,
    )


def _size_of(lesson: Lesson, step: Step) -> int:
    """Cost of a training step in tokens. Tokens of the document have no gradient: each counts an
    eighth."""
    questions = lesson.document.questions
    asked = sum(len(questions[it].suffix) + len(questions[it].draft) for it in step.questions)
    return asked + len(lesson.document.prefix) // 8


def _asked(lesson: Lesson) -> object:
    """Return the tokens of a lesson, for the digest of everything that changes the adapter."""
    questions = [(it.suffix, it.draft) for it in lesson.document.questions]
    return lesson.document.prefix, questions, lesson.num_invoked


def _require_one_tokenizer(models: Sequence[ModelIdentity]) -> None:
    if len({it.tokenizer for it in models}) > 1:
        raise ConfigError(
            "base and teacher have different tokenizers, so that their tokens cannot be compared; "
            "give a teacher that was made from this base"
        )


def _load_other(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model of a class that the profiler does not run."""
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype)
    require_plain_layers(source.path / "config.json", model.config)
    if source.adapter is not None:
        model.load_state_dict(with_adapter(model.state_dict(), source.adapter, dtype))
    return model.eval()
