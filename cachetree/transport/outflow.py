"""The streams of all peers: who sends next, how much, and when their pages are free again."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Final

from cachetree.clock import Clock
from cachetree.transport import wire
from cachetree.transport.pace import pace
from cachetree.transport.router import Router
from cachetree.transport.session import Session
from cachetree.transport.stream import LOCATED_BYTES, Stream

BURST: Final = 16
"""Frames sent before incoming messages are looked at again."""

Reply = Callable[[bytes, wire.ToPeer], bool]
"""Sends over ZMQ; False where the peer does not take it now."""


class Outflow:
    """Streams of all peers get equal bytes, whatever their frames, each within its window.

    Used by the worker's thread only.
    """

    def __init__(
        self,
        router: Router,
        reply: Reply,
        counts: Counter[str],
        max_bytes_per_s: float | None,
        clock: Clock,
    ) -> None:
        self._router = router
        self._reply = reply
        self._counts = counts
        self._pace = pace(max_bytes_per_s, clock)
        self._turns: deque[tuple[Session, Stream]] = deque()
        self._draining: list[tuple[Session, Stream]] = []
        self.is_refused = False
        """A peer's queue did not take a message: wait before the next attempt."""

    def __len__(self) -> int:
        return len(self._turns)

    def in_flight_bytes(self) -> list[int]:
        """Bytes sent and not yet placed, per stream; from any thread."""
        return [stream.in_flight_bytes for _, stream in tuple(self._turns)]

    def timeout_s(self) -> float:
        """How long nobody has to look."""
        remaining_s = (stream.deadline.remaining_s() for _, stream in self._turns)
        timeout_s = min(remaining_s, default=math.inf)
        if not self.is_refused and any(self._can_send(*turn) for turn in self._turns):
            timeout_s = min(timeout_s, self._pace.delay_s())
        return timeout_s

    def add(self, session: Session, stream: Stream) -> None:
        if not self._turns:
            self._pace.idle()
        stream.served_bytes = min((other.served_bytes for _, other in self._turns), default=0)
        self._turns.append((session, stream))

    def send(self) -> None:
        """Up to `BURST` frames, each of the ready stream that got the fewest bytes."""
        self.is_refused = False
        ready = [turn for turn in self._turns if self._can_send(*turn)]
        for _ in range(BURST):
            if not ready or self._pace.delay_s():
                break
            turn = min(ready, key=lambda turn: turn[1].served_bytes)
            if not self._send(*turn) or not self._can_send(*turn):
                ready.remove(turn)

    def late(self) -> Iterator[tuple[Session, Stream]]:
        """Those whose deadline has passed."""
        for session, stream in tuple(self._turns):
            if stream.deadline.has_passed and not stream.is_over:
                yield session, stream

    def retire(self) -> None:
        """Give back the pages of streams that are over, once nobody reads them any more."""
        for turn in [turn for turn in self._turns if turn[1].is_over]:
            self._turns.remove(turn)
            self._draining.append(turn)
        for turn in tuple(self._draining):
            session, stream = turn
            if stream.is_drained:
                self._draining.remove(turn)
                session.streams.pop(stream.id, None)
                stream.lease.release()

    def close(self) -> None:
        """Nobody is served any more."""
        self.retire()
        for _, stream in self._draining:
            stream.lease.release()
        self._draining.clear()

    def _limit(self, stream: Stream) -> int:
        return self._pace.limit(stream.frame_bytes)

    def _can_send(self, session: Session, stream: Stream) -> bool:
        channel = self._router.channels.get(session.identity)
        has_room = stream.reads_arena or (channel is not None and channel.has_room)
        return has_room and stream.is_ready(self._limit(stream))

    def _send(self, session: Session, stream: Stream) -> bool:
        """Whether it went."""
        located = stream.next_located(self._pace.limit(LOCATED_BYTES))
        if located is not None:
            if not self._reply(session.identity, located):
                self.is_refused = True
                return False
            size = located.size
        else:
            channel = self._router.channels.get(session.identity)
            if channel is None or not channel.has_room:
                return False
            frame, payload = stream.next_frame(self._limit(stream))
            size = frame.size
            channel.put(frame, payload)
            stream.queued(channel.outbox)
        stream.sent(size)
        self._pace.spend(size)
        self._counts["sent_bytes"] += size
        self._counts["fetch ok"] += stream.is_over
        return True
