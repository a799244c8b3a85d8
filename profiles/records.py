"""Questions about contexts in the JSONL form of LongBench v1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a question about a context. `length` counts the context's words."""

    input: str
    context: str
    answers: tuple[str, ...]
    length: int
    dataset: str
    language: str
    all_classes: tuple[str, ...] | None
    id: str = msgspec.field(name="_id")


class RecordError(Exception):
    """A data file cannot be used. The message names the file and the line."""


def read_records(path: Path) -> list[Record]:
    """All records of a file in order; raises RecordError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise RecordError(f"data file {path} cannot be read: {exc.strerror}") from exc
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(msgspec.json.decode(line, type=Record))
        except msgspec.DecodeError as exc:
            raise RecordError(f"{path}:{number} is not a LongBench record: {exc}") from exc
    if not records:
        raise RecordError(f"data file {path} has no records")
    return records


def write_records(records: Iterable[Record], path: Path) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def by_context(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Consecutive records of one context together, in order."""
    return [(context, list(group)) for context, group in groupby(records, lambda r: r.context)]


def prompt_of(record: Record) -> str:
    """The text that a server of the small pairs is sent: their tokenizer adds no `<bos>`."""
    return f"{context_prompt(record.context)} {record.input}"


def context_prompt(context: str) -> str:
    """The part of the prompt that all questions about a context share."""
    return f"<bos> {context}"
