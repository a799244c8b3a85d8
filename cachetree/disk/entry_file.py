"""One entry as a file: what lies where, written whole or not at all, read a layer at a time.

    prefix     magic, size and checksum of the header
    header     msgpack: a `Record`
    checksums  XXH3-64 of each page of each step, in the order of the payload
    payload    the steps of its layout, one after the other; of each all pages in order

Where a layer lies follows from the layout, counted from the end, and each page of it has a
checksum, so that any pages of it are read alone.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
from xxhash import xxh3_64_digest

from cachetree.checkpoint import Family
from cachetree.disk.directory import FORMAT
from cachetree.errors import UNREADABLE
from cachetree.ids import PAGE_HASH_BYTES, ModelId, PageHash, Span, Step
from cachetree.memory import Layout, checksum

Views = Callable[[Step, Span], Sequence[memoryview]]
"""These pages of a step, in order, in as many runs of whole pages as they lie in; as `Lease.views`.

It is called for every step, and once more before the entry counts; it raises where the bytes have
been taken away, and what was written is removed."""

_PIECE_BYTES: Final = 256 << 10
"""Fits the second-level cache, so that bytes are checked where the copy left them."""

_MAGIC: Final = b"ctree-e%d" % FORMAT
_PREFIX: Final = struct.Struct("<8sQQ")
_CHECKSUM_BYTES: Final = 8
_HEADER_BYTES: Final = 256
"""More than a header takes besides the model, pages and layers."""
_WRITTEN_PAGE_BYTES: Final = PAGE_HASH_BYTES + 2
_MAX_HEAD_BYTES: Final = 16 << 20
"""What a damaged file can have allocated."""
_FIRST_READ_BYTES: Final = 4096
"""Takes the whole head of most entries."""
_MAX_PARTS: Final = 512
"""Of one `pwritev`; the kernel takes 1024."""

Page = Annotated[PageHash, msgspec.Meta(min_length=PAGE_HASH_BYTES, max_length=PAGE_HASH_BYTES)]


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An entry without its payload and checksums."""

    family: str
    """Its digest."""
    model: ModelId
    num_before: Annotated[int, msgspec.Meta(ge=0)]
    """How many pages stand before the first."""
    parent: Page | None
    """The last of these; None at the root."""
    pages: tuple[Page, ...]
    layout: Layout


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def most_bytes(model: ModelId, layout: Layout) -> int:
    """No file of this layout is larger."""
    return _most_head_bytes(model, layout) + _checksums_bytes(layout) + layout.num_bytes


def largest_fitting(model: ModelId, layout: Layout, limit_bytes: int) -> Layout:
    """The same with as many of its pages as one file of `limit_bytes` takes; one at least."""
    none, one = (replace(layout, num_pages=num) for num in (0, 1))
    around = most_bytes(model, none)
    most = min(
        (limit_bytes - around) // (most_bytes(model, one) - around),
        (_MAX_HEAD_BYTES - _most_head_bytes(model, none)) // _WRITTEN_PAGE_BYTES,
    )
    return replace(layout, num_pages=min(layout.num_pages, max(1, most)))


def _most_head_bytes(model: ModelId, layout: Layout) -> int:
    around = _PREFIX.size + _HEADER_BYTES + 4 * len(model) + 9 * len(layout.e_layers)
    return around + layout.num_pages * _WRITTEN_PAGE_BYTES


# Reading.


def read_record(path: str, family: Family) -> tuple[Record, int] | None:
    """What a file holds, and its bytes; None where it is torn, damaged or another's.

    Raises OSError.
    """
    with Path(path).open("rb", buffering=0) as file:
        handle = file.fileno()
        num_bytes = os.lseek(handle, 0, os.SEEK_END)
        head = os.pread(handle, _FIRST_READ_BYTES, 0)
        size = _head_bytes(head, num_bytes)
        if size > len(head):
            head += os.pread(handle, size - len(head), len(head))
    record = read_head(head[:size], num_bytes, family)
    return None if record is None else (record, num_bytes)


def read_head(head: bytes, num_bytes: int, family: Family) -> Record | None:
    """The entry of a file of `num_bytes` that begins with `head`, its prefix and its header.

    None where these do not belong together.
    """
    if len(head) < _PREFIX.size or len(head) != _head_bytes(head, num_bytes):
        return None
    body = head[_PREFIX.size :]
    if checksum(body) != _PREFIX.unpack_from(head)[2]:
        return None
    try:
        record = _decoder.decode(body)
    except UNREADABLE:
        return None
    return record if _is_whole(record, family, num_bytes - len(head)) else None


def read_pages(path: Path, record: Record, step: Step, pages: Span, into: memoryview) -> None:
    """Fill `into` with verified bytes; raises OSError, and leaves it undefined, where it cannot."""
    layout, part = record.layout, record.layout.part_of(step)
    page_bytes = layout.bytes_of(step, 1)
    found = bytearray()
    with path.open("rb", buffering=0) as file:
        payload = os.lseek(file.fileno(), 0, os.SEEK_END) - layout.num_bytes
        first = payload - _checksums_bytes(layout)
        first += _CHECKSUM_BYTES * (part * layout.num_pages + pages.start)
        expected = os.pread(file.fileno(), _CHECKSUM_BYTES * len(pages), first)
        offset = payload + pages.start * page_bytes
        offset += sum(num * size for num, size in layout.parts[:part])
        for piece in _pieces([into], page_bytes):
            _read(file.fileno(), piece, offset)
            offset += piece.nbytes
            found += _checksums(piece, page_bytes)
    if found != expected:
        raise OSError("the bytes do not have the checksum that they were written with")


# Writing.


def write_record(handle: int, record: Record, views: Views, pages: Span) -> None:
    """Write an entry, whose pages are these of those that there are views of.

    Raises OSError, and whatever `views` raises.
    """
    layout, head = record.layout, head_of(record)
    checksums = bytearray()
    batch: list[memoryview] = []
    offset = len(head) + _checksums_bytes(layout)
    for step in layout.steps:
        whole = views(step, pages)
        page_bytes = layout.bytes_of(step, 1)
        num_given, num_due = sum(view.nbytes for view in whole), layout.num_pages * page_bytes
        if num_given != num_due:
            raise ValueError(f"{step} has {num_given} bytes where {num_due} belong")
        for piece in _pieces(whole, page_bytes):
            checksums += _checksums(piece, page_bytes)
            batch.append(piece)
            if len(batch) * piece.nbytes >= _PIECE_BYTES or len(batch) == _MAX_PARTS:
                offset = _write(handle, batch, offset)
    _write(handle, batch, offset)
    _write(handle, [memoryview(head), memoryview(checksums)], 0)
    views(layout.steps[0], pages)


# Pages and their checksums.


def _pieces(views: Sequence[memoryview], page_bytes: int) -> Iterator[memoryview]:
    """The views in pieces of whole pages, of which they consist."""
    size = max(1, _PIECE_BYTES // page_bytes) * page_bytes
    for view in views:
        for at in range(0, view.nbytes, size):
            yield view[at : at + size]


def _checksums(pages: memoryview, page_bytes: int) -> bytes:
    each = range(0, pages.nbytes, page_bytes)
    return b"".join([xxh3_64_digest(pages[at : at + page_bytes]) for at in each])


def _checksums_bytes(layout: Layout) -> int:
    return _CHECKSUM_BYTES * layout.num_pages * (layout.num_layers + len(layout.e_layers))


# The head.


def head_of(record: Record) -> bytes:
    """Prefix and header."""
    header = _encoder.encode(record)
    return _PREFIX.pack(_MAGIC, len(header), checksum(header)) + header


def _head_bytes(head: bytes, num_bytes: int) -> int:
    """Size of prefix and header; 0 where the prefix is no entry's, or says what cannot be."""
    if len(head) < _PREFIX.size:
        return 0
    magic, header_bytes, _ = _PREFIX.unpack_from(head)
    size: int = _PREFIX.size + header_bytes
    return size if magic == _MAGIC and size <= min(num_bytes, _MAX_HEAD_BYTES) else 0


def _is_whole(record: Record, family: Family, rest_bytes: int) -> bool:
    """Whether it is an entry of this family, with so much behind it."""
    layers = record.layout.e_layers
    return (
        record.family == family.digest
        and len(record.pages) > 0
        and (record.parent is None) == (record.num_before == 0)
        and all(0 <= layer < family.num_layers for layer in layers)
        and all(a < b for a, b in itertools.pairwise(layers))
        and record.layout == Layout.of(family, len(record.pages), layers)
        and _checksums_bytes(record.layout) + record.layout.num_bytes == rest_bytes
    )


def _read(handle: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < into.nbytes:
        num = os.preadv(handle, [into[done:]], offset + done)
        if not num:
            raise OSError("the file ends early")
        done += num


def _write(handle: int, parts: list[memoryview], offset: int) -> int:
    """Write the parts and take them off the list; returns where they end.

    A write may stop short, at the latest after 2 GiB.
    """
    while parts:
        num = os.pwritev(handle, parts, offset)
        offset += num
        while parts and num >= parts[0].nbytes:
            num -= parts.pop(0).nbytes
        if num:
            parts[0] = parts[0][num:]
    return offset
