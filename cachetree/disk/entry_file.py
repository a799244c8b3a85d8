"""One entry as a file: what lies where, written whole or not at all, read a layer at a time.

    prefix     magic, size and checksum of the header
    header     msgpack: a `Record`
    checksums  XXH3-64 of each page of each step, in the order of the payload
    payload    the steps of its part, one after the other; of each all pages in order

Where a layer lies follows from the layout, counted from the end, and each page of it has a
checksum, so that any pages of it are read alone.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
from xxhash import xxh3_64_digest

from cachetree.checkpoint import Family
from cachetree.disk.directory import FORMAT
from cachetree.errors import UNREADABLE
from cachetree.ids import KV, PAGE_HASH_BYTES, ModelId, PageHash, Part, Span, Step, steps_of
from cachetree.memory import Layout, checksum, index_of
from cachetree.tree import Change

Views = Callable[[Step, Span], Sequence[memoryview]]
"""These pages of a step, in order, in as many runs of whole pages as they lie in; as `Lease.views`.

It is called for every step, and once more before the entry counts; it raises where the bytes have
been taken away, and what was written is removed."""

MAX_FILE_BYTES: Final = 64 << 20
"""Entries that are longer are cut."""
_PIECE_BYTES: Final = 256 << 10
"""Fits the second-level cache, so that bytes are checked where the copy left them."""

_MAGIC: Final = b"ctree-e%d" % FORMAT
_PREFIX: Final = struct.Struct("<8sQQ")
_CHECKSUM_BYTES: Final = 8
_MAX_HEAD_BYTES: Final = MAX_FILE_BYTES
"""What a damaged file can have allocated."""

Page = Annotated[PageHash, msgspec.Meta(min_length=PAGE_HASH_BYTES, max_length=PAGE_HASH_BYTES)]


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An entry without its payload and checksums."""

    family: str
    """Its digest."""
    model: ModelId
    part: Part
    num_before: Annotated[int, msgspec.Meta(ge=0)]
    """How many pages stand before the first."""
    parent: Page | None
    """The last of these; None at the root."""
    pages: tuple[Page, ...]

    @property
    def change(self) -> Change:
        """Its pages come."""
        return Change(
            added=True, model=self.model, part=self.part, parent=self.parent, pages=self.pages
        )

    @property
    def key(self) -> str:
        """Names its file: pages that were published twice are one file. A page hash covers all
        pages before it, so two of them say which pages these are."""
        body = f"{self.model} {self.part} ".encode() + self.pages[0] + self.pages[-1]
        return sha256(body).hexdigest()[:32]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def page_bytes_of(layout: Layout) -> int:
    """What each page takes in a file, where its head does not count."""
    return layout.page_bytes + _CHECKSUM_BYTES * layout.num_steps + PAGE_HASH_BYTES + 2


def size_of(record: Record, layout: Layout) -> int:
    """Bytes of its file."""
    return len(head_of(record)) + _checksums_bytes(layout) + layout.num_bytes


# Reading.


def read_record(path: str, family: Family) -> tuple[Record, os.stat_result] | None:
    """What a file holds; None where it is torn, damaged or another's. Raises OSError."""
    with BufferedReader(FileIO(path)) as file:
        stat = os.fstat(file.fileno())
        num_bytes = stat.st_size
        head = file.read(_PREFIX.size)
        head += file.read(max(0, _head_bytes(head, num_bytes) - len(head)))
    record = read_head(head, num_bytes, family)
    return (record, stat) if record is not None and path.endswith(record.key) else None


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


def read_pages(path: Path, layout: Layout, step: Step, pages: Span, into: memoryview) -> None:
    """Fill `into` with verified bytes; raises OSError, and leaves it undefined, where it cannot."""
    index, page_bytes = index_of(step), layout.step_bytes
    found = bytearray()
    with path.open("rb") as file:
        payload = file.seek(0, os.SEEK_END) - layout.num_bytes
        first = payload - _checksums_bytes(layout)
        before = index * layout.num_pages + pages.start
        file.seek(first + _CHECKSUM_BYTES * before)
        expected = file.read(_CHECKSUM_BYTES * len(pages))
        file.seek(payload + before * page_bytes)
        for piece in _pieces([into], page_bytes):
            if file.readinto(piece) < piece.nbytes:
                raise OSError("the file ends early")
            found += _checksums(piece, page_bytes)
    if found != expected:
        raise OSError("the bytes do not have the checksum that they were written with")


# Writing.


def write_record(file: BinaryIO, record: Record, layout: Layout, views: Views, pages: Span) -> None:
    """Write an entry, whose pages are these of those that there are views of.

    Raises OSError, and whatever `views` raises.
    """
    head, page_bytes = head_of(record), layout.step_bytes
    steps = steps_of(record.part, layout.num_steps)
    checksums = bytearray()
    file.seek(len(head) + _checksums_bytes(layout))
    for step in steps:
        whole = views(step, pages)
        num_given, num_due = sum(view.nbytes for view in whole), layout.num_pages * page_bytes
        if num_given != num_due:
            raise ValueError(f"{step} has {num_given} bytes where {num_due} belong")
        for piece in _pieces(whole, page_bytes):
            checksums += _checksums(piece, page_bytes)
            file.write(piece)
    file.seek(0)
    file.write(head)
    file.write(checksums)
    views(steps[0], pages)


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
    return _CHECKSUM_BYTES * layout.num_pages * layout.num_steps


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
    layout = Layout.of(family, len(record.pages), record.part)
    return (
        record.family == family.digest
        and len(record.pages) > 0
        and (record.parent is None) == (record.num_before == 0)
        and KV <= record.part < family.num_layers
        and _checksums_bytes(layout) + layout.num_bytes == rest_bytes
    )
