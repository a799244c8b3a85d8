"""The pushing side: one thread that stores new local entries in one remote worker."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import msgspec
import zmq

from cachetree.clock import Clock, Deadline
from cachetree.errors import (
    CacheTreeError,
    DeadlineExceeded,
    FamilyMismatch,
    FetchError,
    ProtocolError,
    StaleEntry,
)
from cachetree.ids import Location, Span
from cachetree.memory import Layout
from cachetree.tier import give_way
from cachetree.transport import wire
from cachetree.transport.address import parse_remote
from cachetree.transport.backoff import Backoff
from cachetree.transport.config import PeerConfig
from cachetree.transport.connection import Connection
from cachetree.transport.frames import MIN_FRAME_BYTES, Frame
from cachetree.transport.handshake import credentials_of
from cachetree.transport.push_queue import PushQueue
from cachetree.transport.sender import Stream
from cachetree.transport.wakeup import CLOSE_S, Wakeup
from cachetree.transport.wire import Refused
from cachetree.tree import CacheTree, Change, Lease

log = logging.getLogger(__name__)

_MAX_WAITING: Final = 4096
"""Changes that wait; they hold page hashes, no pages."""
_PART_BYTES: Final = 64 << 20
"""Larger entries go in several stores, each of which can be read when it is there."""
_STORE_S: Final = 30.0
_IDLE_S: Final = 1.0
"""After so long without anything to push the connection is closed."""
_MAX_CLOSE_S: Final = 5.0
"""How long what waits when it is closed may still take."""


class _Nowhere:
    """A worker has no payloads for those who push to it."""

    def buffer_for(self, frame: Frame) -> None:
        raise ProtocolError("a frame came that nobody asked for")

    def is_pending(self, frame: Frame) -> bool:
        return False


_NOWHERE: Final = _Nowhere()


class PusherStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What was pushed to one worker, in numbers."""

    address: str
    error: str
    """Why the last attempt ended early; empty where it did not."""
    num_waiting: int
    num_pushed_bytes: int
    num_stored: int
    """Stores that ended well; one entry may take several."""
    num_known: int
    """Stores of what the worker had already."""
    num_gone: int
    """Entries that had left memory before their turn."""
    num_refused: int
    """Stores that the worker had no room for, or does not accept."""
    num_restarts: int
    """Times that everything in memory was offered again: too many waited, or the worker is new."""


class Pusher:
    """Stores every entry that comes into `tree` at the worker at `address`, parents first.

    What cannot be pushed is not missed by anyone: it stays in this server's own memory. While the
    worker is away entries wait; when too many wait, or another life of the worker answers,
    everything in memory is offered again, which costs a small message for each that it has.
    Raises ConfigError for a bad address or key.
    """

    def __init__(
        self,
        tree: CacheTree,
        address: Location,
        config: PeerConfig,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.address: Final = address
        self._tree = tree
        self._remote = parse_remote(address, field="stores")
        self._credentials = credentials_of(config.key_file, config.server_key)
        self._config = config
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._error = ""
        self._epoch = 0
        self._next_id = 1
        self._backoff = Backoff(config.reconnect_s, config.max_reconnect_s)
        self._connection: Connection | None = None
        self._inbox: deque[wire.ToPeer] = deque()
        self._ends_at_s = math.inf
        """When the thread ends at the latest."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wakeup = Wakeup()
        self._queue = PushQueue(tree, _MAX_WAITING, self._wakeup.wake)
        self._thread = threading.Thread(
            target=self._run, name=f"cachetree-push {address}", daemon=True
        )
        self._thread.start()

    @property
    def status(self) -> PusherStatus:
        counts = self._counts
        return PusherStatus(
            address=self.address,
            error=self._error,
            num_waiting=len(self._queue),
            num_pushed_bytes=counts["pushed_bytes"],
            num_stored=counts["stored"],
            num_known=counts["known"],
            num_gone=counts["gone"],
            num_refused=counts["refused"],
            num_restarts=self._queue.num_restarts,
        )

    def close(self) -> None:
        """Push what waits, for a few seconds at most and to a worker that answers. Idempotent."""
        self._queue.close()
        self._ends_at_s = min(self._ends_at_s, self._clock() + _MAX_CLOSE_S)
        self._wakeup.wake()
        self._thread.join(_MAX_CLOSE_S + CLOSE_S)

    # Everything below runs in the pusher's thread.

    @property
    def _is_closing(self) -> bool:
        return self._ends_at_s < math.inf

    def _run(self) -> None:
        give_way()
        try:
            while self._clock() < self._ends_at_s:
                try:
                    self._turn()
                except CacheTreeError as exc:
                    self._lose(exc)
                except Exception as exc:
                    log.exception("pushing to %s failed", self.address)
                    self._lose(FetchError(f"internal error: {exc}"))
        finally:
            if num_waiting := len(self._queue):
                log.info("%d entries were not pushed to %s", num_waiting, self.address)
            self._disconnect()
            self._context.destroy()
            self._wakeup.close()

    def _turn(self) -> None:
        change = self._queue.first()
        if change is None and self._is_closing:
            self._ends_at_s = -math.inf
        elif change is None:
            self._wakeup.wait(_IDLE_S)
            self._wakeup.drain()
            if self._queue.first() is None:
                self._disconnect()
        elif self._connection is None:
            self._connect()
        else:
            self._push(change)
            self._queue.drop(change)

    def _connect(self) -> None:
        connection = self._connection = Connection(
            self._context,
            self._remote,
            self._wakeup,
            wire.MAX_HEADER_BYTES,
            self._credentials,
        )
        with contextlib.suppress(FetchError):  # One that has failed already says why below.
            connection.send(wire.hello(self._tree.family, self._config.model, epoch=0))
        hello = self._receive(Deadline.after(self._config.connect_s, self._clock))
        if not isinstance(hello, wire.Hello):
            raise ProtocolError(f"worker {self.address} did not say hello first")
        who = f"worker {self.address}"
        wire.require_family(hello, self._tree.family, who=who)
        connection.go_on(hello.ticket, who)
        if self._epoch not in (0, hello.epoch):
            self._queue.restart()
        self._epoch = hello.epoch
        self._backoff.reset()

    def _receive(self, deadline: Deadline) -> wire.ToPeer:
        """The next message; raises what ends the wait."""
        while not self._inbox:
            self._wait(deadline)
        message = self._inbox.popleft()
        if isinstance(message, wire.Bye):
            raise FetchError(f"worker {self.address} ended the session: {message.reason}")
        return message

    def _wait(self, deadline: Deadline) -> None:
        """Until a message is in the inbox, or the data connection has taken something.

        Raises what ends the wait.
        """
        connection = self._connection
        assert connection is not None
        if self._clock() >= self._ends_at_s:
            raise FetchError("closed here")
        if deadline.has_passed:
            raise DeadlineExceeded(f"worker {self.address} did not answer in time")
        until = Deadline(min(deadline.at_s, self._ends_at_s), self._clock)
        connection.wait(round(until.remaining_s() * 1000) + 1)
        self._wakeup.drain()
        self._inbox.extend(connection.receive())
        for _ in connection.receive_frames(_NOWHERE):
            pass
        if not self._inbox and (end := connection.end(f"worker {self.address}")) is not None:
            raise end

    def _push(self, change: Change) -> None:
        """Store an entry, with what comes before it where the worker has lost that."""
        if self._store(change) is not Refused.UNKNOWN_PARENT or change.parent is None:
            return
        for above in self._tree.line(change.model, change.parent):
            if self._store(above) is not None:
                return
        self._store(change)

    def _store(self, change: Change) -> Refused | None:
        """None where the worker has it now, or it is gone here."""
        page_bytes = Layout.of(self._tree.family, 1, change.e_layers).page_bytes
        for part in _parts(change, page_bytes):
            deadline = Deadline.after(_STORE_S, self._clock)
            lease = self._tree.lease(part.model, part.pages, "a push", deadline, is_use=False)
            if lease is None:
                self._counts["gone"] += 1
                return None
            with lease:
                refused = self._store_part(part, lease, deadline)
            if refused is not None:
                return refused
        return None

    def _store_part(self, part: Change, lease: Lease, deadline: Deadline) -> Refused | None:
        connection, id = self._connection, self._next_id
        assert connection is not None
        self._next_id += 1
        message = wire.Store(
            id=id,
            model=part.model,
            parent=part.parent or b"",
            pages=wire.join_pages(part.pages),
            e_layers=part.e_layers,
            timeout_ms=int(_STORE_S * 1000),
        )
        connection.send(message)
        while True:
            match self._receive(deadline):
                case wire.StoreRefused(id=of, error=error, reason=reason) if of == id:
                    return self._note_refusal(error, reason)
                case wire.Wanted(id=of) as wanted if of == id:
                    break
        if not 0 <= wanted.skipped <= len(part.pages):
            raise ProtocolError(f"worker {self.address} skips {wanted.skipped} pages")
        if wanted.skipped == len(part.pages):
            self._counts["known"] += 1
            return None
        return self._send(wanted, lease, part.e_layers, deadline)

    def _send(
        self, wanted: wire.Wanted, lease: Lease, e_layers: tuple[int, ...], deadline: Deadline
    ) -> Refused | None:
        window_bytes = min(wanted.window_bytes, self._config.window_bytes)
        frame_bytes = min(wanted.frame_bytes, self._config.frame_bytes, window_bytes // 2)
        if frame_bytes < MIN_FRAME_BYTES:
            raise ProtocolError(f"worker {self.address} asks for frames of {frame_bytes} bytes")
        connection = self._connection
        assert connection is not None
        assert connection.channel is not None
        channel = connection.channel
        steps = wire.steps_of_store(self._tree.family.num_layers, e_layers)
        try:
            stream = Stream(
                wanted.id,
                lease,
                steps,
                pages=Span(wanted.skipped, lease.num_pages),
                frame_bytes=frame_bytes,
                window_bytes=window_bytes,
                deadline=deadline,
            )
        except StaleEntry:
            connection.send(wire.Cancel(id=wanted.id))
            self._counts["gone"] += 1
            return None
        try:
            while True:
                while channel.has_room and stream.is_ready(frame_bytes):
                    frame, payload = stream.next_frame(frame_bytes)
                    channel.put(frame, payload)
                    stream.sent(frame.size)
                    self._counts["pushed_bytes"] += frame.size
                if not self._inbox:
                    self._wait(deadline)
                    continue
                match self._receive(deadline):
                    case wire.Credit(id=stream.id, num_bytes=num_bytes):
                        stream.credit(num_bytes)
                    case wire.Stored(id=stream.id):
                        self._counts["stored"] += 1
                        self._error = ""
                        return None
                    case wire.StoreRefused(id=stream.id, error=error, reason=reason):
                        return self._note_refusal(error, reason)
        except BaseException:
            self._disconnect()
            raise

    def _note_refusal(self, error: str, reason: str) -> Refused:
        if error not in (it.value for it in Refused):
            raise ProtocolError(f"worker {self.address} refuses with {error!r}: {reason}")
        if error != Refused.UNKNOWN_PARENT.value:
            self._counts["refused"] += 1
            if not self._error:
                log.info("worker %s refused a store: %s", self.address, reason)
            self._error = reason
        return Refused(error)

    def _lose(self, error: CacheTreeError) -> None:
        self._disconnect()
        if self._is_closing:
            self._ends_at_s = -math.inf
            return
        if str(error) != self._error:
            log.warning("pushing to %s has stopped: %s", self.address, error)
        self._error = str(error)
        if isinstance(error, FamilyMismatch):
            self._ends_at_s = -math.inf
            self._queue.close()
            return
        pause = Deadline.after(self._backoff.drawn_s(), self._clock)
        while not pause.has_passed and not self._is_closing:
            self._wakeup.wait(pause.remaining_s())
            self._wakeup.drain()

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(FetchError):
                self._connection.send(wire.Bye(reason="nothing more to push"))
            self._connection.close()
            self._connection = None
        self._inbox.clear()


def _parts(change: Change, page_bytes: int) -> Iterator[Change]:
    """The entry in stores of about `_PART_BYTES`, each the parent of the next."""
    num_pages = max(1, _PART_BYTES // page_bytes)
    for start in range(0, len(change.pages), num_pages):
        yield replace(
            change,
            parent=change.pages[start - 1] if start else change.parent,
            pages=change.pages[start : start + num_pages],
        )
