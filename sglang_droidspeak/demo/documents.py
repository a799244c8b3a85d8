"""What the sender reads and the receiver is asked: as the profiler makes it of questions about
documents, or random tokens. The sender reads whole pages."""

from __future__ import annotations

from typing import Final

from profiles.data import Document, Metric, Question, Task
from profiles.random_models import random_prompt

_RANDOM: Final = Task(name="random", template="{context}{input}", metric=Metric.F1, max_new=4)
"""Enough to compare answers; the time to the first token does not depend on the others."""


def random_documents(num_documents: int, num_tokens: int, num_new_tokens: int) -> list[Document]:
    """Documents of the randomly initialised models' tokens; one question each, without an answer.

    `num_tokens` are whole pages.
    """
    return [
        Document(
            context="",
            prefix=tuple(random_prompt(num_tokens, seed)),
            questions=(
                Question(
                    suffix=tuple(random_prompt(num_new_tokens, num_documents + seed)),
                    reference=(),
                    answers=(),
                    name=str(seed),
                ),
            ),
            task=_RANDOM,
        )
        for seed in range(num_documents)
    ]
