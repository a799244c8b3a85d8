"""What is stored: one object per page, kind and layer, which says by itself whether it is right.

One per layer, so that a plan reads the layers that it loads and no others, in their order, and
finds E apart from KV. An object of 64 KiB and more costs a file backend no more per byte than a
larger one does.

    bytes [0, 8)     magic and version
    bytes [8, 16)    size of the payload, little-endian
    bytes [16, 24)   checksum of the key and the payload
    bytes [24, ...)  payload

Nothing read is believed: the header is made again from what was expected and what has come.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from cachetree import Kind, Location, ModelId, PageHash, Part, Step, steps_of
from cachetree.checkpoint import Family
from cachetree.memory import checksum_of_parts

HICACHE: Final = Location("hicache")
"""Where all of it lies."""
_MAGIC: Final = b"droidkv1"
_HEADER: Final = struct.Struct("<8sQQ")
_SLOT_UNIT: Final = 8192
"""Both halves of a slot are whole pages of the system, for backends that bypass its cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One object of a fetch or of an entry, on its way."""

    page: int
    """Counted from the first page of the fetch or the entry."""
    step: Step
    key: str
    slot: int
    memory: memoryview
    """As much of that slot as it takes."""

    def seal(self, payload: memoryview) -> None:
        body = self.memory[_HEADER.size :]
        body[:] = payload
        self.memory[: _HEADER.size] = _header(self.key, body)

    def opened(self) -> memoryview | None:
        """The payload; None where it is not what was stored under this key."""
        body = self.memory[_HEADER.size :]
        return body if self.memory[: _HEADER.size] == _header(self.key, body) else None


class Objects:
    """Keys and sizes of one family's objects."""

    def __init__(self, family: Family) -> None:
        self._prefix: Final = f"droidspeak3-{family.digest[:16]}"
        self._family: Final = family
        largest = _HEADER.size + max(map(family.page_bytes, Kind))
        self.slot_bytes: Final = -(-largest // _SLOT_UNIT) * _SLOT_UNIT

    def steps(self, part: Part) -> tuple[Step, ...]:
        """All objects of a page, in the order of writing. If the first and the last are there, the
        page is taken to be whole."""
        # A page whose first is there has lost none to a backend that drops the oldest; where its
        # last is there, all have been written.
        return steps_of(part, self._family.num_layers)[::-1]

    def page_bytes(self, step: Step) -> int:
        return self._family.page_bytes(step.kind)

    def size(self, step: Step) -> int:
        return _HEADER.size + self.page_bytes(step)

    def key(self, model: ModelId, page: PageHash, step: Step) -> str:
        """The page covers tokens and tenant, the prefix sizes, dtype, tokenizer, RoPE and rank."""
        return f"{self._prefix}-{model}-{page.hex()}-{step.kind.value}{step.layer}"


def _header(key: str, body: memoryview) -> bytes:
    found = checksum_of_parts([memoryview(key.encode()), body])
    return _HEADER.pack(_MAGIC, body.nbytes, found)
