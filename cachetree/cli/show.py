"""What the commands print, for people and for programs."""

from __future__ import annotations

import msgspec


def show(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def show_json(value: object) -> None:
    """One line."""
    show(msgspec.json.encode(value).decode())


def show_fields(value: msgspec.Struct) -> None:
    """A line for each field."""
    for field, content in msgspec.structs.asdict(value).items():
        show(f"{field:22} {content}")
