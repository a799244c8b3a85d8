"""Training rows: a document and as many questions as fit, or an exercise in copying.

The exercises come first in the recipe, because a model that cannot copy learns no look-up:

    copy      random words in segments that repeat
    recall    key-value pairs, then the same keys again
    gaps      the same with words between key and value, differently many on both sides
    restate   the sentences of a document, then the same sentences in another order
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Final

from tools.pairs.documents import WRITERS, write_document
from tools.pairs.words import BOS_ID, EOS_ID, NUM_SPECIAL
from tools.pairs.words import VOCABULARY as V

_TEXT_WEIGHT = 0.1
_COPY_WEIGHT = 0.5
_ANSWER_WEIGHT = 1.0
_LONGEST_DOCUMENT = 0.8  # share of a row; the rest is for questions


@dataclass(slots=True)
class Row:
    """Tokens, the weight of each in the loss, and whether it counts for the task's accuracy."""

    ids: list[int] = field(default_factory=lambda: [BOS_ID])
    weights: list[float] = field(default_factory=lambda: [0.0])
    scored: list[bool] = field(default_factory=lambda: [False])

    def add(self, ids: list[int], weight: float, *, scored: bool = False) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.scored += [scored] * len(ids)

    def cut(self, length: int) -> Row:
        return Row(self.ids[:length], self.weights[:length], self.scored[:length])

    def __len__(self) -> int:
        return len(self.ids)


@lru_cache(maxsize=200_000)
def _encoded(sentence: str) -> tuple[int, ...]:
    return tuple(V.encode(sentence))


def _questions_row(rng: Random, task: str, length: int) -> Row:
    document = write_document(rng, task, int(length * rng.uniform(0.35, 0.65)))
    row = Row()
    for sentence in document.sentences:
        row.add(list(_encoded(sentence)), _TEXT_WEIGHT)
    row = row.cut(int(length * _LONGEST_DOCUMENT))
    questions = list(document.questions)
    while True:
        for question in questions:
            row.add([*_encoded("question :"), *_encoded(question.text)], _TEXT_WEIGHT)
            row.add(list(_encoded(question.answer)), _ANSWER_WEIGHT, scored=True)
            row.add([EOS_ID], _ANSWER_WEIGHT)
            if len(row) >= length:
                return row
        rng.shuffle(questions)


def _copy_row(rng: Random, length: int) -> Row:
    num_words = rng.randint(6, max(8, length // 2 - 1))
    alphabet = rng.sample(range(NUM_SPECIAL, len(V.words)), min(400, 2 * num_words))
    segment = [rng.choice(alphabet) for _ in range(num_words)]
    row = Row()
    row.add(segment, 0.0)
    while len(row) < length:
        # The first words of a repeat cannot be known from what precedes them.
        row.add(segment[:3], _COPY_WEIGHT)
        row.add(segment[3:], _COPY_WEIGHT, scored=True)
    return row


def _keys(rng: Random, count: int) -> list[str]:
    return rng.sample([*V.names, *V.variables, *V.things], min(count, 150))


def _value(rng: Random) -> int:
    return V.ids[rng.choice([*V.cities, *V.numbers, *V.jobs, *V.firms])]


def _recall_row(rng: Random, length: int) -> Row:
    values = {V.ids[key]: _value(rng) for key in _keys(rng, rng.randint(3, max(4, length // 5)))}
    row = Row()
    for key, value in values.items():
        row.add([key, value], 0.0)
    return _ask_again(rng, row, length, values, [], [])


def _gaps_row(rng: Random, length: int) -> Row:
    keys = _keys(rng, rng.randint(3, max(4, length // 8)))
    words = [V.ids[word] for word in rng.sample(V.function_words, 6)]
    gap_of_text = [rng.choice(words) for _ in range(rng.randint(0, 3))]
    gap_of_question = [rng.choice(words) for _ in range(rng.randint(0, 2))]
    opening = [rng.choice(words)]
    values = {V.ids[key]: _value(rng) for key in keys}
    row = Row()
    for key, value in values.items():
        row.add([*opening, key, *gap_of_text, value], 0.0)
    return _ask_again(rng, row, length, values, opening, gap_of_question)


def _ask_again(
    rng: Random, row: Row, length: int, values: dict[int, int], opening: list[int], gap: list[int]
) -> Row:
    keys = list(values)
    while len(row) < length:
        rng.shuffle(keys)
        for key in keys:
            row.add([*opening, key, *gap], 0.0)
            row.add([values[key]], _ANSWER_WEIGHT, scored=True)
    return row


def _restate_row(rng: Random, length: int) -> Row:
    task = rng.choice(["plain", "chain", "code", "moves"])
    document = write_document(rng, task, int(length * rng.uniform(0.3, 0.5)))
    sentences = list(dict.fromkeys(document.sentences))
    row = Row()
    for sentence in sentences:
        row.add(list(_encoded(sentence)), _TEXT_WEIGHT)
    row = row.cut(int(length * 0.6))
    while len(row) < length:
        rng.shuffle(sentences)
        for sentence in sentences:
            ids = list(_encoded(sentence))
            row.add(ids[:1], _TEXT_WEIGHT)
            row.add(ids[1:2], _COPY_WEIGHT)
            row.add(ids[2:], _COPY_WEIGHT, scored=True)
    return row


EXERCISES: Final[Mapping[str, Callable[[Random, int], Row]]] = {
    "copy": _copy_row,
    "recall": _recall_row,
    "gaps": _gaps_row,
    "restate": _restate_row,
}


def make_row(rng: Random, task: str, length: int) -> Row:
    """One row of exactly `length` tokens of a task or an exercise; KeyError for an unknown one."""
    if task in WRITERS:
        return _questions_row(rng, task, length).cut(length)
    return EXERCISES[task](rng, length).cut(length)
