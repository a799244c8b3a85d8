"""Traces in Mooncake's form (FAST '25): JSON lines of times, lengths and hashes of blocks.

    {"timestamp":27482,"input_length":6955,"output_length":52,"hash_ids":[46,47,2354]}

Prompts whose first ids are equal are equal up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from cachetree.errors import UNREADABLE, ConfigError

from .trace import PageNames, Trace

BLOCK = 512
"""Tokens of a block; the last one of a prompt may be shorter."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One request; what else a line says is left out."""

    timestamp: Annotated[float, Meta(ge=0)]
    """Milliseconds."""
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=1)]
    hash_ids: Annotated[tuple[int, ...], Meta(min_length=1)]


def read_lines(path: Path) -> list[Line]:
    """Raises ConfigError naming the file and the line."""
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append(msgspec.json.decode(text, type=Line))
        except UNREADABLE as exc:
            raise ConfigError(f"trace {path} line {number}: {exc}") from exc
    return lines


def of_trace(trace: Trace, output_length: int) -> list[Line]:
    """One of ours in that form; ours does not say how long the answers were."""
    names, ids, unique = PageNames(BLOCK), dict[bytes, int](), count(-1, -1)
    return [
        Line(
            timestamp=1000 * it.at_s,
            input_length=it.num_tokens,
            output_length=output_length,
            hash_ids=(
                *(ids.setdefault(bytes(of), len(ids)) for of in names.of(it.prompt)),
                *([next(unique)] if it.num_tokens % BLOCK else []),
            ),
        )
        for it in trace.requests
    ]


def write_lines(lines: Sequence[Line], path: Path) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(it) + b"\n" for it in lines))
