"""Make prompts for the servers: from a user's own data, or from new random documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final

from sglang_droidspeak.fleet.client import Client

if TYPE_CHECKING:
    from profiles.settings import Settings

NUM_SUFFIXES: Final = 4
"""Number of questions about each random document."""
_NAMES: Final = ("Ada", "Boris", "Chidi", "Dana", "Emre", "Farah", "Goran", "Hana")
_THINGS: Final = ("lamps", "crates", "maps", "bells", "ropes", "chairs", "books", "tents")
_PLACES: Final = ("Oslo", "Lima", "Accra", "Turin", "Busan", "Quito", "Perth", "Fez")
_TOKENS_PER_SENTENCE: Final = 8
"""Fewest tokens that any tokenizer makes of a sentence."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A document, as token ids in whole pages, and questions that may follow it."""

    prefix: tuple[int, ...]
    suffixes: tuple[tuple[int, ...], ...]
    """Questions as token ids. There is at least one, and none is empty."""


def made(client: Client, num: int, num_tokens: int, page: int, seed: str) -> Iterator[Prompt]:
    """Yield `num` random documents of at most `num_tokens` tokens, cut to whole pages. The server
    tokenises them. Equal seeds give equal documents."""
    for number in range(num):
        random = Random(f"{seed} {number}")
        drawn = (_sentence(random) for _ in range(num_tokens // _TOKENS_PER_SENTENCE))
        ids = tokenize(client, " ".join(drawn))[:num_tokens]
        asked = (f" Question: {_question(random)} Answer:" for _ in range(NUM_SUFFIXES))
        suffixes = tuple(tokenize(client, it) for it in asked)
        yield Prompt(ids[: len(ids) // page * page], suffixes)


def of_data(settings: Settings, tokenizer: str, num: int, longest: int | None) -> list[Prompt]:
    """Return the first prompts of a user's data, as the profiler makes them. Raises ConfigError."""
    from pathlib import Path

    from profiles.compute.models import ModelSource, load_tokenizer
    from profiles.data.datasets import load_sources
    from profiles.data.documents import make_documents
    from profiles.data.metrics import Metric
    from profiles.data.tasks import TaskOptions

    options = TaskOptions(
        template=settings.template or "{context}\n\n{input}",
        metric=Metric(settings.metric or Metric.F1),
        max_new=settings.max_new,
        chat=settings.chat,
    )
    sources = [
        replace(it, records=it.records[: num * NUM_SUFFIXES])
        for it in load_sources(list(settings.data), options, data_dir=settings.data_dir)
    ]
    documents = make_documents(
        sources,
        load_tokenizer(ModelSource(path=Path(tokenizer))),
        page_size=settings.page_size,
        max_prompt_tokens=longest,
    )
    return [
        Prompt(it.prefix, tuple(question.suffix for question in it.questions))
        for it in documents[:num]
    ]


def tokenize(client: Client, text: str) -> tuple[int, ...]:
    """Return the token ids of a text by the server's tokenizer, without special tokens."""
    return tuple(client.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"])


def detokenize(client: Client, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of token ids by the server's tokenizer."""
    return list(client.post("/detokenize", tokens=[list(it) for it in prompts])["text"])


def _sentence(random: Random) -> str:
    name, thing, place = (random.choice(it) for it in (_NAMES, _THINGS, _PLACES))
    return (
        f"On day {random.randrange(1000)} {name} moved {random.randrange(100)} {thing} to {place}."
    )


def _question(random: Random) -> str:
    return f"how many {random.choice(_THINGS)} came to {random.choice(_PLACES)}?"
