"""Which local entry goes next: `lru` or `value`, and with a time to live what goes unasked.

The disk store below the tree keeps to LRU: what it moves between its files follows the order of
use, whatever memory does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf, log2
from operator import attrgetter
from typing import Final

import msgspec

from cachetree.checkpoint import Family
from cachetree.clock import Clock
from cachetree.errors import ConfigError
from cachetree.planning import PrefillCost
from cachetree.tree.entries import LocalEntry

POLICIES: Final = ("lru", "value")

HALF_LIFE: Final = 0.25
"""After this share of the budget has come in, a use counts half. Where it is longer, what was read
by many while their task lasted outstays the task: on the shipped multi-agent trace and 64 GiB, a
half-life of one budget saves two thirds as much."""

_SLACK: Final = 64

_Item = tuple[float, int, LocalEntry]
"""A key, which of all it is, and whose."""


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What leaves memory first, what leaves it unasked, and how much may be kept in it by force."""

    eviction: str = "lru"
    """Which entries in memory make room for new ones: one of `POLICIES`. The disk keeps to LRU."""
    ttl_s: float | None = None
    """Entries in memory that nobody has used for so long go at the next sweep, which comes with
    every new entry; None keeps them until room is needed."""
    max_pinned_share: float = 0.5
    """Of the budget of memory, how much pins may keep at once."""

    def __post_init__(self) -> None:
        if self.eviction not in POLICIES:
            raise ConfigError(f"eviction is {self.eviction!r}; give one of {', '.join(POLICIES)}")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"ttl_s is {self.ttl_s}; give a positive number, or leave it out")
        if not 0 <= self.max_pinned_share <= 1:
            raise ConfigError(f"max_pinned_share is {self.max_pinned_share}; give 0 to 1")


class _Order:
    """Entries that may go, those with the least key first.

    A use only ever raises a key, and costs nothing here: an entry that comes first with a key that
    is no longer its own goes back under the right one. One that comes first while it has children
    or is held is left out, until it is put in again. So no search meets the same obstacle twice.

    Most come with the largest key so far, and wait in a line. With all in one heap, whose depth is
    walked for each that leaves it, an eviction takes a fifth longer.
    """

    def __init__(self, key: Callable[[LocalEntry], float]) -> None:
        self._key = key
        self._queued: dict[LocalEntry, float] = {}
        """The key under which each one lies below; what lies there under another is void."""
        self._line: deque[_Item] = deque()
        self._heap: list[_Item] = []
        self._num_put = 0

    def put(self, entry: LocalEntry) -> None:
        key = self._key(entry)
        if self._queued.get(entry, inf) > key:
            self._queued[entry] = key
            self._num_put += 1
            item = key, self._num_put, entry
            if not self._line or self._line[-1] < item:
                self._line.append(item)
            else:
                heappush(self._heap, item)

    def discard(self, entry: LocalEntry) -> None:
        queued = self._queued
        queued.pop(entry, None)
        if len(self._heap) + len(self._line) > 2 * len(queued) + _SLACK:
            # In lists: calls would take three times as long, with the lock of the tree held.
            self._line = deque([it for it in self._line if queued.get(it[2]) == it[0]])
            self._heap = [it for it in self._heap if queued.get(it[2]) == it[0]]
            heapify(self._heap)

    def victims(self) -> Iterator[LocalEntry]:
        """Those that may go now; each is discarded before the next is asked for."""
        while self._line or self._heap:
            line, heap = self._line, self._heap
            is_in_line = bool(line) and (not heap or line[0] < heap[0])
            key, _, entry = line[0] if is_in_line else heap[0]
            is_valid = self._queued.get(entry) == key
            if is_valid and entry.is_evictable and self._key(entry) == key:
                yield entry
                continue
            if is_in_line:
                line.popleft()
            else:
                heappop(heap)
            if is_valid:
                del self._queued[entry]
                if entry.is_evictable:
                    self.put(entry)


class Eviction(ABC):
    """A policy, and with a time to live the age of entries. The tree calls it under its lock.

    A walk is noted at the entry where it ended only, and counts for all above that one too. It need
    not be noted there: eviction is leaf first, so an entry's turn comes when the last one below it
    has gone, which leaves it what it knew of uses.
    """

    def __init__(self, ttl_s: float | None, clock: Clock) -> None:
        self.ttl_s: Final = ttl_s
        self._clock = clock
        self._by_key = _Order(self.key)
        self._by_age = _Order(attrgetter("used_at_s"))
        self._orders = (self._by_key,) if ttl_s is None else (self._by_key, self._by_age)

    @abstractmethod
    def key(self, entry: LocalEntry) -> float:
        """The least goes first."""

    @abstractmethod
    def _use(self, entries: Iterable[LocalEntry]) -> None: ...

    @abstractmethod
    def _sum(self, uses: float, others: float) -> float:
        """What is known of both together; -inf where that is nothing."""

    def add(self, entries: Sequence[LocalEntry]) -> None:
        """New entries of one path, top first; the last one has been used."""
        self.use(entries[-1:])
        self.free(entries[-1])

    def use(self, entries: Collection[LocalEntry]) -> None:
        """Walks ended at these, all at once."""
        self._use(entries)
        if self.ttl_s is not None:
            now_s = self._clock()
            for entry in entries:
                entry.used_at_s = now_s

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        """`head` has been cut in two; `tail` is new and has its children, and takes its uses.

        If `tail` may go, `free` says so next.
        """
        tail.uses, head.uses = head.uses, -inf
        tail.used_at_s = head.used_at_s

    def free(self, entry: LocalEntry) -> None:
        """This one may go now: nobody holds it any more, or it was cut off one that is held."""
        for order in self._orders:
            order.put(entry)

    def remove(self, entry: LocalEntry, parent: LocalEntry | None) -> None:
        """An entry without children goes, and leaves what is known of its uses to the one above it,
        which may be next."""
        for order in self._orders:
            order.discard(entry)
        if parent is not None:
            parent.uses = self._sum(parent.uses, entry.uses)
            parent.used_at_s = max(parent.used_at_s, entry.used_at_s)
            if parent.is_evictable:
                self.free(parent)

    def victims(self) -> Iterator[LocalEntry]:
        """Evictable entries, those to go first first; each is removed before the next is asked."""
        return self._by_key.victims()

    def expired(self) -> Iterator[LocalEntry]:
        """As `victims`, but only those that have not been used for the time to live; with one."""
        assert self.ttl_s is not None
        before_s = self._clock() - self.ttl_s
        return takewhile(lambda it: it.used_at_s <= before_s, self._by_age.victims())


class Lru(Eviction):
    """`lru`: what has not been used for longest goes, exactly: `uses` is the number of the last."""

    _num_uses = 0

    def key(self, entry: LocalEntry) -> float:
        return entry.uses

    def _use(self, entries: Iterable[LocalEntry]) -> None:
        for entry in entries:
            self._num_uses += 1
            entry.uses = self._num_uses

    def _sum(self, uses: float, others: float) -> float:
        return max(uses, others)


class ByValue(Eviction):
    """`value`: what saves least per byte goes.

    Expected saving = seconds to recompute × probability of reuse ÷ bytes.

    seconds      of the prefill model, which makes a token dearer the more stand before it. All
                 models of a family have the same sizes, so that the price of a token alone decides
                 nothing
    probability  in proportion to the uses, of which each counts half as much after the cache has
                 taken in `HALF_LIFE` of its budget. Being made is the first use; uses of what went
                 from below an entry are its own
    bytes        KV and E

    All uses fade alike, so that two entries keep their order until one is used: the logarithm of an
    entry's value at time 0 is a key that time does not change, and a heap of those needs no ageing.
    Approximations: E has no price of its own, and a walk that leads to a new entry counts at the
    one above it twice, then and when the new one goes. Without the depth it is LFU with ageing.
    """

    def __init__(self, family: Family, host_bytes: int, ttl_s: float | None, clock: Clock) -> None:
        super().__init__(ttl_s, clock)
        self._cost = PrefillCost.of_sizes(family.hidden_size)
        self._page_tokens = family.page_size
        self._half_life_bytes = HALF_LIFE * max(1, host_bytes)
        self._now = 0.0
        """In half-lives."""

    def key(self, entry: LocalEntry) -> float:
        """The logarithm of the value, as seen from time 0."""
        node = entry.node
        seconds = self._cost.seconds(node.start * self._page_tokens, node.stop * self._page_tokens)
        return entry.uses + log2(seconds / entry.num_bytes)

    def add(self, entries: Sequence[LocalEntry]) -> None:
        self._now += sum([entry.num_bytes for entry in entries]) / self._half_life_bytes
        super().add(entries)

    def _use(self, entries: Iterable[LocalEntry]) -> None:
        for entry in entries:
            entry.uses = self._sum(entry.uses, self._now)

    def _sum(self, uses: float, others: float) -> float:
        """log2(2^uses + 2^others), also where the powers are beyond a float."""
        low, high = min(uses, others), max(uses, others)
        return high + log2(1 + 2.0 ** (low - high)) if low > -inf else high
