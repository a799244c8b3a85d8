"""The checksum of pages that leave memory: on the wire, on disk."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def checksum(payload: memoryview | bytes) -> int:
    """XXH3-64."""
    return int(xxhash.xxh3_64_intdigest(payload))


def checksum_of_parts(parts: Iterable[memoryview]) -> int:
    """The checksum of the parts as one run of bytes."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int(state.intdigest())
