"""All that one peer stores in its worker: what comes into the tree, parents first."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Final

import msgspec

from cachetree.clock import Clock, Deadline
from cachetree.errors import CacheTreeError, ProtocolError, StaleEntry
from cachetree.ids import PAGE_HASH_BYTES, Location, Span
from cachetree.memory import Layout
from cachetree.transport import wire
from cachetree.transport.advertise import ChangeQueue
from cachetree.transport.connection import Connection
from cachetree.transport.frames import MAX_MESSAGE_BYTES
from cachetree.transport.receiver import NOT_ASKED
from cachetree.transport.sender import Stream, payloads_of
from cachetree.transport.status import PusherStatus
from cachetree.transport.wire import Why
from cachetree.tree import CacheTree, Change, Lease, Listener, join_hashes

log = logging.getLogger(__name__)

Work = Generator[None, None, str]
"""Stops where it has to wait for the worker; gives why that refused, empty where it did not."""

_MAX_WAITING: Final = 4096
"""Changes that wait; they hold page hashes, no pages."""
_PART_BYTES: Final = 64 << 20
"""Larger entries go in several stores, each of which can be read when it is there."""
_STORE_S: Final = 30.0
_FRAME_BYTES: Final = 4 << 20
_MAX_PAGES: Final = MAX_MESSAGE_BYTES // PAGE_HASH_BYTES // 2
"""Of a store, which names them in one message."""
_BURST: Final = 4
"""Frames sent before the peer looks at its fetches again."""


class PendingStores:
    """Stores every entry of `tree` in one worker, one after another. Used by the peer's thread.

    Nothing is stored before `begin`; `begin`, `close`, `status` and `has_work` are for any thread.
    While the worker is away entries wait; when too many wait, or another life of the worker
    answers, everything in memory is offered again, which costs a small message for each that it
    has. An entry whose store breaks off is stored anew.
    """

    def __init__(
        self,
        address: Location,
        tree: CacheTree,
        wake: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._address: Final = address
        self._tree = tree
        self._wake = wake
        self._clock = clock
        self._has_begun = False
        """Until then nothing of it is touched by the peer's thread."""
        self._changes = ChangeQueue(self._subscribe, _MAX_WAITING, wake)
        self._next: deque[Change] = deque()
        self._work: Generator[None, None, None] | None = None
        """On the first of `_next`."""
        self._id = NOT_ASKED
        """Of the store under way."""
        self._answers: deque[wire.StoreAnswer] = deque()
        """To it."""
        self._deadline = Deadline.after(math.inf, clock)
        """Its own."""
        self._can_send = False
        """It stopped only to let others have their turn."""
        self._counts = PusherStatus(address=address)

    def begin(self) -> None:
        """Store what is in the tree, and then what comes into it."""
        self._next.extend(self._changes.restart())
        self._has_begun = True
        self._wake()

    def close(self) -> None:
        """Take in nothing that is new."""
        self._changes.close()

    @property
    def has_work(self) -> bool:
        return self._has_begun and bool(self._next or len(self._changes))

    @property
    def status(self) -> PusherStatus:
        num_waiting = len(self._next) + len(self._changes)
        return msgspec.structs.replace(self._counts, num_waiting=num_waiting)

    def timeout_s(self) -> float:
        """How long nobody has to look."""
        if self._work is None:
            return 0.0 if self.has_work else math.inf
        return 0.0 if self._can_send else self._deadline.remaining_s()

    def restart(self) -> None:
        """Begin again with everything that is in the tree, if it has begun."""
        if self._has_begun:
            self._counts.num_restarts += 1
            self._next = deque(self._changes.restart())

    def answered(self, message: wire.StoreAnswer) -> None:
        if message.id == self._id:
            self._answers.append(message)

    def turn(self, link: Connection) -> None:
        """Go on as far as the worker lets it; raises FetchError where the session is to end."""
        while True:
            if self._work is None:
                if (change := self._first()) is None:
                    return
                self._work = self._push(link, change)
            self._can_send = False
            if next(self._work, True) is None:
                return
            self._work = None
            self._next.popleft()

    def interrupt(self, error: CacheTreeError) -> None:
        """The session is over, and its connections are closed."""
        if self.has_work:
            self._counts.error = str(error)
        if self._work is not None:
            self._work.close()
            self._work = None

    def _first(self) -> Change | None:
        if not self._has_begun:
            return None
        if self._changes.has_overflowed:
            self.restart()
        if not self._next:
            self._next.extend(self._changes.take())
        return self._next[0] if self._next else None

    def _subscribe(self, listener: Listener) -> tuple[Iterator[Change], Callable[[], None]]:
        """To what comes alone."""
        return self._tree.subscribe(lambda change: listener(change) if change.added else None)

    def _push(self, link: Connection, change: Change) -> Generator[None, None, None]:
        """Store an entry, with what comes before it where the worker has lost that."""
        refused = yield from self._store(link, change)
        if refused != Why.UNKNOWN_PARENT or change.parent is None:
            return
        for above in self._tree.line(change.model, change.parent):
            if (yield from self._store(link, above)):
                return
        yield from self._store(link, change)

    def _store(self, link: Connection, change: Change) -> Work:
        page_bytes = Layout.of(self._tree.family, 1, change.e_layers).page_bytes
        for part in _parts(change, page_bytes):
            self._deadline = Deadline.after(_STORE_S, self._clock)
            lease = self._tree.lease(part.model, part.pages, "a push", self._deadline, is_use=False)
            if lease is None:
                self._counts.num_gone += 1
                return ""
            with lease:
                refused = yield from self._store_part(link, part, lease)
            if refused:
                return refused
        return ""

    def _store_part(self, link: Connection, part: Change, lease: Lease) -> Work:
        self._id = link.new_id()
        self._answers.clear()
        message = wire.Store(
            id=self._id,
            model=part.model,
            parent=part.parent or b"",
            pages=join_hashes(part.pages),
            e_layers=part.e_layers,
            timeout_ms=int(_STORE_S * 1000),
            name=self._tree.names.now.get(part.model, ""),
        )
        link.send(message)
        answer = yield from self._answer(link, None)
        if isinstance(answer, wire.Wanted) and answer.skipped != len(part.pages):
            if not 0 <= answer.skipped < len(part.pages):
                raise ProtocolError(f"worker {self._address} wants a part that no store has")
            steps = wire.steps_of_store(self._tree.family.num_layers, part.e_layers)
            new = Span(answer.skipped, lease.num_pages)
            try:
                payloads = payloads_of(lease, steps, _FRAME_BYTES, pages=new)
            except StaleEntry:
                link.send(wire.Cancel(id=self._id))
                self._counts.num_gone += 1
                return ""
            stream = Stream(self._id, lease, payloads, link.channel, self._deadline)
            answer = yield from self._answer(link, stream)
            stream.end()
        match answer:
            case wire.Wanted():
                self._counts.num_known += 1
            case wire.Stored():
                self._counts.num_stored += 1
                self._counts.error = ""
            case wire.Ended() if answer.error != Why.UNKNOWN_PARENT:
                self._counts.num_refused += 1
                if not self._counts.error:
                    log.info("worker %s refused a store: %s", self._address, wire.said(answer))
                self._counts.error = wire.said(answer)
        return answer.error if isinstance(answer, wire.Ended) else ""

    def _answer(
        self, link: Connection, stream: Stream | None
    ) -> Generator[None, None, wire.StoreAnswer]:
        """What the worker says next; what it has room for is sent meanwhile."""
        while not self._answers:
            for _ in range(_BURST):
                self._can_send = stream is not None and stream.can_send
                if stream is None or not self._can_send:
                    break
                self._counts.num_pushed_bytes += stream.put()
            if self._deadline.has_passed:  # The session, and what is fetched in it, goes on.
                link.send(wire.Cancel(id=self._id))
                why = "the store took too long"
                return wire.Ended(id=self._id, error=Why.DEADLINE.value, reason=why)
            yield
        answer = self._answers.popleft()
        if not isinstance(answer, wire.Ended | (wire.Stored if stream else wire.Wanted)):
            raise ProtocolError(f"worker {self._address} answers a store with {answer}")
        return answer


def _parts(change: Change, page_bytes: int) -> Iterator[Change]:
    """The entry in stores of about `_PART_BYTES`, each the parent of the next."""
    return change.parts(min(max(1, _PART_BYTES // page_bytes), _MAX_PAGES))
