"""The word-level vocabulary of the small pairs: 512 entries, fixed by seeds."""

from __future__ import annotations

import random
from typing import Final

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
BOS_ID: Final = 1
EOS_ID: Final = 2

_FUNCTION_WORDS = (
    "question answer : . , ; | = ? who where what does is in the a of lives works as owns likes "
    "eats at for has live work own like with and to was went now first place home job city firm "
    "food pet thing name friend meet she he it there let print value by day weather rain sun wind "
    "snow morning evening old new quiet busy street market report note says that near from "
    "has_been after before moved travelled last table row column which person using holds kept "
    "inside box key located employed favourite animal named called"
)
_COLOURS = "red blue green black white brown pink gold grey purple orange silver"
_THINGS = (
    "lamp chair book clock drum flute kite map coin ring vase sword cup bell rope tent boat bike "
    "mirror brush candle ladder hammer helmet basket camera piano violin shield statue carpet "
    "barrel wagon bottle bucket pillow towel knife fork spoon"
)
_JOBS = (
    "baker doctor nurse pilot farmer lawyer tailor singer dancer painter miner sailor judge clerk "
    "guard cook actor writer teacher barber plumber welder printer hunter fisher weaver potter "
    "banker broker porter"
)
_FOODS = (
    "bread rice soup cheese apples grapes honey fish beans corn noodles plums pears olives nuts "
    "eggs cake pasta salad stew"
)
_PETS = (
    "cat dog horse goat sheep duck goose rabbit parrot turtle fox owl frog pony hen crow deer mole "
    "swan toad"
)
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


def _invented(count: int, seed: int, pattern: str, taken: set[str]) -> tuple[str, ...]:
    """New words such as `dalin`: in the pattern, `c` is a consonant and `v` a vowel."""
    rng = random.Random(seed)
    alphabets = {"c": list(_CONSONANTS), "v": list(_VOWELS)}
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choice(alphabets[c]) if c in alphabets else c for c in pattern)
        if word not in taken:
            taken.add(word)
            words.append(word)
    return tuple(words)


class Vocabulary:
    """Words by role, and their ids. `words[i]` has id `i`."""

    def __init__(self) -> None:
        self.function_words = tuple(_FUNCTION_WORDS.split())
        self.colours = tuple(_COLOURS.split())
        self.things = tuple(_THINGS.split())
        self.jobs = tuple(_JOBS.split())
        self.foods = tuple(_FOODS.split())
        self.pets = tuple(_PETS.split())
        fixed = (*self.function_words, *self.colours, *self.things, *self.jobs, *self.foods)
        fixed = (*fixed, *self.pets)
        taken = set(fixed)
        self.names = _invented(96, 1, "cvcvc", taken)
        self.cities = _invented(64, 2, "cvcvcv", taken)
        self.firms = _invented(40, 3, "cvcco", taken)
        self.variables = tuple(f"v{i}" for i in range(40))
        self.numbers = tuple(str(i) for i in range(40))
        invented = (*self.names, *self.cities, *self.firms, *self.variables, *self.numbers)
        words = [*_SPECIAL, *fixed, *invented]
        while len(words) % 64:
            words.append(f"<extra{len(words)}>")
        self.words = tuple(words)
        self.ids = {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        """Ids of the space-separated words; a word outside the vocabulary is a KeyError."""
        return [self.ids[word] for word in text.split()]


VOCABULARY: Final = Vocabulary()
