"""The two parts of the demo: how good the answers are, and how soon they begin."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_droidspeak.demo.conditions import Condition, rotated
from sglang_droidspeak.demo.documents import Document
from sglang_droidspeak.demo.progress import Advance
from sglang_droidspeak.demo.results import Sample, Samples
from sglang_droidspeak.demo.rig import Rig

TIMED_NEW_TOKENS = 4
"""Enough to compare answers; the time to the first does not depend on the others."""


def ask_all(rig: Rig, documents: Sequence[Document], max_new: int, advance: Advance) -> Samples:
    """Every question of every document under every condition."""
    samples: dict[Condition, list[Sample]] = {condition: [] for condition in Condition}
    for index, document in enumerate(documents):
        rig.send(document)
        for condition in rotated(index):
            for question in document.questions:
                sample = rig.ask(condition, document, question, max_new_tokens=max_new)
                samples[condition].append(sample)
                advance()
    return samples


def time_all(rig: Rig, documents: Sequence[Document], advance: Advance) -> Samples:
    """The first question of every document under every condition; the first document warms up."""
    samples: dict[Condition, list[Sample]] = {condition: [] for condition in Condition}
    for index, document in enumerate(documents):
        rig.send(document)
        for condition in rotated(index):
            sample = rig.ask(
                condition,
                document,
                document.questions[0],
                max_new_tokens=TIMED_NEW_TOKENS,
                sampling_params={"ignore_eos": True},
            )
            if index > 0:
                samples[condition].append(sample)
            advance()
    return samples
