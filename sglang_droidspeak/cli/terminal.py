"""What the commands say, to people and to programs."""

from __future__ import annotations

import sys

import msgspec


def show(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def show_json(value: object) -> None:
    """One line."""
    show(msgspec.json.encode(value).decode())


def complain(text: str) -> None:
    """One line on standard error."""
    print(f"droidspeak: {text}", file=sys.stderr, flush=True)  # noqa: T201
