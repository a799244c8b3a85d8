"""Records as the prompts that a server of the small pairs is sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from profiles.data.records import Record


def by_context(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Consecutive records of one context together, in order."""
    return [(context, list(group)) for context, group in groupby(records, lambda r: r.context)]


def prompt_of(record: Record) -> str:
    """The pairs' tokenizer adds no `<bos>`."""
    return f"{context_prompt(record.context)} {record.input}"


def context_prompt(context: str) -> str:
    """The part of the prompt that all questions about a context share."""
    return f"<bos> {context}"
