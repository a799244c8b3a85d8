"""`slru`: what has been used once goes before what has been used again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from cachetree.eviction.chain import Queue

if TYPE_CHECKING:
    from cachetree.entries import LocalEntry

_PROTECTED_SHARE: Final = 0.8


class SegmentedLru:
    """Segmented LRU (Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance,
    IEEE Computer 27(3), 1994).

    A new entry is on probation; a use takes it to the protected segment. What that segment has no
    room for goes back on probation, the least recently used first, and so do evictions. A flood of
    prompts that never come again passes through probation and leaves the other segment alone.
    """

    def __init__(self, host_bytes: int) -> None:
        self._probation, self._protected = Queue(), Queue()
        self._max_protected_bytes = int(_PROTECTED_SHARE * host_bytes)

    def add(self, entries: Sequence[LocalEntry]) -> None:
        for entry in entries:
            entry.queue = self._probation
        self._probation.append(entries[-1])

    def use(self, entries: Iterable[LocalEntry]) -> None:
        for entry in entries:
            self._take_out(entry)
            self._protected.append(entry)
        while self._protected.num_bytes > self._max_protected_bytes:
            oldest = self._protected.oldest
            assert oldest is not None
            self._protected.take_out(oldest)
            self._probation.append(oldest)

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        _queue(head).split(head, tail)

    def remove(self, entry: LocalEntry) -> None:
        self._take_out(entry)
        parent = entry.parent
        if parent is not None and parent.is_evictable:
            self.free(parent)

    def free(self, entry: LocalEntry) -> None:
        queue = _queue(entry)
        if not queue.has(entry):
            queue.put_back(entry)

    def victims(self) -> Iterator[LocalEntry]:
        while entry := self._probation.oldest or self._protected.oldest:
            if entry.is_evictable:
                yield entry
            else:
                self._take_out(entry)

    def _take_out(self, entry: LocalEntry) -> None:
        _queue(entry).take_out(entry)


def _queue(entry: LocalEntry) -> Queue:
    assert entry.queue is not None
    return entry.queue
