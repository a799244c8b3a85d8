"""Every question under every condition: how good the answers are, and how soon they begin.

What is asked is as the profiler makes it of questions about documents, or random tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from profiles.data.documents import Document, Question
from profiles.data.metrics import Metric
from profiles.data.tasks import Task
from profiles.random_models import random_prompt
from sglang_droidspeak.demo.progress import Advance
from sglang_droidspeak.demo.results import Condition, Sample, Samples, rotated
from sglang_droidspeak.demo.rig import Rig

_RANDOM: Final = Task(name="random", template="{context}{input}", metric=Metric.F1, max_new=4)
"""Enough to compare answers; the time to the first token does not depend on the others."""
_NUM_DOCUMENTS: Final = 3
_NUM_TOKENS: Final = 2000
"""Of each such document, in whole pages;"""
_NUM_NEW_TOKENS: Final = 24
"""and of the question about it."""
WARM_TOKENS: Final = 256
"""Of the last document, which is read and asked about first, so that nothing is new to the servers
when times begin to count."""


def ask_all(rig: Rig, documents: Sequence[Document], advance: Advance) -> Samples:
    """Blocks until all is answered; `advance` is called after each counted answer."""
    last = documents[-1]
    short = replace(last, prefix=last.prefix[:WARM_TOKENS], questions=last.questions[:1])
    _ask(rig, 0, short, {condition: [] for condition in Condition}, lambda: None)
    samples: dict[Condition, list[Sample]] = {condition: [] for condition in Condition}
    for index, document in enumerate(documents):
        _ask(rig, index, document, samples, advance)
    return samples


def _ask(
    rig: Rig,
    index: int,
    document: Document,
    samples: dict[Condition, list[Sample]],
    advance: Advance,
) -> None:
    rig.send(document)
    for condition in rotated(index):
        for question in document.questions:
            samples[condition].append(rig.ask(condition, document, question))
            advance()


def random_documents() -> list[Document]:
    """Of the randomly initialised models' tokens; one question each, without an answer."""
    return [
        Document(
            context="",
            prefix=tuple(random_prompt(_NUM_TOKENS, seed)),
            questions=(
                Question(
                    suffix=tuple(random_prompt(_NUM_NEW_TOKENS, _NUM_DOCUMENTS + seed)),
                    reference=(),
                    answers=(),
                    name=str(seed),
                ),
            ),
            task=_RANDOM,
        )
        for seed in range(_NUM_DOCUMENTS)
    ]
