"""One entry as bytes: what a segment holds, one record after another.

    prefix    marker, format, sizes of header and payload, checksum of these and of the header
    header    msgpack: model, parent, pages, layers with E, the payload's checksums
    payload   KV and E in the order of `slab.Layout`
    trailer   a mark, and the prefix's checksum again

The payload is written first, then prefix and header, then the trailer, whose mark makes the record
count. Burying an entry overwrites the mark, so that a deletion needs no room on a full disk and
goes with its file.

A checksum covers one chunk: consecutive pages of one kind at one layer, `CHUNK_BYTES` or one page.
So a reader of some pages of one layer verifies them by reading little more than them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from cachetree.checkpoint import Family
from cachetree.disk.directory import FORMAT
from cachetree.errors import UNREADABLE
from cachetree.ids import PAGE_HASH_BYTES, Kind, ModelId, PageHash, Span, Step
from cachetree.memory import Layout, checksum

CHUNK_BYTES: Final = 256 << 10
"""Fits the second-level cache, so that bytes are checked where the copy left them."""

_PREFIX: Final = struct.Struct("<16sIIQQ")
_UNCHECKED: Final = 16
"""The marker; a wrong one is no record at all."""
_TRAILER: Final = struct.Struct("<8sQ")
_COMMITTED: Final = b"commit\r\n"
BURIED: Final = b"\0\0buried"
"""No flip of a few bits turns one mark into the other."""

PREFIX_BYTES: Final = _PREFIX.size
TRAILER_BYTES: Final = _TRAILER.size
_CHECKSUM_BYTES: Final = 8
_HEADER_BYTES: Final = 256
"""More than a header takes besides the model, pages, layers and checksums."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry is. The family is in the directory's manifest."""

    model: str
    parent: bytes
    """The page before the first; empty at the root."""
    pages: bytes
    e_layers: tuple[int, ...]
    checksums: bytes
    """8 bytes per chunk, little-endian, in the order of the payload."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some pages of one step, as bytes of the payload, and the number of their checksum."""

    number: int
    pages: Span
    bytes: Span


@dataclass(frozen=True, slots=True)
class Chunks:
    """How the payload of one layout is cut into what the checksums cover."""

    layout: Layout

    @property
    def num(self) -> int:
        kv, e = self._per_step(Kind.KV), self._per_step(Kind.E)
        return self.layout.num_layers * kv + len(self.layout.e_layers) * e

    @property
    def steps(self) -> Iterator[Step]:
        """In the order of the payload."""
        yield from (Step(Kind.KV, layer) for layer in range(self.layout.num_layers))
        yield from (Step(Kind.E, layer) for layer in self.layout.e_layers)

    def of(self, step: Step, pages: Span) -> Iterator[Chunk]:
        """Those that have any of `pages`; raises StaleEntry where there is no such E."""
        size = self._chunk_pages(step.kind)
        first = self._first(step)
        for number in range(pages.start // size, -(-pages.stop // size)):
            covered = Span(number * size, min((number + 1) * size, self.layout.num_pages))
            yield Chunk(first + number, covered, self.layout.range_of(step, covered))

    def _first(self, step: Step) -> int:
        if step.kind is Kind.KV:
            return step.layer * self._per_step(Kind.KV)
        kv = self.layout.num_layers * self._per_step(Kind.KV)
        # A layer without E is refused by `range_of` before this number is used.
        before = sum(layer < step.layer for layer in self.layout.e_layers)
        return kv + before * self._per_step(Kind.E)

    def _per_step(self, kind: Kind) -> int:
        return -(-self.layout.num_pages // self._chunk_pages(kind))

    def _chunk_pages(self, kind: Kind) -> int:
        is_kv = kind is Kind.KV
        page_bytes = self.layout.kv_page_bytes if is_kv else self.layout.e_page_bytes
        return max(1, CHUNK_BYTES // page_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An entry without its payload. Checksums are packed as in `Header`."""

    model: ModelId
    parent: PageHash | None
    pages: tuple[PageHash, ...]
    layout: Layout
    checksums: bytes

    def head(self, marker: bytes) -> bytes:
        """Prefix and header; its size does not depend on the checksums' values."""
        header = _encoder.encode(
            Header(
                model=self.model,
                parent=self.parent or b"",
                pages=b"".join(self.pages),
                e_layers=self.layout.e_layers,
                checksums=self.checksums,
            )
        )
        sizes = (FORMAT, len(header), self.layout.num_bytes)
        unsealed = _PREFIX.pack(marker, *sizes, 0)
        seal = checksum(unsealed[_UNCHECKED:] + header)
        return _PREFIX.pack(marker, *sizes, seal) + header

    def expects(self, chunk: Chunk) -> int:
        """The checksum that a chunk's bytes must have."""
        at = chunk.number * _CHECKSUM_BYTES
        return int.from_bytes(self.checksums[at : at + _CHECKSUM_BYTES], "little")


def pack_checksums(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def trailer(head: bytes) -> bytes:
    """What commits the record that begins with `head`."""
    return _TRAILER.pack(_COMMITTED, seal_of(head))


def is_trailer(found: bytes, head: bytes, mark: bytes = _COMMITTED) -> bool:
    return found == _TRAILER.pack(mark, seal_of(head))


def seal_of(head: bytes) -> int:
    return int(_PREFIX.unpack_from(head)[4])


def sizes_of(prefix: bytes, marker: bytes) -> tuple[int, int] | None:
    """Bytes of header and payload, not yet verified; None where no record can begin here."""
    if len(prefix) < PREFIX_BYTES:
        return None
    found, version, header_bytes, payload_bytes, _ = _PREFIX.unpack_from(prefix)
    return (header_bytes, payload_bytes) if (found, version) == (marker, FORMAT) else None


def read_head(head: bytes, family: Family) -> Record | None:
    """The record that `head`, a prefix and its header, begins; None where it is damaged."""
    marker, version, header_bytes, payload_bytes, seal = _PREFIX.unpack_from(head)
    unsealed = _PREFIX.pack(marker, version, header_bytes, payload_bytes, 0)
    if checksum(unsealed[_UNCHECKED:] + head[PREFIX_BYTES:]) != seal:
        return None
    try:
        header = _decoder.decode(head[PREFIX_BYTES:])
    except UNREADABLE:
        return None
    num_pages, rest = divmod(len(header.pages), PAGE_HASH_BYTES)
    layout = Layout.of(family, num_pages, header.e_layers)
    is_whole = (
        num_pages > 0
        and not rest
        and len(header.parent) in (0, PAGE_HASH_BYTES)
        and list(header.e_layers) == sorted(set(header.e_layers))
        and all(0 <= layer < family.num_layers for layer in header.e_layers)
        and layout.num_bytes == payload_bytes
        and len(header.checksums) == Chunks(layout).num * _CHECKSUM_BYTES
    )
    if not is_whole:
        return None
    return Record(
        model=ModelId(header.model),
        parent=PageHash(header.parent) if header.parent else None,
        pages=tuple(
            PageHash(header.pages[at : at + PAGE_HASH_BYTES])
            for at in range(0, len(header.pages), PAGE_HASH_BYTES)
        ),
        layout=layout,
        checksums=header.checksums,
    )


def most_bytes(model: ModelId, layout: Layout) -> int:
    """No record of this layout is larger."""
    lists = len(layout.e_layers) * 5 + layout.num_pages * PAGE_HASH_BYTES
    checks = Chunks(layout).num * _CHECKSUM_BYTES
    text = 4 * len(model)  # UTF-8 at its longest.
    around = PREFIX_BYTES + _HEADER_BYTES + TRAILER_BYTES
    return around + text + lists + checks + layout.num_bytes


def largest_fitting(model: ModelId, layout: Layout, limit_bytes: int) -> Layout:
    """The same with as many of its pages as one record of `limit_bytes` takes; one at least."""
    while layout.num_pages > 1:
        num_bytes = most_bytes(model, layout)
        if num_bytes <= limit_bytes:
            break
        num_pages = min(layout.num_pages - 1, layout.num_pages * limit_bytes // num_bytes)
        layout = replace(layout, num_pages=max(1, num_pages))
    return layout
