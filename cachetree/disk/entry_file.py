"""One entry as a file: what lies where, written whole or not at all, read a layer at a time.

    prefix    magic, size and checksum of the header
    header    msgpack: a `Record`
    payload   the steps of its layout, one after the other; of each all pages in order

Where a layer lies follows from the layout, so that any pages of it are read alone. A checksum
covers one chunk: consecutive pages of one layer, `CHUNK_BYTES` or one page, so little more is read
than was asked.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

import msgspec

from cachetree.checkpoint import Family
from cachetree.disk.directory import FORMAT
from cachetree.errors import UNREADABLE
from cachetree.ids import PAGE_HASH_BYTES, ModelId, PageHash, Span, Step
from cachetree.memory import Layout, checksum, checksum_of_parts, cut

Views = Callable[[Step, Span], Sequence[memoryview]]
"""These pages of a step, in order, in as many runs of bytes as they lie in; as `Lease.views`.

It is called for every step, and once more before the entry counts; it raises where the bytes have
been taken away, and what was written is removed."""

CHUNK_BYTES: Final = 256 << 10
"""Fits the second-level cache, so that bytes are checked where the copy left them."""

_MAGIC: Final = b"ctree-e%d" % FORMAT
_PREFIX: Final = struct.Struct("<8sQQ")
_CHECKSUM_BYTES: Final = 8
_HEADER_BYTES: Final = 256
"""More than a header takes besides the model, pages, layers and checksums."""
_WRITTEN_PAGE_BYTES: Final = PAGE_HASH_BYTES + 2
_MAX_HEADER_BYTES: Final = 16 << 20
"""What a damaged file can have allocated; the header of a file of gigabytes is smaller."""
_FIRST_READ_BYTES: Final = 4096
"""Takes the whole head of most entries."""
_MAX_PARTS: Final = 512
"""Of one `writev`; the kernel takes 1024."""

Page = Annotated[PageHash, msgspec.Meta(min_length=PAGE_HASH_BYTES, max_length=PAGE_HASH_BYTES)]


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An entry without its payload."""

    family: str
    """Its digest."""
    model: ModelId
    num_before: Annotated[int, msgspec.Meta(ge=0)]
    """How many pages stand before the first."""
    parent: Page | None
    """The last of these; None at the root."""
    pages: tuple[Page, ...]
    layout: Layout
    checksums: tuple[bytes, ...] = ()
    """Of each step: 8 bytes per chunk, little-endian."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def most_bytes(model: ModelId, layout: Layout) -> int:
    """No file of this layout is larger."""
    num_steps = layout.num_layers + len(layout.e_layers)
    text = 4 * len(model)  # UTF-8 at its longest.
    per_page = layout.page_bytes + _WRITTEN_PAGE_BYTES + num_steps * _CHECKSUM_BYTES
    around = _PREFIX.size + _HEADER_BYTES + text + num_steps * 2 * _CHECKSUM_BYTES
    return around + layout.num_pages * per_page


def largest_fitting(model: ModelId, layout: Layout, limit_bytes: int) -> Layout:
    """The same with as many of its pages as one file of `limit_bytes` takes; one at least."""
    around, with_one = (most_bytes(model, replace(layout, num_pages=num)) for num in (0, 1))
    most = max(1, (limit_bytes - around) // (with_one - around))
    return replace(layout, num_pages=min(layout.num_pages, most))


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
    page_bytes = record.layout.bytes_of(step, 1)
    expected = record.checksums[record.layout.part_of(step)]
    with path.open("rb", buffering=0) as file:
        handle = file.fileno()
        payload = os.lseek(handle, 0, os.SEEK_END) - record.layout.num_bytes
        first = payload + _offset_of(record.layout, step)
        for number, chunk in _chunks_of(record.layout, step, pages):
            part = chunk.intersection(pages)
            to = into[
                (part.start - pages.start) * page_bytes : (part.stop - pages.start) * page_bytes
            ]
            is_whole = part == chunk
            read = to if is_whole else memoryview(bytearray(len(chunk) * page_bytes))
            _read(handle, read, first + chunk.start * page_bytes)
            if checksum(read) != int.from_bytes(expected[8 * number : 8 * number + 8], "little"):
                raise OSError("the bytes do not have the checksum that they were written with")
            if not is_whole:
                skipped = (part.start - chunk.start) * page_bytes
                to[:] = read[skipped : skipped + to.nbytes]


# Writing.


def write_record(handle: int, new: Record, views: Views, pages: Span) -> Record:
    """Write an entry, whose checksums are computed on the way; returns it with them.

    Its pages are these of those that there are views of.

    Raises OSError, and whatever `views` raises.
    """
    blank = msgspec.structs.replace(new, checksums=_no_checksums(new.layout))
    checksums = _write_payload(
        handle, new.layout, lambda step: views(step, pages), len(head_of(blank))
    )
    made = msgspec.structs.replace(new, checksums=checksums)
    _write(handle, [memoryview(head_of(made))], 0)
    views(new.layout.steps[0], pages)
    return made


def _write_payload(
    handle: int, layout: Layout, views: Callable[[Step], Sequence[memoryview]], offset: int
) -> tuple[bytes, ...]:
    checksums: list[bytes] = []
    batch: list[memoryview] = []
    num_bytes = 0
    everything = Span(0, layout.num_pages)
    for step in layout.steps:
        whole = views(step)
        page_bytes = layout.bytes_of(step, 1)
        num_given, num_due = sum(view.nbytes for view in whole), layout.num_pages * page_bytes
        if num_given != num_due:
            raise ValueError(f"{step} has {num_given} bytes where {num_due} belong")
        values: list[int] = []
        for _, chunk in _chunks_of(layout, step, everything):
            parts = cut(whole, Span(chunk.start * page_bytes, chunk.stop * page_bytes))
            values.append(checksum_of_parts(parts))
            batch += parts
            num_bytes += len(chunk) * page_bytes
            if num_bytes >= CHUNK_BYTES or len(batch) > _MAX_PARTS:
                _write(handle, batch, offset)
                offset += num_bytes
                batch, num_bytes = [], 0
        checksums.append(struct.pack(f"<{len(values)}Q", *values))
    _write(handle, batch, offset)
    return tuple(checksums)


# What lies where.


def _offset_of(layout: Layout, step: Step) -> int:
    """Where in the payload a step begins; raises StaleEntry where there is no such E."""
    return sum(num * size for num, size in layout.parts[: layout.part_of(step)])


def _chunk_pages(layout: Layout, step: Step) -> int:
    return max(1, CHUNK_BYTES // layout.bytes_of(step, 1))


def _chunks_of(layout: Layout, step: Step, pages: Span) -> Iterator[tuple[int, Span]]:
    """The number of each chunk with any of `pages` of one layer, and which pages it has."""
    size = _chunk_pages(layout, step)
    for number in range(pages.start // size, -(-pages.stop // size)):
        yield number, Span(number * size, min((number + 1) * size, layout.num_pages))


# The head.


def head_of(record: Record) -> bytes:
    """Prefix and header; its size does not depend on the checksums' values."""
    header = _encoder.encode(record)
    return _PREFIX.pack(_MAGIC, len(header), checksum(header)) + header


def _head_bytes(head: bytes, num_bytes: int) -> int:
    """Size of prefix and header; 0 where the prefix is no entry's, or says what cannot be."""
    if len(head) < _PREFIX.size:
        return 0
    magic, header_bytes, _ = _PREFIX.unpack_from(head)
    size: int = _PREFIX.size + header_bytes
    return size if magic == _MAGIC and size <= min(num_bytes, _MAX_HEADER_BYTES) else 0


def _is_whole(record: Record, family: Family, payload_bytes: int) -> bool:
    """Whether it is an entry of this family, with so much behind it."""
    layers = record.layout.e_layers
    return (
        record.family == family.digest
        and len(record.pages) > 0
        and (record.parent is None) == (record.num_before == 0)
        and all(0 <= layer < family.num_layers for layer in layers)
        and all(a < b for a, b in itertools.pairwise(layers))
        and record.layout == Layout.of(family, len(record.pages), layers)
        and record.layout.num_bytes == payload_bytes
        and tuple(map(len, record.checksums)) == tuple(map(len, _no_checksums(record.layout)))
    )


@lru_cache
def _no_checksums(layout: Layout) -> tuple[bytes, ...]:
    """Zeros in place of those of each step."""
    nums = [-(-layout.num_pages // _chunk_pages(layout, step)) for step in layout.steps]
    return tuple([bytes(_CHECKSUM_BYTES * num) for num in nums])


def _read(handle: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < into.nbytes:
        num = os.preadv(handle, [into[done:]], offset + done)
        if not num:
            raise OSError("the file ends early")
        done += num


def _write(handle: int, parts: Sequence[memoryview], offset: int) -> None:
    """All of the parts; a write may stop short, at the latest after 2 GiB."""
    left = [part for part in parts if part.nbytes]
    while left:
        num = os.pwritev(handle, left, offset)
        offset += num
        while left and num >= left[0].nbytes:
            num -= left[0].nbytes
            del left[0]
        if num:
            left[0] = left[0][num:]
