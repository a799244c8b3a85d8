"""Copies and checksums of bytes, in pieces that fit into a core's cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import xxhash

from cachetree.ids import Span, parts_of

PIECE_BYTES: Final = 256 << 10
"""Number of bytes of one copy and its checksum: far less than a core's cache has."""


def copy(into: memoryview, payload: memoryview) -> None:
    """Copy like `into[:] = payload`, but let other Python threads run during the copy."""
    if payload.nbytes:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(payload, np.uint8))


def scatter(into: Sequence[memoryview], payload: memoryview) -> None:
    """Copy the payload into the views: fill the first view, then the next one."""
    at = 0
    for view in into:
        copy(view, payload[at : at + view.nbytes])
        at += view.nbytes


def cut(views: Sequence[memoryview], span: Span) -> list[memoryview]:
    """Return the parts of the views that lie in `span`. The span counts bytes of all views in
    order."""
    sizes = (view.nbytes for view in views)
    return [views[number][it.start : it.stop] for number, it in parts_of(sizes, span)]


def copy_in_pieces(into: memoryview, payload: memoryview) -> Iterator[memoryview]:
    """Copy the payload into `into`, `PIECE_BYTES` at a time. Yield each piece of `into` right after
    its copy: a core's cache still has the bytes, so that a checksum is cheap."""
    for at in range(0, payload.nbytes, PIECE_BYTES):
        piece = into[at : at + PIECE_BYTES]
        copy(piece, payload[at : at + PIECE_BYTES])
        yield piece


def checksum(payload: memoryview | bytes) -> int:
    """Return the XXH3-64 of the payload."""
    return int(xxhash.xxh3_64_intdigest(payload))


def checksum_of_parts(parts: Iterable[memoryview]) -> int:
    """Return the checksum of the parts' bytes, taken as one run."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int(state.intdigest())
