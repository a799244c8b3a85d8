"""Measure the quality of a skill's greedy answers, by its adapter or by the base.

python -m tools.real check questions [--set verify] [--adapter DIR]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Final

from tqdm import tqdm

from profiles.answerers import answerer_of
from profiles.compute.models import ModelSource, load_model, load_tokenizer
from profiles.data.datasets import load_sources
from profiles.data.documents import make_documents
from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions

TEMPLATE: Final = "{context}\n\n{input}"
METRICS: Final[Mapping[str, Metric]] = {
    "questions": Metric.F1,
    "summaries": Metric.ROUGE_L,
    "json": Metric.JSON_VALUES,
}
MAX_NEW: Final[Mapping[str, int]] = {"questions": 16, "summaries": 24, "json": 56}
"""Longest answer of each skill, in tokens."""


def options(skill: str) -> TaskOptions:
    """Return a skill's prompt template, metric and longest answer."""
    return TaskOptions(template=TEMPLATE, metric=METRICS[skill], max_new=MAX_NEW[skill], chat=True)


def check(skill: str, base: Path, adapter: Path | None, data: Path) -> float:
    """Judge the answers to a data set of a skill. Print the answers with a quality below one half,
    and return the mean quality."""
    source = ModelSource(path=base, adapter=adapter)
    model = load_model(source)
    tokenizer, sources = load_tokenizer(source), load_sources([str(data)], options(skill))
    documents = make_documents(sources, tokenizer, page_size=16, max_prompt_tokens=None)
    answerer = answerer_of(model, tokenizer, documents)
    scores: list[float] = []
    bar = tqdm(documents, desc=f"{skill}, {data.stem}", unit="document")
    for document in bar:
        answers = answerer.answer(document, answerer.model.prefix(document.prefix, ()).kv)
        for i, (question, answer) in enumerate(zip(document.questions, answers, strict=True)):
            scores.append(answerer.quality(document, i, answer))
            if scores[-1] < 0.5:
                wrote = tokenizer.decode(answer, skip_special_tokens=True)
                bar.write(f"{question.name}: wrote {wrote!r}, right is {question.answers[0]!r}")
        bar.set_postfix(quality=f"{fmean(scores):.3f}")
    bar.write(f"{skill}: {METRICS[skill].value} {fmean(scores):.3f} on {len(scores)} questions")
    return fmean(scores)
