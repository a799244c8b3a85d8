"""Adverts: a worker tells each peer its entries, first a snapshot, then changes."""

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
    """Queue of a tree's changes (entries added or removed). If more than `max_changes` wait, all
    are dropped, and the reader has to `restart` with the tree's present entries.

    The tree adds changes with its lock held, from any thread. Everything else is for the reader's
    thread.
    """

    def __init__(self, tree: CacheTree, max_changes: int, wake: Callable[[], None]) -> None:
        self._tree = tree
        self._max_changes = max_changes
        self._wake = wake
        self._lock = threading.Lock()
        self._changes: deque[Change] = deque()
        self.num_noted = 0
        """Number of changes added so far. Any thread may read it."""
        self.num_taken = 0
        """Number of changes added before the reader's last `take` or `restart`."""
        self.has_overflowed = False
        """True if changes were dropped: the reader has to call `restart`."""
        self.close: Callable[[], None] = lambda: None
        """Function that makes the tree stop adding changes. Idempotent; `restart` undoes it."""

    def restart(self) -> Iterator[Change]:
        """Return the tree's present entries, and queue all later changes."""
        self.close()
        with self._lock:
            self.num_taken = self.num_noted
            self.has_overflowed = False
        present, self.close = self._tree.subscribe_kept(self._note)
        return present

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
"""Largest number of pages in one `Entries` message: 32 KiB of hashes, which delay a frame only
briefly."""

_ENTRY_WEIGHT: Final = 8
"""Bytes of all fields of an `Entry` except its pages, divided by the bytes of one page hash."""


def entries_of(change: Change) -> Iterator[Entry]:
    """Cut one change into entries of at most `ENTRY_PAGES` pages. The `parent` of an entry is the
    last page before it.

    Removals begin with the last pages, so that the peer never has a page without its parent.
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
"""Count for a peer that has confirmed no change yet: lower than any real count."""
MAX_UNANSWERED: Final = 256
"""Largest number of `Entries` messages that a peer may leave unanswered. Further messages wait."""
MUTE_S: Final = 5.0
"""Seconds for which `knowing` waits for a peer's next answer to an `Entries`."""


class Advertiser:
    """Make the adverts for one peer, and note which of them it has answered.

    If the peer is too slow, queued changes are dropped and a new snapshot begins: the peer's
    knowledge may be late, never wrong. For the worker's thread, except `knowing`.
    """

    def __init__(
        self, tree: CacheTree, max_pending: int, wake: Callable[[], None], clock: Clock
    ) -> None:
        self._changes = ChangeQueue(tree, max_pending, wake)
        self._clock = clock
        self._mute_since_s = math.inf
        """Time since which the peer owes an answer: the time of its last answer, or of the first
        `Entries` after it. Infinity if the peer has answered everything."""
        self._num_learned: float = _NOTHING
        """Number of changes that the peer has confirmed."""
        self._told: deque[int] = deque()
        """Number of changes that the peer knows after its answer, for each unanswered `Entries`."""
        self._names = tree.names
        self._named: set[str] = set()
        """Ids of the models of which this session has sent the name."""
        self._adverts = self._snapshot()

    def next(self) -> Advert | None:
        """Return the next message to send. None if nothing has changed, or too many messages are
        unanswered."""
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
        """Return a function that returns True once the peer knows the tree as it is now.

        It also returns True if the peer is gone, or has not answered for `MUTE_S`. Thread-safe.
        """
        num_changes = self._changes.num_noted
        return lambda: (
            self._num_learned >= num_changes or self._clock() - self._mute_since_s > MUTE_S
        )

    def learned(self) -> None:
        """Note that the peer has answered one more `Entries`. Raises ProtocolError if none was
        unanswered."""
        if not self._told:
            raise ProtocolError("a peer has answered an advert that was not sent")
        self._num_learned = max(self._num_learned, self._told.popleft())
        self._mute_since_s = self._clock() if self._told else math.inf

    def close(self) -> None:
        """Stop, because the peer is gone. From now on, no thread waits for the peer's answers."""
        self._changes.close()
        self._num_learned = math.inf

    def _snapshot(self) -> Iterator[Advert]:
        changes = self._changes.restart()
        yield Reset()
        yield from self._entries(changes)
        yield Synced()

    def _entries(self, changes: Iterable[Change]) -> Iterator[Advert]:
        """Yield messages with `changes`. A peer that has answered the last message knows all
        changes taken so far."""
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
"""Largest number of one worker's pages that this server's tree lists. A page counts once for each
model. All of them take some 130 MB, or 1 GB if each page has a tree node of its own."""

_MOST_MODELS: Final = 512
"""Largest number of one worker's models that this server's tree lists. With so many models, a match
holds the tree's lock for some 2 ms."""


class RemoteView:
    """The entries of one worker in this server's tree. Used only by the peer's thread."""

    def __init__(self, tree: CacheTree, location: Location) -> None:
        self._tree = tree
        self._location = location

    def limit(self, budget_bytes: int) -> None:
        """Limit the worker's pages in the tree by the bytes that the worker can store. Pages above
        the limit are dropped, the least recently matched first."""
        family = self._tree.family
        page_bytes = min(family.num_layers * family.page_bytes(Kind.KV), family.page_bytes(Kind.E))
        max_pages = min(budget_bytes // page_bytes or _MOST_PAGES, _MOST_PAGES)
        self._tree.remote.limit(self._location, max_pages, _MOST_MODELS)

    def apply(self, message: Advert) -> None:
        """Apply an advert to the tree. Raises ProtocolError for malformed entries."""
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
