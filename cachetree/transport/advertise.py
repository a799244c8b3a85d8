"""What a worker holds, as its peers learn it: a snapshot, then changes."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final

from cachetree.clock import Clock
from cachetree.errors import ProtocolError
from cachetree.ids import PAGE_HASH_BYTES, Kind, Location, ModelId, Part, Span
from cachetree.transport.wire import Entries, Entry, Reset, Synced, pages_of
from cachetree.tree import CacheTree, Change, join_hashes


class ChangeQueue:
    """Bounded: when more than `max_changes` wait, all of them are dropped until `restart`.

    Changes come under the tree's lock from any thread; the rest belongs to the reader's thread.
    """

    def __init__(self, tree: CacheTree, max_changes: int, wake: Callable[[], None]) -> None:
        self._tree = tree
        self._max_changes = max_changes
        self._wake = wake
        self._lock = threading.Lock()
        self._changes: deque[Change] = deque()
        self.num_noted = 0
        """Changes that ever came; may be read from any thread."""
        self.num_taken = 0
        """Of these, how many the reader knows: taken, or in what `restart` gave."""
        self.has_overflowed = False
        """Something was dropped: begin again."""
        self.close: Callable[[], None] = lambda: None
        """Take in nothing that is new. Idempotent; `restart` opens it again."""

    def restart(self) -> Iterator[Change]:
        """What is in the tree now; what comes later is taken in from here on."""
        self.close()
        with self._lock:
            self.num_taken = self.num_noted
            self.has_overflowed = False
        there, self.close = self._tree.subscribe_kept(self._note)
        return there

    def take(self) -> list[Change]:
        with self._lock:
            changes = list(self._changes)
            self._changes.clear()
            self.num_taken = self.num_noted
        return changes

    def _note(self, change: Change) -> None:
        with self._lock:
            self.num_noted += 1
            if len(self._changes) >= self._max_changes:
                self._changes.clear()
                self.has_overflowed = True
            if not self.has_overflowed:
                self._changes.append(change)
        self._wake()


ENTRY_PAGES: Final = 2048
"""Pages per `Entries` message: 32 KiB of hashes, so that adverts never delay a frame for long."""

_ENTRY_WEIGHT: Final = 8
"""What an entry costs besides its pages, in page hashes."""


def entries_of(change: Change) -> Iterator[Entry]:
    """One change as entries of at most `ENTRY_PAGES` pages, each the parent of the next.

    Removals come last part first, so that a page is never left without its parent.
    """
    starts = range(0, len(change.pages), ENTRY_PAGES)
    for start in starts if change.added else reversed(starts):
        some = change.slice(Span(start, min(start + ENTRY_PAGES, len(change.pages))))
        yield Entry(
            added=some.added,
            model=some.model,
            part=some.part,
            parent=some.parent or b"",
            pages=join_hashes(some.pages),
        )


def pack(entries: Iterable[Entry]) -> Iterator[tuple[Entry, ...]]:
    """Group entries into messages of about `ENTRY_PAGES` pages, in order."""
    group: list[Entry] = []
    weight = 0
    for entry in entries:
        entry_weight = len(entry.pages) // PAGE_HASH_BYTES + _ENTRY_WEIGHT
        if group and weight + entry_weight > ENTRY_PAGES + _ENTRY_WEIGHT:
            yield tuple(group)
            group, weight = [], 0
        group.append(entry)
        weight += entry_weight
    if group:
        yield tuple(group)


Advert = Reset | Entries | Synced

_NOTHING: Final = -1
"""In place of a number of changes."""
MAX_UNANSWERED: Final = 256
"""`Entries` that are under way to one peer; more wait until it answers."""
MUTE_S: Final = 5.0
"""Seconds without an answer after which nobody waits for what a peer knows."""


class Advertiser:
    """A bounded queue between the tree's writers and one peer.

    Used by the worker's thread, but for `knowing`. When the peer is too slow for the queue, the
    queue is dropped and a new snapshot begins: what the peer knows may be late, never wrong.
    """

    def __init__(
        self, tree: CacheTree, max_pending: int, wake: Callable[[], None], clock: Clock
    ) -> None:
        self._changes = ChangeQueue(tree, max_pending, wake)
        self._clock = clock
        self._mute_since_s = math.inf
        """When the peer last answered, or was asked first since; infinite if it has nothing to
        answer."""
        self._num_learned: float = _NOTHING
        """Changes that the peer has told it knows."""
        self._told: deque[int] = deque()
        """Of each `Entries` that the peer has not answered, how many it knows with it."""
        self._names = tree.names
        self._named: set[str] = set()
        """Models that the peer was told the names of."""
        self._adverts = self._snapshot()

    def next(self) -> Advert | None:
        """What is to be told now; None where nothing is, or too much is unanswered."""
        if len(self._told) >= MAX_UNANSWERED:
            return None
        if self._changes.has_overflowed:
            self._adverts = self._snapshot()
        advert = next(self._adverts, None)
        if advert is None and (changes := self._changes.take()):
            self._adverts = self._entries(changes)
            advert = next(self._adverts, None)
        return advert

    def knowing(self) -> Callable[[], bool]:
        """Asks whether the peer knows by now what was in the tree at this call, is gone, or has
        answered nothing for `MUTE_S`. Any thread."""
        num_changes = self._changes.num_noted
        return lambda: (
            self._num_learned >= num_changes or self._clock() - self._mute_since_s > MUTE_S
        )

    def learned(self) -> None:
        """The peer knows one more of the `Entries`; raises ProtocolError for one too many."""
        if not self._told:
            raise ProtocolError("a peer has learned what it was not told")
        self._num_learned = max(self._num_learned, self._told.popleft())
        self._mute_since_s = self._clock() if self._told else math.inf

    def close(self) -> None:
        """The peer is gone: nobody waits for what it knows."""
        self._changes.close()
        self._num_learned = math.inf

    def _snapshot(self) -> Iterator[Advert]:
        changes = self._changes.restart()
        yield Reset()
        yield from self._entries(changes)
        yield Synced()

    def _entries(self, changes: Iterable[Change]) -> Iterator[Advert]:
        """All of them are known with the last one."""
        num_taken = self._changes.num_taken
        for entries in pack(chain.from_iterable(map(entries_of, changes))):
            self._told.append(_NOTHING)
            self._mute_since_s = min(self._mute_since_s, self._clock())
            names = self._names.now
            new = {it.model for it in entries}.intersection(names) - self._named
            self._named |= new
            yield Entries(entries=entries, names={it: names[it] for it in new})
        if self._told:
            self._told[-1] = num_taken
        else:
            self._num_learned = num_taken


_MOST_PAGES: Final = 1_000_000
"""Of one peer, each counted once per model: some 130 MB, 1 GB if each were a node alone."""

_MOST_MODELS: Final = 512
"""Of one peer. A match looks at each model that has a page, under the tree's lock: some 2 ms."""


class RemoteView:
    """The part of `tree` that belongs to one worker. Used by the peer's thread only."""

    def __init__(self, tree: CacheTree, location: Location) -> None:
        self._tree = tree
        self._location = location

    def limit(self, budget_bytes: int) -> None:
        """Note as many pages as fit in what the worker keeps; for more, those go that were matched
        least recently."""
        family = self._tree.family
        page_bytes = min(family.num_layers * family.page_bytes(Kind.KV), family.page_bytes(Kind.E))
        max_pages = min(budget_bytes // page_bytes or _MOST_PAGES, _MOST_PAGES)
        self._tree.remote.limit(self._location, max_pages, _MOST_MODELS)

    def apply(self, message: Advert) -> None:
        """Raises ProtocolError for entries that cannot exist."""
        match message:
            case Reset():
                self.forget()
            case Entries():
                for model, name in message.names.items():
                    self._tree.names.hear(ModelId(model), name)
                for entry in message.entries:
                    self._apply(entry)

    def forget(self) -> None:
        self._tree.remote.forget(self._location)

    def _apply(self, entry: Entry) -> None:
        pages = pages_of(entry.pages)
        parents = pages_of(entry.parent)
        if len(parents) > 1 or entry.part >= self._tree.family.num_layers:
            raise ProtocolError(f"worker {self._location} advertises entries that cannot exist")
        model, part = ModelId(entry.model), Part(entry.part)
        if entry.added:
            parent = parents[0] if parents else None
            self._tree.remote.add(self._location, model, parent, pages, part)
        else:
            self._tree.remote.drop(self._location, model, pages, part)
