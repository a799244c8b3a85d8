"""Turn lessons into an adapter: ask the teacher, then take the training steps.

    teacher   reads every training document itself ─► its answers, or the data's,
              with its likeliest next tokens at each of their tokens
    step      one document, some of its questions ─► loss at the answers' tokens ─► the adapter

The same command continues after a stop, from the teacher's stored answers and the last saved step.
Only the seed and a step's number decide its document and questions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from profiles.distill.forward import Reader, Said, said_of, write_tensors
from profiles.distill.prompts import Lesson
from profiles.distill.student import adapter_parameters, load_state, save_state

if TYPE_CHECKING:
    from peft import PeftModel

SAVE_EVERY_S: Final = 60.0
WARM_UP: Final = 15
"""Training steps until the learning rate reaches its peak; at most a quarter of all steps."""
AT_ONCE: Final = 32
"""Number of questions that are answered together."""
_SMALL: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    num_steps: int
    rate: float
    """Learning rate at its peak; it falls to 0 along a cosine."""
    from_labels: bool

    def rate_at(self, step: int) -> float:
        warm = min(1.0, (step + 1) / min(WARM_UP, max(1, self.num_steps // 4)))
        return self.rate * warm * 0.5 * (1 + math.cos(math.pi * step / self.num_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    place: int
    """Index of the lesson among the training lessons."""
    questions: tuple[int, ...]


def draw_steps(lessons: Sequence[Lesson], num_steps: int, most: int, seed: int) -> list[Step]:
    """Draw the training steps. Every lesson comes once, in a random order, then once more in
    another order, and so on."""
    steps, rng = list[Step](), Random(f"{seed} order")
    while len(steps) < num_steps:
        for place in rng.sample(range(len(lessons)), len(lessons)):
            count = len(lessons[place].num_invoked)
            questions = rng.sample(range(count), min(count, most))
            steps.append(Step(place=place, questions=tuple(questions)))
    return steps[:num_steps]


def labels_of(lesson: Lesson) -> list[Said]:
    """Return the lesson's answers from the data (`Question.draft`). No model is asked."""
    nothing = torch.empty(0)
    return [
        Said(tokens=it.draft, likeliest=nothing, logprobs=nothing)
        for it in lesson.document.questions
    ]


def write_answers(teacher: Reader, lesson: Lesson, file: Path, is_labelled: bool) -> None:
    """Write answers to all questions, with the teacher's distributions at their tokens. The answers
    are the teacher's own, or the data's if `is_labelled`."""
    answers = list(_ask(teacher, lesson, is_labelled))
    tensors = {
        "lengths": torch.tensor([len(it.tokens) for it in answers]),
        "tokens": torch.tensor([token for it in answers for token in it.tokens]),
        "likeliest": torch.cat([it.likeliest for it in answers]),
        "logprobs": torch.cat([it.logprobs for it in answers]),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, file)


def read_answers(file: Path) -> list[Said]:
    tensors = load_file(file)
    lengths = tensors["lengths"].tolist()
    parts = (tensors[it].split(lengths) for it in ("tokens", "likeliest", "logprobs"))
    return [
        Said(tokens=tuple(tokens.tolist()), likeliest=likeliest, logprobs=logprobs)
        for tokens, likeliest, logprobs in zip(*parts, strict=True)
    ]


@torch.no_grad()
def _ask(teacher: Reader, lesson: Lesson, is_labelled: bool) -> Iterator[Said]:
    for questions in torch.arange(len(lesson.num_invoked)).split(AT_ONCE):
        asked = questions.tolist()
        if is_labelled:
            answers = [lesson.document.questions[it].draft for it in asked]
            yield from said_of(teacher.along(lesson, asked, answers), answers)
        else:
            yield from teacher.answer(lesson, asked)


def kl_of(logits: Tensor, targets: Sequence[Said]) -> Tensor:
    """KL divergence of the teacher's distribution from the student's, at each token of the answers.

    The teacher's likeliest tokens count one by one. All other tokens together count as one.
    """
    device = logits.device
    likeliest = torch.cat([it.likeliest for it in targets]).long().to(device)
    logprobs = torch.cat([it.logprobs for it in targets]).to(device)
    ours = logits.log_softmax(-1).gather(1, likeliest)
    rest, our_rest = ((1 - it.exp().sum(-1)).clamp(min=_SMALL) for it in (logprobs, ours))
    of_rest = rest * (rest.log() - our_rest.log())
    return ((logprobs.exp() * (logprobs - ours)).sum(-1) + of_rest).clamp(min=0)


def loss_of(logits: Tensor, targets: Sequence[Said], *, from_labels: bool) -> Tensor:
    """Mean over the answers' tokens: cross entropy of labels, KL to the teacher, or their sum."""
    loss = logits.new_zeros(())
    if from_labels:
        tokens = torch.tensor([token for it in targets for token in it.tokens])
        loss = loss + torch.nn.functional.cross_entropy(logits, tokens.to(logits.device))
    if targets[0].likeliest.numel():
        loss = loss + kl_of(logits, targets).mean()
    return loss


class Trainer:
    """Trains the student. The optimizer's state is saved in a file."""

    def __init__(self, reader: Reader, student: PeftModel, file: Path, recipe: Recipe) -> None:
        self._reader, self._student, self._file, self._recipe = reader, student, file, recipe
        self._parameters = [*adapter_parameters(student).values()]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.num_done = load_state(file, student, self._optimizer)
        """Number of training steps done."""
        self._saved_s = time.monotonic()

    def step(self, lesson: Lesson, questions: Sequence[int], targets: Sequence[Said]) -> float:
        """Learn some questions of a lesson, and return the loss. `targets` has the answers to all
        questions of the lesson."""
        chosen = [targets[it] for it in questions]
        logits = self._reader.along(lesson, questions, [it.tokens for it in chosen])
        loss = loss_of(logits, chosen, from_labels=self._recipe.from_labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate_at(self.num_done)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_done += 1
        if time.monotonic() - self._saved_s >= SAVE_EVERY_S:
            self.save()
        return loss.item()

    def save(self) -> None:
        save_state(self._file, self.num_done, self._student, self._optimizer)
        self._saved_s = time.monotonic()
