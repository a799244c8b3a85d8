"""Synthetic documents and questions about them, one writer per task.

A document is a list of short sentences. A question names its subject as the last word before `?`,
and a small model learns to look up that word.

    plain                shuffled facts about people; questions ask for the value or the person
    moves                "P went to C ." repeated; questions about a person's first and last place
    code                 constants "let v3 = 7 12 ;" and aliases "let v9 = v3 ;"
    mixed_biographies    the name once, then "she ..."; people have different relations
    biographies          as above, but all people of a document have the same relations, so that
                         the relation alone never identifies the answer
    tables               a header with shuffled columns, then rows
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from tools.pairs.words import VOCABULARY as V

Draw = Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    sentences: tuple[str, ...]
    questions: tuple[Question, ...]


Writer = Callable[[Random, int], Document]
"""Function that takes `(rng, num_tokens)` and writes a document of roughly that length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A property of a person, such as a city. In texts, `{p}` stands for the person and `{v}` for
    the value."""

    draw: Draw
    statements: tuple[str, ...]
    pronoun: str
    question: str
    reverse: tuple[str, ...] = ()


RELATIONS: Final[Mapping[str, Relation]] = {
    "city": Relation(
        draw=lambda rng: rng.choice(V.cities),
        statements=("{p} lives in {v} .", "the home of {p} is in {v} ."),
        pronoun="she lives in {v} .",
        question="where lives {p} ?",
        reverse=("who lives in {v} ?",),
    ),
    "job": Relation(
        draw=lambda rng: rng.choice(V.jobs),
        statements=("{p} works as a {v} .", "the job of {p} is {v} ."),
        pronoun="she works as a {v} .",
        question="what job has {p} ?",
    ),
    "thing": Relation(
        draw=lambda rng: f"{rng.choice(V.colours)} {rng.choice(V.things)}",
        statements=("{p} owns a {v} .",),
        pronoun="she owns a {v} .",
        question="what owns {p} ?",
        reverse=("who owns a {v} ?",),
    ),
    "food": Relation(
        draw=lambda rng: rng.choice(V.foods),
        statements=("{p} likes {v} .", "the food of {p} is {v} ."),
        pronoun="she likes {v} .",
        question="what likes {p} ?",
    ),
    "firm": Relation(
        draw=lambda rng: rng.choice(V.firms),
        statements=("{p} works for {v} .", "the firm of {p} is {v} ."),
        pronoun="she works for {v} .",
        question="what firm has {p} ?",
        reverse=("who works for {v} ?",),
    ),
    "pet": Relation(
        draw=lambda rng: f"{rng.choice(V.colours)} {rng.choice(V.pets)}",
        statements=("{p} has a {v} .",),
        pronoun="she has a {v} .",
        question="what pet has {p} ?",
    ),
}
_RELATION_NAMES = list(RELATIONS)
_TABLE_COLUMNS = ["city", "job", "food", "firm"]


def _people(rng: Random, count: int, most: int) -> list[str]:
    return rng.sample(V.names, min(count, most))


def write_plain(rng: Random, num_tokens: int) -> Document:
    per_person = rng.choice([1, 2, 3])
    num_facts = max(2, num_tokens // 7)
    facts: list[tuple[str, str, str]] = []
    used: dict[str, list[str]] = {name: [] for name in RELATIONS}
    for person in _people(rng, max(2, num_facts // per_person), 60):
        for name in rng.sample(_RELATION_NAMES, per_person):
            value = _rare_value(rng, RELATIONS[name].draw, used[name])
            used[name].append(value)
            facts.append((person, name, value))
    sentences, questions = [], []
    for person, name, value in facts:
        relation = RELATIONS[name]
        sentences.append(rng.choice(relation.statements).format(p=person, v=value))
        questions.append(Question(relation.question.format(p=person), value))
        if used[name].count(value) == 1:
            questions += [Question(text.format(v=value), person) for text in relation.reverse]
    rng.shuffle(sentences)
    return Document(tuple(sentences), tuple(questions))


def _rare_value(rng: Random, draw: Draw, used: list[str]) -> str:
    """Draw a value that is probably unused. After five draws, take the last one even if it is
    used."""
    value = draw(rng)
    for _ in range(4):
        if value not in used:
            break
        value = draw(rng)
    return value


def write_moves(rng: Random, num_tokens: int) -> Document:
    num_moves = max(3, num_tokens // 5)
    people = rng.sample(V.names, max(2, num_moves // 3))
    sentences: list[str] = []
    first: dict[str, str] = {}
    last: dict[str, str] = {}
    for _ in range(num_moves):
        person, city = rng.choice(people), rng.choice(V.cities)
        sentences.append(f"{person} went to {city} .")
        first.setdefault(person, city)
        last[person] = city
    questions = []
    for person in last:
        questions.append(Question(f"where is now {person} ?", last[person]))
        questions.append(Question(f"where was first {person} ?", first[person]))
    return Document(tuple(sentences), tuple(questions))


def write_code(rng: Random, num_tokens: int) -> Document:
    """Write constants and aliases. Questions may ask about any name. Only half of the aliases can
    be aliased again, so that most chains stay short."""
    names = rng.sample(V.variables, min(max(3, num_tokens // 6), 38))
    sentences, questions = [], []
    values: dict[str, str] = {}
    for i, name in enumerate(names):
        if i >= 2 and rng.random() < 0.3:
            source = rng.choice(list(values))
            sentences.append(f"let {name} = {source} ;")
            questions.append(Question(f"value of {name} ?", values[source]))
            if rng.random() < 0.5:
                values[name] = values[source]
        else:
            values[name] = " ".join(rng.choice(V.numbers) for _ in range(rng.choice([1, 2, 3])))
            sentences.append(f"let {name} = {values[name]} ;")
            questions.append(Question(f"value of {name} ?", values[name]))
    return Document(tuple(sentences), tuple(questions))


def write_mixed_biographies(rng: Random, num_tokens: int) -> Document:
    per_person = rng.choice([2, 3, 4])
    people = _people(rng, max(2, num_tokens // (3 + 5 * per_person)), 30)
    return _biographies(rng, {p: rng.sample(_RELATION_NAMES, per_person) for p in people})


def write_biographies(rng: Random, num_tokens: int) -> Document:
    per_person = rng.choice([2, 3, 4])
    names = rng.sample(_RELATION_NAMES, per_person)
    people = _people(rng, max(3, num_tokens // (3 + 5 * per_person)), 30)
    return _biographies(rng, dict.fromkeys(people, names))


def _biographies(rng: Random, relations: Mapping[str, list[str]]) -> Document:
    sentences, questions = [], []
    for person, names in relations.items():
        known = {name: RELATIONS[name].draw(rng) for name in names}
        paragraph = [RELATIONS[name].pronoun.format(v=value) for name, value in known.items()]
        rng.shuffle(paragraph)
        sentences.append(" ".join([f"meet {person} .", *paragraph]))
        questions += [
            Question(RELATIONS[name].question.format(p=person), value)
            for name, value in known.items()
        ]
    return Document(tuple(sentences), tuple(questions))


def write_tables(rng: Random, num_tokens: int) -> Document:
    columns = rng.sample(_TABLE_COLUMNS, rng.choice([2, 3, 4]))
    sentences, questions = [f"table name | {' | '.join(columns)} ;"], []
    for person in _people(rng, max(2, num_tokens // (2 * len(columns) + 3)), 40):
        values = [RELATIONS[name].draw(rng) for name in columns]
        sentences.append(f"row {person} | {' | '.join(values)} ;")
        for name, value in zip(columns, values, strict=True):
            questions.append(Question(RELATIONS[name].question.format(p=person), value))
    return Document(tuple(sentences), tuple(questions))


WRITERS: Final[Mapping[str, Writer]] = {
    "plain": write_plain,
    "moves": write_moves,
    "code": write_code,
    "mixed_biographies": write_mixed_biographies,
    "biographies": write_biographies,
    "tables": write_tables,
}


def _filler(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.4:
        where = rng.choice(["morning", "evening", "street", "market"])
        return f"the weather in the {where} was {rng.choice(['old', 'new', 'quiet', 'busy'])} ."
    if roll < 0.7:
        return f"rain and {rng.choice(['sun', 'wind', 'snow'])} ."
    where = rng.choice(["street", "market", "day"])
    return f"a note says that the {where} was {rng.choice(['quiet', 'busy'])} ."


def write_document(rng: random.Random, task: str, num_tokens: int) -> Document:
    """Write a document of one task, with its questions in random order.

    The document has roughly `num_tokens` tokens. Half of all documents get irrelevant sentences.
    The header of a table stays the first sentence.
    """
    document = WRITERS[task](rng, num_tokens)
    sentences = list(document.sentences)
    if rng.random() < 0.5:
        mixed = []
        for i, sentence in enumerate(sentences):
            mixed.append(sentence)
            if rng.random() < 0.15 and not (task == "tables" and i == 0):
                mixed.append(_filler(rng))
        sentences = mixed
    questions = list(document.questions)
    rng.shuffle(questions)
    return Document(tuple(sentences), tuple(questions))
