"""The word-level vocabulary of the small pairs: 512 words, in the order of their ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

BOS_ID: Final = 1
EOS_ID: Final = 2
_TOKENIZER: Final = Path(__file__).parents[2] / "examples/pairs/weights/foundation/tokenizer.json"


class Vocabulary:
    """Words by role, and their ids. `words[i]` has id `i`."""

    def __init__(self, tokenizer: Path = _TOKENIZER) -> None:
        self.ids: dict[str, int] = json.loads(tokenizer.read_text())["model"]["vocab"]
        self.words = tuple(sorted(self.ids, key=self.ids.__getitem__))
        rest = iter(self.words)
        _taken(rest, 104)  # special and function words
        self.colours, self.things, self.jobs = (_taken(rest, it) for it in (12, 40, 30))
        self.foods, self.pets = _taken(rest, 20), _taken(rest, 20)
        self.names, self.cities, self.firms = (_taken(rest, it) for it in (96, 64, 40))
        """Invented words, such as dalin and nimefo."""
        self.variables, self.numbers = _taken(rest, 40), _taken(rest, 40)

    def encode(self, text: str) -> list[int]:
        """Ids of the space-separated words. Raises KeyError for a word outside the vocabulary."""
        return [self.ids[word] for word in text.split()]


def _taken(words: Iterator[str], number: int) -> tuple[str, ...]:
    return tuple(islice(words, number))


VOCABULARY: Final = Vocabulary()
