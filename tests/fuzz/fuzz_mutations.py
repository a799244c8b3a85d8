"""Seeded mutations of a corpus. They are used where atheris is not installed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

MAX_BYTES = 8192
_EDGES = (b"\0", b"\xff", b"\x7f", b"\x80", b"\xff" * 4, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"-1")


def mutations(corpus: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Yield inputs without end. Each is an input of the corpus with a few changes."""
    chance = random.Random(seed)
    while True:
        data = bytearray(chance.choice(corpus)[:MAX_BYTES])
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            _harm(data, corpus, chance)
        yield bytes(data[:MAX_BYTES])


def _harm(data: bytearray, corpus: Sequence[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    stop = min(len(data), at + chance.choice((1, 2, 4, 8, 64)))
    match chance.randrange(7):
        case 0 if data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        case 1 if data:
            data[at % len(data)] = chance.randrange(256)
        case 2:
            del data[at:stop]
        case 3:
            data[at:at] = data[at:stop] * chance.choice((1, 1, 2, 20))
        case 4:
            data[at:stop] = chance.choice(_EDGES)
        case 5:
            other = chance.choice(corpus)
            start = chance.randrange(len(other) + 1)
            data[at:stop] = other[start : start + chance.randrange(1, 65)]
        case _:
            del data[at:]
