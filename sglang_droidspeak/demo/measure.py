"""Every question under every condition: how good the answers are, and how soon they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from profiles.data import Document
from sglang_droidspeak.demo.conditions import Condition, rotated
from sglang_droidspeak.demo.progress import Advance
from sglang_droidspeak.demo.results import Sample, Samples
from sglang_droidspeak.demo.rig import Rig

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
