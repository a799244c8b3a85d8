"""Questions about contexts in the JSONL form of LongBench v1."""

from __future__ import annotations

import hashlib
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from cachetree import CacheTreeError

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""Largest number of bytes of a line that is decoded. LongBench's longest lines are below 1 MiB."""
_FOREIGN: Final = (
    (rb"\x1f\x8b", "is gzip; unpack it with `gunzip`"),
    (rb"PK\x03\x04", "is a zip file; unpack it with `unzip`"),
    (rb"PAR1", "is Parquet; write its rows as JSONL"),
    (rb"version https://git-lfs", "is a Git LFS pointer; fetch the data with `git lfs pull`"),
    (rb"\s*<(!doctype|html)", "is an HTML page; download the file itself"),
    (rb"\xff\xfe|\xfe\xff|\0?{\0", "is UTF-16; save it as UTF-8"),
    (rb"\s*\[", "is one JSON array; write a record per line, as `jq -c '.[]' FILE` does"),
    (rb"\s*{\s*\n", "has records of several lines; write one per line, as `jq -c . FILE` does"),
)
"""First bytes of files that are not JSONL, each with the words for an error message."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a question about a context. `length` counts the context's words.

    `dataset` chooses the task (`profiles.data.tasks`); the user's options may change the task.
    """

    input: str
    context: str
    answers: tuple[str, ...] = ()
    length: int = 0
    dataset: str = ""
    language: str = "en"
    all_classes: tuple[str, ...] | None = None
    id: str = msgspec.field(name="_id", default="")


class RecordError(CacheTreeError):
    """Error in data that cannot be used. The message names the file and the line."""


Line = TypeVar("Line", bound=msgspec.Struct)


def read_records(path: Path) -> list[Record]:
    """Read all records of a file in order; raises RecordError."""
    return [record for _, record in read_lines(path, Record, "LongBench record")]


def read_lines(path: Path, schema: type[Line], what: str) -> list[tuple[str, Line]]:
    """Read every line of a JSONL file, with its place (`file:line`). Blank lines are left out.

    Error messages call a line `what`. Raises RecordError.
    """
    lines = []
    try:
        for place, raw in _raw_lines(path):
            try:
                lines.append((place, msgspec.json.decode(raw, type=schema)))
            except (ValueError, RecursionError) as exc:
                raise RecordError(f"{place} is not a {what}: {exc}") from exc
    except OSError as exc:
        raise RecordError(f"data file {path} cannot be read: {exc.strerror}") from exc
    if not lines:
        raise RecordError(f"data file {path} has no records")
    return lines


def _raw_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        begins = file.peek(256)
        for pattern, problem in _FOREIGN:
            if re.match(pattern, begins.removeprefix(BOM_UTF8), re.IGNORECASE):
                raise RecordError(f"data file {path} {problem}")
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise RecordError(
                    f"{path}:{number} is longer than {MAX_LINE_BYTES} bytes, so it is not decoded; "
                    "JSONL has one record per line"
                )
            if number == 1:
                raw = raw.removeprefix(BOM_UTF8)
            if raw.strip():
                yield f"{path}:{number}", raw


def write_records(records: Iterable[Record], path: Path) -> None:
    path.write_bytes(_encoded(records))


def records_sha256(records: Iterable[Record]) -> str:
    """Hexadecimal digest of the file that `write_records` would write."""
    return hashlib.sha256(_encoded(records)).hexdigest()


def _encoded(records: Iterable[Record]) -> bytes:
    return b"".join(msgspec.json.encode(it) + b"\n" for it in records)


def context_digest(context: str) -> str:
    """Digest of a context's words, so that white space does not change it: 16 hexadecimal
    digits."""
    return hashlib.sha256(" ".join(context.split()).encode()).hexdigest()[:16]
