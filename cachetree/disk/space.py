"""The files of a store, how many bytes they take, and which of them may go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from cachetree.disk.config import DiskConfig
from cachetree.disk.directory import Directory
from cachetree.disk.segment import SEGMENT_HEADER_BYTES, Appender, Segment

log = logging.getLogger(__name__)

_Written = TypeVar("_Written")


class Space:
    """Segments within a budget. `changed` guards all of it; one thread at a time appends."""

    def __init__(self, directory: Directory, config: DiskConfig) -> None:
        self.changed: Final = threading.Condition()
        self.num_bytes = directory.num_bytes
        """Of all files, those that are to go and the write under way included."""
        self.segments: Final[dict[int, Segment]] = {}
        self._directory = directory
        self._config = config
        self._appender: Appender | None = None
        self._num_doomed_bytes = 0
        # Rises for good, so that no late reader takes a new file for an old one.
        self._newest = 0

    # With the lock held.

    def adopt(self, segment: Segment) -> None:
        """Count a file that is there already."""
        self.segments[segment.number] = segment
        self.num_bytes += segment.num_bytes
        self._newest = max(self._newest, segment.number)

    def has_room(self, num_bytes: int) -> bool:
        """For new entries: all but one segment's bytes, which copies need."""
        limit = self._config.num_bytes - self._config.max_segment_bytes
        return self.num_bytes + num_bytes <= limit

    def will_have_room(self, num_bytes: int) -> bool:
        """Once the last readers of the files that are to go have left."""
        return self.has_room(num_bytes - self._num_doomed_bytes)

    def deadest(self) -> Segment | None:
        """The file with the fewest live bytes; the newest only where there is no other."""
        there = [it for it in self.segments.values() if not it.is_doomed]
        others = [it for it in there if it.number != self._newest]
        return min(others or there, key=lambda it: (it.num_live_bytes, it.number), default=None)

    def is_worth_emptying(self, segment: Segment) -> bool:
        """Whether copying what lives in it fits, and costs at most what it gives back."""
        if segment.number == self._newest:
            return False
        live = segment.num_live_bytes
        # Two files that follow each other hold more than one full file.
        num_new = 2 + 2 * live // self._config.max_segment_bytes
        room = self._config.num_bytes - self.num_bytes
        # Files beyond a budget that was made smaller are emptied one by one while opening.
        is_fitting = room < 0 or live + num_new * SEGMENT_HEADER_BYTES <= room
        return 2 * live <= segment.num_bytes and is_fitting

    # Without it.

    @contextmanager
    def pinned(self, segment: Segment) -> Iterator[None]:
        """For a reader, which has counted itself in under the lock; counts it out."""
        try:
            yield
        finally:
            with self.changed:
                segment.num_readers -= 1
                is_last = segment.is_doomed and not segment.num_readers
            if is_last:
                self._unlink(segment)

    def append(self, most_bytes: int, write: Callable[[Appender], _Written]) -> _Written:
        """Let `write` put a record of at most so many bytes at the end; raises OSError."""
        appender = self._appender_for(most_bytes)
        segment = appender.segment
        before = segment.num_bytes
        with self.changed:
            self.num_bytes += most_bytes
        try:
            return write(appender)
        except OSError:
            # Cut off as a rule; if that failed too, the next record comes after what is left.
            self.seal()
            segment.num_bytes = segment.path.stat().st_size
            raise
        finally:
            with self.changed:
                self.num_bytes += segment.num_bytes - before - most_bytes

    def seal(self) -> None:
        """Append no more to the newest file."""
        if self._appender is not None:
            self._appender.close()
            self._appender = None

    def delete(self, segment: Segment) -> None:
        """Now, or when its last reader has left."""
        if self._appender is not None and self._appender.segment is segment:
            self.seal()
        with self.changed:
            segment.is_doomed = True
            self._num_doomed_bytes += segment.num_bytes
            is_unused = not segment.num_readers
        if is_unused:
            self._unlink(segment)

    def _appender_for(self, most_bytes: int) -> Appender:
        limit = self._config.max_segment_bytes
        if self._appender is not None and not self._appender.is_there:
            self.delete(self._appender.segment)
        segment = self.segments.get(self._newest)
        if segment is None or segment.is_doomed or segment.num_bytes + most_bytes > limit:
            self.seal()
            return self._begin_segment()
        if self._appender is None:
            self._appender = Appender(segment, self._config.sync)
        return self._appender

    def _begin_segment(self) -> Appender:
        number = self._newest + 1
        segment = Segment(self._directory.segment_path(number), number, self._directory.marker)
        with self.changed:
            self.adopt(segment)
            self.num_bytes += SEGMENT_HEADER_BYTES
        try:
            self._appender = Appender(segment, self._config.sync)
        except OSError:
            self.delete(segment)
            raise
        finally:
            with self.changed:
                self.num_bytes += segment.num_bytes - SEGMENT_HEADER_BYTES
        if self._config.sync:
            self._directory.sync()
        return self._appender

    def _unlink(self, segment: Segment) -> None:
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as exc:
            # Its bytes stay counted, as they stay on the disk.
            log.warning("%s cannot be deleted: %s", segment.path, exc)
            with self.changed:
                self._num_doomed_bytes -= segment.num_bytes
            return
        with self.changed:
            del self.segments[segment.number]
            self.num_bytes -= segment.num_bytes
            self._num_doomed_bytes -= segment.num_bytes
            self.changed.notify_all()
