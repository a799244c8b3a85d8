"""One segment file: records after a short header, the last of them perhaps torn."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cachetree.checkpoint import Family
from cachetree.disk import record as records
from cachetree.disk.directory import FILE_MODE
from cachetree.disk.record import CHUNK_BYTES, Chunks, Record
from cachetree.ids import Span, Step
from cachetree.memory import checksum, checksum_of_parts

Views = Callable[[Step], Sequence[memoryview]]
"""All pages of a step, in order, in as many runs of bytes as they lie in.

It is called for every step, and once more before the entry counts; it raises where the bytes have
been taken away, and what was written is cut off."""

_MAGIC: Final = b"ctree-s1"
_MAX_PARTS: Final = 512
"""Of one `writev`; the kernel takes 1024."""
_COPY_BYTES: Final = 1 << 20


class Segment:
    """A file, and who uses it. The store's lock guards all that changes here but the file."""

    def __init__(self, path: Path, number: int, marker: bytes) -> None:
        self.path: Final = path
        self.number: Final = number
        self.marker: Final = marker
        self.num_bytes = 0
        """Of the file, a write under way not included."""
        self.num_live_bytes = 0
        self.num_readers = 0
        self.is_doomed = False
        """To be deleted when the last reader has left."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies."""

    segment: Segment
    start: int
    payload: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


SEGMENT_HEADER_BYTES: Final = len(_MAGIC) + 16


class Appender:
    """Writes at the end of one segment; used by one thread at a time. Raises OSError.

    A write that fails is cut off again, so that the next one begins where it began.
    """

    def __init__(self, segment: Segment, is_synced: bool) -> None:
        self.segment: Final = segment
        self._is_synced = is_synced
        flags = os.O_WRONLY | os.O_CLOEXEC | (0 if segment.num_bytes else os.O_CREAT | os.O_EXCL)
        self._handle = os.open(segment.path, flags, FILE_MODE)
        if not segment.num_bytes:
            try:
                _write(self._handle, [memoryview(_MAGIC + segment.marker)], 0)
            except OSError:
                self.close()
                raise
            segment.num_bytes = SEGMENT_HEADER_BYTES

    @property
    def is_there(self) -> bool:
        """Whether the file still has a name."""
        return os.fstat(self._handle).st_nlink > 0

    def append(self, new: Record, views: Views) -> tuple[Record, Place]:
        """Write an entry, whose checksums are computed on the way; returns it with them."""
        chunks = Chunks(new.layout)
        blank = replace(new, checksums=bytes(8 * chunks.num))
        start = self.segment.num_bytes
        payload = start + len(blank.head(self.segment.marker))
        place = Place(
            self.segment, start, payload, payload + new.layout.num_bytes + records.TRAILER_BYTES
        )
        try:
            made = replace(new, checksums=self._write_payload(chunks, views, payload))
            head = made.head(self.segment.marker)
            _write(self._handle, [memoryview(head)], start)
            views(next(chunks.steps))
            self._commit(place, head)
        except BaseException:
            os.ftruncate(self._handle, start)
            raise
        return made, place

    def copy(self, record: Record, place: Place) -> Place:
        """Write a record that lies elsewhere; its payload goes unread, as the checksums go too."""
        start = self.segment.num_bytes
        moved = start - place.start
        to = Place(self.segment, start, place.payload + moved, place.stop + moved)
        head = record.head(self.segment.marker)
        payload = Span(place.payload, place.payload + record.layout.num_bytes)
        buffer = memoryview(bytearray(min(_COPY_BYTES, len(payload))))
        try:
            with _opened(place.segment) as source:
                for at in range(payload.start, payload.stop, _COPY_BYTES):
                    part = buffer[: payload.stop - at]
                    _read(source, part, at)
                    _write(self._handle, [part], at + moved)
            _write(self._handle, [memoryview(head)], start)
            self._commit(to, head)
        except BaseException:
            os.ftruncate(self._handle, start)
            raise
        return to

    def close(self) -> None:
        os.close(self._handle)

    def _write_payload(self, chunks: Chunks, views: Views, offset: int) -> bytes:
        values: list[int] = []
        batch: list[memoryview] = []
        num_bytes = 0
        everything = Span(0, chunks.layout.num_pages)
        for step in chunks.steps:
            whole = views(step)
            of_step = chunks.layout.range_of(step, everything)
            num_given = sum(view.nbytes for view in whole)
            if num_given != len(of_step):
                raise ValueError(f"{step} has {num_given} bytes where {len(of_step)} belong")
            for chunk in chunks.of(step, everything):
                parts = cut(
                    whole, Span(chunk.bytes.start - of_step.start, chunk.bytes.stop - of_step.start)
                )
                values.append(checksum_of_parts(parts))
                batch += parts
                num_bytes += len(chunk.bytes)
                if num_bytes >= CHUNK_BYTES or len(batch) > _MAX_PARTS:
                    _write(self._handle, batch, offset)
                    offset += num_bytes
                    batch, num_bytes = [], 0
        _write(self._handle, batch, offset)
        return records.pack_checksums(values)

    def _commit(self, place: Place, head: bytes) -> None:
        if self._is_synced:
            os.fdatasync(self._handle)
        at = place.stop - records.TRAILER_BYTES
        _write(self._handle, [memoryview(records.trailer(head))], at)
        if self._is_synced:
            os.fdatasync(self._handle)
        self.segment.num_bytes = place.stop


def cut(views: Sequence[memoryview], span: Span) -> list[memoryview]:
    """These bytes of the views as if they were one."""
    parts: list[memoryview] = []
    start = 0
    for view in views:
        part = Span(start, start + view.nbytes).intersection(span)
        if len(part):
            parts.append(view[part.start - start : part.stop - start])
        start += view.nbytes
    return parts


def part_of(views: Views, num_pages: int, pages: Span) -> Views:
    """The views of some of the pages."""

    def part(step: Step) -> Sequence[memoryview]:
        whole = [view.cast("B") for view in views(step)]
        page_bytes = sum(view.nbytes for view in whole) // num_pages
        return cut(whole, Span(pages.start * page_bytes, pages.stop * page_bytes))

    return part


def bury(place: Place) -> None:
    """Make a record not count from now on. Raises OSError."""
    with _opened(place.segment, os.O_WRONLY) as handle:
        at = place.stop - records.TRAILER_BYTES
        _write(handle, [memoryview(records.BURIED)], at)


def read_pages(place: Place, record: Record, step: Step, pages: Span, into: memoryview) -> None:
    """Fill `into` with verified bytes; raises OSError, and leaves it undefined, where it cannot."""
    chunks = Chunks(record.layout)
    wanted = record.layout.range_of(step, pages)
    with _opened(place.segment) as handle:
        for chunk in chunks.of(step, pages):
            part = chunk.bytes.intersection(wanted)
            to = into[part.start - wanted.start : part.stop - wanted.start]
            is_whole = part == chunk.bytes
            read = to if is_whole else memoryview(bytearray(len(chunk.bytes)))
            _read(handle, read, place.payload + chunk.bytes.start)
            if checksum(read) != record.expects(chunk):
                raise OSError("the bytes do not have the checksum that they were written with")
            if not is_whole:
                to[:] = read[part.start - chunk.bytes.start : part.stop - chunk.bytes.start]


@dataclass(slots=True)
class Scan:
    """What a segment file was found to hold."""

    found: list[tuple[Record, Place]]
    """Committed and not buried."""
    num_damaged: int = 0
    """Records that were passed over."""
    stop: int = 0
    """What comes after is a write that never ended; 0 where the file is none of ours."""


def scan(segment: Segment, num_bytes: int, family: Family) -> Scan:
    """Read the heads and trailers of a file, but no payloads. Raises OSError."""
    result = Scan([])
    with _opened(segment) as handle:
        if os.pread(handle, SEGMENT_HEADER_BYTES, 0) != _MAGIC + segment.marker:
            return result
        at = result.stop = SEGMENT_HEADER_BYTES
        num_passed = 0
        while at < num_bytes:
            size = _scan_record(segment, handle, Span(at, num_bytes), family, result)
            if size:
                # What was passed over was no torn tail, as more came after it.
                result.num_damaged += num_passed
                num_passed = 0
                at = result.stop = at + size
            else:
                num_passed += 1
                at = _next_record(handle, Span(at + 1, num_bytes), segment.marker)
    return result


def _scan_record(segment: Segment, handle: int, rest: Span, family: Family, result: Scan) -> int:
    """Bytes of the record at the start of `rest`, taken down; 0 where there is none."""
    start = rest.start
    prefix = os.pread(handle, records.PREFIX_BYTES, start)
    sizes = records.sizes_of(prefix, segment.marker)
    if sizes is None:
        return 0
    payload = start + records.PREFIX_BYTES + sizes[0]
    place = Place(segment, start, payload, payload + sizes[1] + records.TRAILER_BYTES)
    if place.stop > rest.stop:
        return 0
    head = os.pread(handle, payload - start, start)
    record = records.read_head(head, family)
    if record is None:
        return 0
    end = os.pread(handle, records.TRAILER_BYTES, place.stop - records.TRAILER_BYTES)
    if records.is_trailer(end, head):
        result.found.append((record, place))
    elif not records.is_trailer(end, head, records.BURIED):
        return 0
    return place.num_bytes


def _next_record(handle: int, rest: Span, marker: bytes) -> int:
    """Where the marker comes next; the end of `rest` where it does not."""
    at = rest.start
    while at < rest.stop:
        part = os.pread(handle, min(_COPY_BYTES, rest.stop - at), at)
        found = part.find(marker)
        if found >= 0:
            return at + found
        if len(part) < len(marker):
            break
        at += len(part) - len(marker) + 1
    return rest.stop


class _opened:
    """A file handle for the length of a `with`."""

    def __init__(self, segment: Segment, flags: int = os.O_RDONLY) -> None:
        self._path = segment.path
        self._flags = flags
        self._handle = -1

    def __enter__(self) -> int:
        self._handle = os.open(self._path, self._flags | os.O_CLOEXEC)
        return self._handle

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


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
