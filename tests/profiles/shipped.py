"""Paths of the shipped pairs, and the options with which their models are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from profiles.compute.models import ModelSource, Pair, load_pair
from profiles.data.records import Record

PAIRS = Path(__file__).parents[2] / "examples" / "pairs"
WEIGHTS, DATA = PAIRS / "weights", PAIRS / "data"
ASKED = ("--template", "<bos> {context} {input}", "--metric", "f1", "--max-new", "8")


@dataclass(frozen=True)
class Shipped:
    name: str
    sender: ModelSource
    receiver: ModelSource
    profile: Path

    def load(self) -> Pair:
        """Load the models in float32, which is five times as fast on a CPU."""
        return load_pair(self.sender, self.receiver)


SHIPPED = (
    Shipped(
        name="fine-tunes",
        sender=ModelSource(path=WEIGHTS / "sender"),
        receiver=ModelSource(path=WEIGHTS / "receiver"),
        profile=PAIRS / "sender_to_receiver.json",
    ),
    Shipped(
        name="adapters",
        sender=ModelSource(path=WEIGHTS / "foundation", adapter=WEIGHTS / "sender_lora"),
        receiver=ModelSource(path=WEIGHTS / "foundation", adapter=WEIGHTS / "receiver_lora"),
        profile=PAIRS / "sender_lora_to_receiver_lora.json",
    ),
)


def flags(shipped: Shipped) -> list[str]:
    """Return the flags of `droidspeak profile` for the pair."""
    arguments = []
    for role, source in (("sender", shipped.sender), ("receiver", shipped.receiver)):
        arguments += [f"--{role}", str(source.path)]
        arguments += [f"--{role}-lora", str(source.adapter)] if source.adapter else []
    return arguments


def by_context(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Group consecutive records of one context, in order."""
    return [(context, list(group)) for context, group in groupby(records, lambda r: r.context)]


def prompt_of(record: Record) -> str:
    """Return the prompt of a record. The tokenizer of the pairs adds no `<bos>`."""
    return f"{context_prompt(record.context)} {record.input}"


def context_prompt(context: str) -> str:
    """Return the part of the prompt that all questions about a context share."""
    return f"<bos> {context}"
