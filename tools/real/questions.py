"""Questions and right answers for three skills, about documents of package records.

    questions   extractive questions about the fields of a record
    summaries   the one-line description of a record, which the document leaves out
    json        fields of a record as JSON

A document is several records, one after the other. All skills ask about the same documents.
Everything is drawn from seeds: the same packages give the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Final

from profiles.data.records import Record, write_records
from tools.real.packages import Package, read_packages, share_said

Asked = tuple[str, str]
"""A question and its answer."""

HARDER: Final = ("Which package", "What does")
"""Beginnings of questions that are asked twice as often in training."""
_FIELDS: Final = ("version", "section", "size", "needs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """A set of documents. Each document has records of its own, which no other document owns. Its
    questions are about these."""

    drawn: tuple[tuple[str, int], ...]
    """Parts (`packages.PARTS`) from which records are drawn. The number says how many records to
    skip at the part's start: another set has them."""
    lengths: tuple[int, ...]
    """Number of records in a document. The documents take these numbers in turn. Five records are
    about 400 tokens."""
    num_documents: int
    num_questions: int
    """Number of questions about each document."""
    num_own: int | None = None
    """Number of a document's own records. Its other records are drawn from all of the set's parts.
    None: all of a document's records are its own."""


_CHOSEN_ON: Final = 204
"""Number of records in the 36 documents of the set `choose`."""
SETS: Final[Mapping[str, Set]] = {
    # Some documents are long: a profile holds up to the length that 20 of them reach.
    "choose": Set(
        drawn=(("choose", 0),), lengths=(5,) * 11 + (13,), num_documents=36, num_questions=2
    ),
    # A plan without loss, at a quality of .85, passes at 5 % with 84 documents, and not with 60.
    "held_out": Set(
        drawn=(("held_out", 0), ("choose", _CHOSEN_ON)),
        lengths=(4,) * 23 + (13,),
        num_documents=120,
        num_questions=2,
    ),
    # A third of the documents is as long as served ones. No record is asked about twice.
    "choose_mixed": Set(
        drawn=(("choose", 0),), lengths=(6, 9, 25), num_documents=30, num_questions=6, num_own=6
    ),
    "held_out_mixed": Set(
        drawn=(("held_out", 0), ("verify", 120)),
        lengths=(6, 9, 25),
        num_documents=150,
        num_questions=6,
        num_own=6,
    ),
    "verify": Set(drawn=(("verify", 0),), lengths=(5,), num_documents=24, num_questions=3),
    "long": Set(drawn=(("verify", 120),), lengths=(25,), num_documents=20, num_questions=3),
}


def shown(package: Package) -> str:
    """Text of a record in a document."""
    return (
        f"Package: {package.name}\nVersion: {package.version}\nSection: {package.section}\n"
        f"Size: {package.size} kB\nNeeds: {package.needs}\nDescription: {package.text}"
    )


def document(packages: Sequence[Package]) -> str:
    return "\n\n".join(map(shown, packages))


def about_fields(package: Package, others: Sequence[Package], rng: Random) -> Asked:
    return rng.choice(askable(package, others))


def askable(package: Package, others: Sequence[Package]) -> list[Asked]:
    """Return questions about a package. They ask for its fields by its name, and for its name by a
    field that no other package has."""
    name, only = package.name, "Answer with the value only."
    asked = [
        (f"What is the version of {name}? {only}", package.version),
        (f"What section is {name} in? {only}", package.section),
        (f"What is the size of {name}? {only}", f"{package.size} kB"),
        (f"What does {name} need? {only}", package.needs),
        (f'Which package could be described as "{package.summary}"? {only}', name),
    ]
    for field, question in (
        ("section", f"Which package is in the section {package.section}? {only}"),
        ("needs", f"Which package needs {package.needs}? {only}"),
    ):
        values = Counter(getattr(it, field) for it in others)
        if values[getattr(package, field)] == 1:
            asked.append((question, name))
    return asked


def about_harder(package: Package, others: Sequence[Package], rng: Random) -> Asked:
    """Draw like `about_fields`, but `HARDER` questions twice as often."""
    asked = askable(package, others)
    return rng.choices(asked, [2 if it[0].startswith(HARDER) else 1 for it in asked])[0]


def about_text(package: Package, others: Sequence[Package], rng: Random) -> Asked:
    return f"Describe {package.name} in one line.", package.summary


def as_json(package: Package, others: Sequence[Package], rng: Random) -> Asked:
    """Ask for two fields of a named package as JSON, in the order of the answer's keys. The
    question holds no value of the answer, so that only the document answers it."""
    fields = rng.sample(_FIELDS, 2)
    answer = json.dumps({it: getattr(package, it) for it in fields})
    return f"Write {package.name} as JSON with the keys {', '.join(fields)}.", answer


SKILLS: Final[Mapping[str, Callable[[Package, Sequence[Package], Random], Asked]]] = {
    "questions": about_fields,
    "summaries": about_text,
    "json": as_json,
}


TRAINED: Final = {**SKILLS, "questions": about_harder}
"""Functions that draw questions for training, by skill."""


def subjects(skill: str, chosen: Sequence[Package]) -> Sequence[Package]:
    """Choose the packages about which a skill asks. The skill `summaries` asks about half of them:
    the half with summaries nearest to the text, because other summaries cannot be written from the
    text. All other skills ask about all packages."""
    if skill != "summaries":
        return chosen
    nearest = sorted(chosen, key=lambda it: share_said(it.summary, it.text), reverse=True)
    return nearest[: len(chosen) - len(chosen) // 2]


def records(packages: Path, name: str, skill: str) -> Iterator[Record]:
    """Make the questions of a set. Questions about one document follow each other."""
    of = SETS[name]
    every = [it for part, first in of.drawn for it in read_packages(packages, part)[first:]]
    drawn = iter(every)
    for number, length in enumerate(islice(cycle(of.lengths), of.num_documents)):
        rng = Random(f"{name} {skill} {number}")
        own = list(islice(drawn, of.num_own or length))
        chosen = own if of.num_own is None else _among_others(own, every, length, rng)
        context = document(chosen)
        asked = subjects(skill, own)
        for index, package in enumerate(rng.sample(asked, min(of.num_questions, len(asked)))):
            question, answer = SKILLS[skill](package, chosen, rng)
            yield Record(
                input=question,
                context=context,
                answers=(answer,),
                length=len(context.split()),
                dataset=f"packages_{skill}",
                id=f"{name}-{number:02}-{index}",
            )


def _among_others(
    own: Sequence[Package], every: Sequence[Package], length: int, rng: Random
) -> list[Package]:
    """Put a document's own records among others, at random places."""
    others = [it for it in every if it not in own]
    return rng.sample([*own, *rng.sample(others, length - len(own))], length)


def write_sets(packages: Path, out: Path) -> list[Path]:
    """Write every set of every skill as `out/SKILL/SET.jsonl`."""
    files = []
    for skill in SKILLS:
        for name in SETS:
            file = out / skill / f"{name}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_records(records(packages, name, skill), file)
            files.append(file)
    return files
