"""Compare the student with its teacher on held-out contexts, and give the gate's verdict.

    teacher   reads the whole prompt itself
    student   reads the base's KV up to the invocation, as a server that reuses does

Answers are compared with the data's. If a question has none, the teacher's answer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from cachetree import ConfigError
from profiles.data.documents import Tokens, by_task
from profiles.data.tasks import score
from profiles.distill.evidence import CurvePoint, JudgedTask, Scored
from profiles.distill.forward import Reader, Said
from profiles.distill.prompts import Lesson
from profiles.distill.training import AT_ONCE, kl_of
from profiles.stats.artifact import interval_of, losses_of
from profiles.stats.gate import (
    ERROR_RATE,
    MOST_CONTEXTS_NAMED,
    is_within,
    percent_at_most,
)

NUM_SHOWN: Final = 12
"""Number of held-out contexts behind each point of the curve."""


class Judge:
    """Scores the student on held-out lessons, and stores each score in a file."""

    def __init__(
        self,
        lessons: Sequence[Lesson],
        teacher: Sequence[Sequence[Said]],
        tokenizer: PreTrainedTokenizerBase,
        file: Path,
    ) -> None:
        """`teacher` has the teacher's answers to each lesson, or is empty."""
        self._lessons, self._teacher, self._tokenizer = lessons, teacher, tokenizer
        self._file = file
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        whole = [msgspec.json.decode(it, type=Scored) for it in lines if it.endswith(b"\n")]
        self._known = {(it.step, it.place): it for it in whole}
        unanswered = (it for of in lessons for it in of.document.questions if not it.answers)
        if not teacher and (first := next(unanswered, None)) is not None:
            raise ConfigError(
                f"{first.name} has no answers, and no teacher is given; without either nothing can "
                "be judged"
            )

    def scores(
        self, reader: Reader, step: int, places: Iterable[int], done: Callable[[float], None]
    ) -> list[Scored]:
        """Score the student after `step` training steps on the lessons with these indices."""
        scored_lessons = []
        for place in places:
            if (step, place) not in self._known:
                scored = self._score(reader, step, place)
                with self._file.open("ab") as file:
                    file.write(msgspec.json.encode(scored) + b"\n")
                self._known[step, place] = scored
            scored_lessons.append(self._known[step, place])
            done(1)
        return scored_lessons

    def curve(self) -> list[CurvePoint]:
        """Return the learning curve: one point for every training step at which all of the first
        `NUM_SHOWN` held-out contexts were scored."""
        shown = range(min(NUM_SHOWN, len(self._lessons)))
        steps = sorted({step for step, _ in self._known})
        return [
            CurvePoint(
                step=step,
                quality=mean_of(of.quality for of in scored),
                agreement=mean_of(of.same for of in scored) if self._teacher else None,
                kl=mean_of(of.kl for of in scored) if self._teacher else None,
            )
            for step in steps
            if all((step, it) in self._known for it in shown)
            for scored in [[self._known[step, it] for it in shown]]
        ]

    def tasks(self, scored: Sequence[Scored], tolerance: float) -> tuple[JudgedTask, ...]:
        """Return the scores of all lessons, grouped by data set, and how far the student's quality
        is below the teacher's."""
        documents = [it.document for it in self._lessons]
        students = [it.quality for it in scored]
        teachers = [self._teacher_quality(it) for it in range(len(self._teacher))]
        by = by_task(documents)
        losses = losses_of(by.values(), teachers, students, tolerance) if teachers else ()
        judged = []
        for number, (task, places) in enumerate(by.items()):
            these = [documents[it] for it in places]
            of = [scored[it] for it in places]
            ours = interval_of(these, [it.quality for it in of])
            theirs = interval_of(these, [teachers[it] for it in places]) if teachers else None
            judged.append(
                JudgedTask(
                    name=task.name,
                    metric=task.metric.value,
                    num_contexts=len(places),
                    num_questions=sum(len(it.quality) for it in of),
                    student=ours,
                    teacher=theirs,
                    loss=losses[number] if losses else None,
                    agreement=mean_of(it.same for it in of) if teachers else None,
                    kl=mean_of(it.kl for it in of) if teachers else None,
                )
            )
        return tuple(judged)

    def _score(self, reader: Reader, step: int, place: int) -> Scored:
        lesson = self._lessons[place]
        answers, same, kl = list[str](), list[float](), list[float]()
        for questions in torch.arange(len(lesson.num_invoked)).split(AT_ONCE):
            asked = questions.tolist()
            texts = [self._text(it.tokens) for it in reader.answer(lesson, asked)]
            answers += texts
            if self._teacher:
                targets = [self._teacher[place][it] for it in asked]
                same += [
                    float(text == self._text(it.tokens))
                    for text, it in zip(texts, targets, strict=True)
                ]
                kl += _distances(reader, lesson, asked, targets)
        return Scored(
            step=step,
            place=place,
            quality=tuple(self._quality(place, i, it) for i, it in enumerate(answers)),
            same=tuple(same),
            kl=tuple(round(it, 6) for it in kl),
        )

    def _teacher_quality(self, place: int) -> list[float]:
        targets = enumerate(self._teacher[place])
        return [self._quality(place, i, self._text(it.tokens)) for i, it in targets]

    def _quality(self, place: int, question: int, text: str) -> float:
        document = self._lessons[place].document
        asked, task = document.questions[question], document.task
        answers = asked.answers or (self._text(self._teacher[place][question].tokens),)
        if answers == ("",):
            return float(not text.strip())
        return score(task, text, answers, asked.classes)

    def _text(self, answer: Tokens) -> str:
        return self._tokenizer.decode(answer, skip_special_tokens=True)


@torch.no_grad()
def _distances(
    reader: Reader, lesson: Lesson, questions: Sequence[int], targets: Sequence[Said]
) -> Iterator[float]:
    """Mean KL along each of the teacher's answers."""
    kl = kl_of(reader.along(lesson, questions, [it.tokens for it in targets]), targets)
    return (it.mean().item() for it in kl.split([len(it.tokens) for it in targets]))


def mean_of(contexts: Iterable[Sequence[float]]) -> float:
    """Mean over contexts of each context's mean over its questions."""
    return round(fmean(fmean(it) for it in contexts), 6)


def verdict(tasks: Sequence[JudgedTask], tolerance: float) -> tuple[bool | None, str]:
    """Decide whether the adapter may replace its teacher. Say why, in a sentence."""
    judged = [(it, it.loss, it.teacher) for it in tasks if it.loss and it.teacher]
    if not judged:
        return None, "no teacher is given, so that there is nothing to compare the adapter with"
    if nothing := next((it for it, _, teacher in judged if teacher.mean <= 0), None):
        return False, (
            f"the teacher answers nothing right on held-out questions of {nothing.name}, so no "
            "loss can be judged; check data, template and metric"
        )
    worst, loss, teacher = max(judged, key=lambda it: it[1].bound)
    of = f" of {worst.name}" if len(judged) > 1 else ""
    reason = (
        f"the adapter has {loss.quality:.3f} where its teacher has {teacher.mean:.3f} on held-out "
        f"questions{of}, so that with {1 - ERROR_RATE:.0%} confidence it loses "
        f"{percent_at_most(loss.bound):.1f}% of that at most; {100 * tolerance:.3g}% is accepted"
    )
    if is_within([it for _, it, _ in judged], tolerance):
        return True, reason
    if loss.needed is not None and loss.needed <= MOST_CONTEXTS_NAMED:
        reason += f"; about {loss.needed} such contexts could show it, not {worst.num_contexts}"
    return False, reason
