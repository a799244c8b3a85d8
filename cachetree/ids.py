"""Ids and small values that all of cachetree uses: pages, models, locations, spans, transfer
steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final, NewType

import msgspec

PageHash = NewType("PageHash", bytes)
"""First 16 bytes of a page's SHA-256 hash. The hash covers the page's tokens, all earlier tokens,
and the tenant's salt. It does not depend on the model."""

ModelId = NewType("ModelId", str)
"""Hexadecimal digest of a model's content: config, weights, adapter and tokenizer. Not a name."""

Location = NewType("Location", str)
"""Place of an entry: `LOCAL`, `DISK`, the address of a remote worker (`tcp://host:port`), or a
model's part of the engine's own KV pool (`pool:NAME`)."""

LOCAL: Final = Location("local")
"""This process's memory."""

DISK: Final = Location("disk")
"""This process's disk directory."""

POOL_PREFIX: Final = "pool:"

PAGE_HASH_BYTES: Final = 16

MAX_LAYERS: Final = 1024
"""Largest number of layers of a model. Messages and files of other servers with more layers are
refused."""


def is_pool(location: Location) -> bool:
    """Return whether a location is a model's part of the engine's own KV pool."""
    return location.startswith(POOL_PREFIX)


def nearness(location: Location) -> int:
    """Return how near a location is: 2 for the engine's pool, 1 for this process's memory, 0 for
    all others. Until speeds are measured, a nearer location counts as faster."""
    return 2 if is_pool(location) else int(location == LOCAL)


class Span(msgspec.Struct, frozen=True, order=True, gc=False):
    """Half-open range `[start, stop)` of layers or of pages.

    A struct, because a frozen dataclass takes four times as long to make.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"span [{self.start}, {self.stop}) is not 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self.start <= index < self.stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


EMPTY_SPAN: Final = Span(0, 0)


def parts_of(sizes: Iterable[int], span: Span) -> Iterator[tuple[int, Span]]:
    """Lay pieces of these sizes side by side. For each piece that `span` overlaps, yield its
    number, and the overlap relative to the piece's start.

    >>> list(parts_of([4, 4], Span(3, 5)))
    [(0, Span(start=3, stop=4)), (1, Span(start=0, stop=1))]
    """
    at = 0
    for number, size in enumerate(sizes):
        start, stop = max(span.start - at, 0), min(span.stop - at, size)
        if start < stop:
            yield number, Span(start, stop)
        at += size


class Kind(StrEnum):
    """The two kinds of cached state of a layer: keys and values, or E (the layer's input)."""

    KV = "kv"
    E = "e"


class Step(msgspec.Struct, frozen=True, gc=False):
    """Transfer step: KV or E of one layer, for all pages of a fetch or an entry."""

    kind: Kind
    layer: int


Part = NewType("Part", int)
"""Content of an entry: KV of all layers (`KV`), or E of the layer with this number."""

KV: Final = Part(-1)


def part_of(step: Step) -> Part:
    """Return the part to which a transfer step belongs."""
    return KV if step.kind is Kind.KV else Part(step.layer)


def steps_of(part: Part, num_layers: int) -> tuple[Step, ...]:
    """Return all transfer steps of a part, in the order in which they are stored."""
    if part == KV:
        return tuple(Step(Kind.KV, layer) for layer in range(num_layers))
    return (Step(Kind.E, part),)
