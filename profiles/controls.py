"""Controls: how well full prefill answers without the document, or with another document.

Questions that need no document prove nothing about reuse: their answers are right with any KV.

    no document     the prompt without its context
    other document  the context of the task's next document in its place
    in two parts    the same prompt in two passes: rounding differs, which changes close choices.
                    Measured only if the metric compares with full prefill's answers
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from rich.console import Console

from profiles.compute.examination import Answerer
from profiles.compute.study import HELD_OUT, Bench
from profiles.data.documents import Document, by_task
from profiles.data.metrics import Metric
from profiles.data.tasks import Task
from profiles.evidence import Controls, CostModel
from profiles.progress import shown
from profiles.stats.measured import Qualities, mean_of

NUM_CONTROLLED: Final = 24
"""Largest number of held-out contexts of each task on which controls are measured."""


def measure_controls(
    bench: Bench,
    documents: Sequence[Document],
    full_prefill: Qualities,
    costs: CostModel,
    console: Console,
) -> dict[Task, Controls]:
    """Measure controls on the first documents of each task that has at least two documents. If the
    metric compares with full prefill's answers, the bench's journal must have these answers."""
    tasks = {task: places for task, places in by_task(documents).items() if len(places) > 1}
    sampled = [it for places in tasks.values() for it in places[:NUM_CONTROLLED]]
    seconds = {it: costs.full_prefill_s(len(documents[it].prefix), 0) for it in sampled}
    controls = {}
    with shown(console, "controls", sum(seconds.values())) as done:
        for task, places in tasks.items():
            sample, bare, swapped, cut = places[:NUM_CONTROLLED], [], [], []
            for place, other in zip(sample, [*places[1:], places[0]], strict=False):
                receiver = bench.at(documents[place]).receiver
                asked = bench.judged(HELD_OUT, documents[place])
                bare.append([of for it in without(asked) for of in _qualities(receiver, it)])
                swapped.append(_qualities(receiver, with_context_of(documents[other], asked)))
                if task.metric is Metric.SAME:
                    cut.append(_qualities(receiver, in_two_parts(asked)))
                done(seconds[place])
            controls[task] = Controls(
                num_contexts=len(sample),
                full_prefill=mean_of([full_prefill[it] for it in sample]),
                no_document=mean_of(bare),
                other_document=mean_of(swapped),
                in_two_parts=mean_of(cut) if cut else None,
            )
    return controls


def without(document: Document) -> Iterator[Document]:
    """Yield a document for each question, with the prompt but without the context."""
    for asked in document.questions:
        ids = *document.prefix[: document.opening], *asked.suffix[document.tail :]
        begin = min(max(1, document.opening), len(ids) - 1)
        question = replace(asked, suffix=ids[begin:])
        yield replace(document, prefix=ids[:begin], questions=(question,))


def with_context_of(other: Document, document: Document) -> Document:
    """Return the document with the context of `other` in place of its own."""
    end = other.questions[0].suffix[: other.tail]
    questions = (replace(it, suffix=end + it.suffix[document.tail :]) for it in document.questions)
    return replace(document, prefix=other.prefix, questions=tuple(questions))


def in_two_parts(document: Document) -> Document:
    """Return the document with its first question, and with the second half of the prefix moved
    into the suffix."""
    half, first = len(document.prefix) // 2, document.questions[0]
    question = replace(first, suffix=document.prefix[half:] + first.suffix)
    return replace(document, prefix=document.prefix[:half], questions=(question,))


def _qualities(receiver: Answerer, document: Document) -> list[float]:
    answers = receiver.answer(document, receiver.model.prefix(document.prefix, ()).kv)
    return [receiver.quality(document, i, it) for i, it in enumerate(answers)]
