"""`s3fifo`: most new entries are never used, so they go early and cheaply."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from cachetree.eviction.chain import Queue
from cachetree.ids import ModelId, PageHash

if TYPE_CHECKING:
    from cachetree.entries import LocalEntry

_SMALL_SHARE: Final = 0.1
_MAX_HITS: Final = 3
_HITS_TO_STAY: Final = 2


class S3Fifo:
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: FIFO queues are all you need for cache eviction,
    SOSP '23), with the paper's parameters.

    small   new entries, a tenth of the budget. At its end an entry with two uses or more moves to
            the main queue; others are evicted and remembered as ghosts
    main    at its end an entry with a use left begins again with one less; others are evicted
    ghosts  names of as many bytes as the main queue may hold; an entry that comes back while it is
            remembered goes to the main queue at once

    Its names are those of the first page of an entry, because a prompt that comes back after it was
    evicted begins anew with the page that was missing first.
    """

    def __init__(self, host_bytes: int) -> None:
        self._small, self._main = Queue(), Queue()
        self._small_bytes = int(_SMALL_SHARE * host_bytes)
        self._ghosts: OrderedDict[tuple[ModelId, PageHash], int] = OrderedDict()
        self._num_ghost_bytes = 0
        self._max_ghost_bytes = host_bytes - self._small_bytes

    def add(self, entries: Sequence[LocalEntry]) -> None:
        queue = self._main if self._forget(_name(entries[0])) else self._small
        for entry in entries:
            entry.queue = queue
        queue.append(entries[-1])

    def use(self, entries: Iterable[LocalEntry]) -> None:
        for entry in entries:
            entry.hits = min(entry.hits + 1, _MAX_HITS)

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        tail.hits, head.hits = head.hits, 0.0
        assert head.queue is not None
        head.queue.split(head, tail)

    def remove(self, entry: LocalEntry) -> None:
        assert entry.queue is not None
        entry.queue.take_out(entry)
        if entry.queue is self._small:
            self._remember(entry)
        parent = entry.parent
        if parent is not None:
            parent.hits = min(parent.hits + entry.hits, _MAX_HITS)
            if parent.is_evictable:
                self.free(parent)

    def free(self, entry: LocalEntry) -> None:
        assert entry.queue is not None
        if not entry.queue.has(entry):
            entry.queue.put_back(entry)

    def victims(self) -> Iterator[LocalEntry]:
        small, main = self._small, self._main
        while small.oldest or main.oldest:
            if small.oldest and (small.num_bytes >= self._small_bytes or not main.oldest):
                entry, left = small.oldest, 0.0
                stays = entry.hits >= _HITS_TO_STAY
            else:
                assert main.oldest is not None
                entry, left = main.oldest, main.oldest.hits - 1
                stays = entry.hits > 0
            if not stays and entry.is_evictable:
                yield entry
                continue
            assert entry.queue is not None
            entry.queue.take_out(entry)
            if stays:
                entry.hits = left
                main.append(entry)

    def _remember(self, entry: LocalEntry) -> None:
        self._forget(_name(entry))
        self._ghosts[_name(entry)] = entry.num_bytes
        self._num_ghost_bytes += entry.num_bytes
        while self._num_ghost_bytes > self._max_ghost_bytes:
            self._num_ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def _forget(self, name: tuple[ModelId, PageHash]) -> bool:
        """Whether it was remembered."""
        num_bytes = self._ghosts.pop(name, None)
        self._num_ghost_bytes -= num_bytes or 0
        return num_bytes is not None


def _name(entry: LocalEntry) -> tuple[ModelId, PageHash]:
    return entry.model, entry.node.first_page
