"""One entry as a file: written completely or not at all, read a layer at a time.

    prefix     magic, size and checksum of the header
    header     msgpack: a `Record`
    checksums  XXH3-64 of each page of each transfer step, in the order of the payload
    payload    the transfer steps of the entry, in order, each with all pages in order

The record tells the place of each layer, counted from the file's end. Each page of a layer has a
checksum, so a reader can verify it without the other pages.
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
"""Function like `Lease.views`: it returns pages of a transfer step, in order, in runs of whole
pages.

`write_record` calls it for every step, and once more at the end. It raises an error if the bytes
are no longer in memory; the unfinished file is then deleted.
"""

MAX_FILE_BYTES: Final = 64 << 20
"""Largest number of bytes of a file. Larger entries are cut into several files."""
_PIECE_BYTES: Final = 256 << 10
"""Number of bytes that are read or written, and checked, in one piece. A piece fits a core's
second-level cache."""

_MAGIC: Final = b"ctree-e%d" % FORMAT
_PREFIX: Final = struct.Struct("<8sQQ")
_CHECKSUM_BYTES: Final = 8
_MAX_HEAD_BYTES: Final = MAX_FILE_BYTES
"""Largest size of prefix and header, so that a damaged file makes no reader allocate more."""

Page = Annotated[PageHash, msgspec.Meta(min_length=PAGE_HASH_BYTES, max_length=PAGE_HASH_BYTES)]


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Description of an entry: everything except its payload and checksums."""

    family: str
    """Digest of the family."""
    model: ModelId
    part: Part
    num_before: Annotated[int, msgspec.Meta(ge=0)]
    """Number of the prompt's pages before the first page of this file."""
    parent: Page | None
    """Page before the first page of this file; None if the file begins the prompt."""
    pages: tuple[Page, ...]

    @property
    def change(self) -> Change:
        """Return the change that adds the record's pages to a tree."""
        return Change(
            added=True, model=self.model, part=self.part, parent=self.parent, pages=self.pages
        )

    @property
    def key(self) -> str:
        """Name of the record's file. It is made from the first and the last page hash. A page hash
        covers all pages before it, so these two identify all pages of the file. Pages that were
        published twice are in one file."""
        body = f"{self.model} {self.part} ".encode() + self.pages[0] + self.pages[-1]
        return sha256(body).hexdigest()[:32]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def page_bytes_of(layout: Layout) -> int:
    """Return the bytes that each page adds to a file: payload, checksums and page hash."""
    return layout.page_bytes + _CHECKSUM_BYTES * layout.num_steps + PAGE_HASH_BYTES + 2


def size_of(record: Record, layout: Layout) -> int:
    """Bytes of the record's file."""
    return len(head_of(record)) + _checksums_bytes(layout) + layout.num_bytes


# Reading.


def read_record(path: str, family: Family) -> tuple[Record, os.stat_result] | None:
    """Read a file's record. None if the file is incomplete, damaged or of another family. Raises
    OSError."""
    with BufferedReader(FileIO(path)) as file:
        stat = os.fstat(file.fileno())
        num_bytes = stat.st_size
        head = file.read(_PREFIX.size)
        head += file.read(max(0, _head_bytes(head, num_bytes) - len(head)))
    record = read_head(head, num_bytes, family)
    return (record, stat) if record is not None and path.endswith(record.key) else None


def read_head(head: bytes, num_bytes: int, family: Family) -> Record | None:
    """Read the record in `head`: the prefix and header of a file of `num_bytes`.

    Returns None if `head` is damaged, or does not fit the file's size or the family.
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
    """Read pages of a transfer step into `into`, and verify them. Raises OSError if that fails; the
    content of `into` is then undefined."""
    index, page_bytes = index_of(step), layout.step_bytes
    checksums = bytearray()
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
            checksums += _checksums(piece, page_bytes)
    if checksums != expected:
        raise OSError("the bytes do not have the checksum that they were written with")


# Writing.


def write_record(file: BinaryIO, record: Record, layout: Layout, views: Views, pages: Span) -> None:
    """Write the entry of `record` to `file`. `views` is called with `pages`, the entry's span.

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
    """Cut the views into pieces. Views and pieces consist of whole pages."""
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
    """Encode prefix and header of a record."""
    header = _encoder.encode(record)
    return _PREFIX.pack(_MAGIC, len(header), checksum(header)) + header


def _head_bytes(head: bytes, num_bytes: int) -> int:
    """Return the size of prefix and header. Returns 0 if this is not the prefix of an entry, or if
    it states an impossible size."""
    if len(head) < _PREFIX.size:
        return 0
    magic, header_bytes, _ = _PREFIX.unpack_from(head)
    size: int = _PREFIX.size + header_bytes
    return size if magic == _MAGIC and size <= min(num_bytes, _MAX_HEAD_BYTES) else 0


def _is_whole(record: Record, family: Family, rest_bytes: int) -> bool:
    """Return whether the record is valid and of this family, and its file has `rest_bytes` after
    the header."""
    layout = Layout.of(family, len(record.pages), record.part)
    return (
        record.family == family.digest
        and len(record.pages) > 0
        and (record.parent is None) == (record.num_before == 0)
        and KV <= record.part < family.num_layers
        and _checksums_bytes(layout) + layout.num_bytes == rest_bytes
    )
