"""All that one peer fetches: begun, asked for again where something broke, ended in time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from cachetree.clock import Clock
from cachetree.errors import (
    Cancelled,
    DeadlineExceeded,
    FetchError,
    ProtocolError,
    StaleEntry,
)
from cachetree.family import Family
from cachetree.ids import ModelId, PageHash
from cachetree.staging import Staging
from cachetree.transport import wire
from cachetree.transport.breaker import Breaker
from cachetree.transport.config import PeerConfig
from cachetree.transport.connection import Connection
from cachetree.transport.landing import NOT_ASKED, Landing
from cachetree.transport.pace import Bandwidth

_TICK_S: Final = 0.01
"""How often cancelled fetches are looked for."""

_MIN_SAMPLE_S: Final = 0.1
"""A deadline missed by a fetch shorter than this says nothing about the link."""


class Fetches:
    """The landings of one peer. Used by the peer's thread only; connections are given to it.

    One whose connection ends, or whose frames are damaged or missing, waits until `resume` asks
    for the rest of it, on this connection or the next: `max_retries` times, within `resume_s`, and
    never longer than its deadline. Every error is told to `breaker` once.
    """

    def __init__(
        self,
        who: str,
        family: Family,
        config: PeerConfig,
        breaker: Breaker,
        counts: Counter[str],
        clock: Clock,
    ) -> None:
        self._who = who
        self.bandwidth: Final = Bandwidth(clock)
        self.last_id = NOT_ASKED
        """Of the newest request."""
        self._family = family
        self._config = config
        self._breaker = breaker
        self._counts = counts
        self._clock = clock
        self._landings: list[Landing] = []
        self._asked: dict[int, Landing] = {}
        """Those of `_landings` that a request is under way for."""

    @property
    def is_under_way(self) -> bool:
        """Whether the worker owes something."""
        return bool(self._asked)

    def timeout_s(self) -> float:
        """How long nobody has to look at deadlines."""
        remaining_s = (landing.staging.deadline.remaining_s() for landing in self._landings)
        return min(_TICK_S, *remaining_s) if self._landings else math.inf

    def begin(
        self, link: Connection, model: ModelId, pages: Sequence[PageHash], staging: Staging
    ) -> None:
        landing = Landing(model, pages, staging)
        if landing.is_complete:
            return
        if not landing.fits(self._family):
            self.refuse(staging, FetchError("the staging's sizes are not those of the pages"))
        elif not self._breaker.admits():
            error = FetchError(f"{self._who} failed too often; another fetch tries it first")
            self.refuse(staging, error)
        else:
            self._landings.append(landing)
            self._ask(link, landing)

    def refuse(self, staging: Staging, error: FetchError) -> None:
        """Fail one that was not begun."""
        self._counts["failed"] += 1
        staging.fail(error)

    def place(
        self, link: Connection, frame: wire.Frame | wire.Located, payload: memoryview
    ) -> None:
        landing = self._asked.get(frame.id)
        if landing is None:
            if frame.id > self.last_id:
                raise ProtocolError(f"{self._who} sent a frame that nobody asked for")
            return  # It crossed with our Cancel.
        try:
            if isinstance(frame, wire.Frame):
                landing.place(frame, payload)
            elif link.arena is not None:
                landing.read(frame, link.arena)
            else:
                raise ProtocolError(f"{self._who} sent places of a memory that is not read here")
        except ProtocolError as exc:
            self._break(link, landing, exc)
        except FetchError as exc:
            self._end(landing, exc)
            link.send(wire.Cancel(id=frame.id))
        else:
            self._counts["landed_bytes"] += frame.size
            if landing.is_complete:
                if isinstance(frame, wire.Located):  # The worker waits for it.
                    link.send(wire.Credit(id=frame.id, num_bytes=landing.placed_bytes))
                self._end(landing, None)
            elif num_bytes := landing.take_credit(self._config.window_bytes // 2):
                # The worker goes on while what has arrived besides is placed.
                link.send(wire.Credit(id=frame.id, num_bytes=num_bytes))

    def failed(self, link: Connection, message: wire.FetchFailed) -> None:
        landing = self._asked.get(message.id)
        if landing is None:
            return
        kind = wire.FETCH_ERRORS.get(message.error, FetchError)
        error = kind(f"{self._who}: {message.reason}")
        if isinstance(error, ProtocolError):
            self._break(link, landing, error)
        else:
            self._end(landing, error)

    def compare(self, link: Connection, pong: wire.Pong) -> None:
        """What the worker sends no more, and sent before the pong, should be here."""
        for landing in tuple(self._asked.values()):
            if landing.id <= pong.last_id and landing.id not in pong.streams:
                error = ProtocolError(f"a request to {self._who}, or its last frames, were lost")
                self._break(link, landing, error)

    def check(self, link: Connection | None) -> None:
        """Give up what its reader gave up, or what is late."""
        for landing in tuple(self._landings):
            error = landing.staging.error
            if error is None and landing.staging.deadline.has_passed:
                error = DeadlineExceeded(f"{self._who} did not send everything in time")
            if error is None and self._has_waited(landing):
                error = FetchError(
                    f"{self._who} did not come back within {self._config.resume_s} s"
                )
            if error is not None:
                id = landing.id
                self._end(landing, error)
                if link is not None and id != NOT_ASKED:
                    link.send(wire.Cancel(id=id))

    def credit(self, link: Connection) -> None:
        """Tell the worker what was placed."""
        for landing in self._asked.values():
            if num_bytes := landing.take_credit():
                link.send(wire.Credit(id=landing.id, num_bytes=num_bytes))

    def repeat_credit(self) -> None:
        for landing in self._asked.values():
            landing.repeat_credit()

    def resume(self, link: Connection) -> None:
        """Ask for the rest of what was interrupted."""
        if len(self._asked) < len(self._landings):
            for landing in tuple(self._landings):
                if landing.id == NOT_ASKED:
                    self._counts["retries"] += 1
                    self._ask(link, landing)

    def interrupt(self, error: FetchError) -> None:
        """The connection is gone, and all requests with it."""
        for landing in tuple(self._asked.values()):
            self._suspend(landing, error)

    def end(self, error: FetchError) -> None:
        """All of them, for good."""
        for landing in tuple(self._landings):
            self._end(landing, type(error)(str(error)))

    def _ask(self, link: Connection, landing: Landing) -> None:
        self.last_id += 1
        landing.asked_at_s = self._clock()
        landing.asked_at_bytes = self._counts["landed_bytes"]
        fetch = landing.request(
            self.last_id,
            frame_bytes=self._config.frame_bytes,
            window_bytes=self._config.window_bytes,
            reads_arena=link.arena is not None,
        )
        self._asked[landing.id] = landing
        try:
            link.send(fetch)
        except ProtocolError as exc:  # More pages than a header takes.
            self._withdraw(landing)
            self._end(landing, exc)

    def _break(self, link: Connection, landing: Landing, error: ProtocolError) -> None:
        """What came for it was wrong, or did not come."""
        self._counts["protocol_errors"] += 1
        self._breaker.failed(error)
        id = landing.id
        self._suspend(landing, error)
        link.send(wire.Cancel(id=id))

    def _has_waited(self, landing: Landing) -> bool:
        waited_s = self._clock() - landing.broken_at_s
        return landing.id == NOT_ASKED and waited_s > self._config.resume_s

    def _suspend(self, landing: Landing, error: FetchError) -> None:
        self._withdraw(landing)
        landing.broken_at_s = self._clock()
        if landing.num_requests > self._config.max_retries:
            self._end(landing, type(error)(str(error)))

    def _withdraw(self, landing: Landing) -> None:
        del self._asked[landing.id]
        landing.id = NOT_ASKED

    def _end(self, landing: Landing, error: FetchError | None) -> None:
        is_asked = landing.id != NOT_ASKED
        if landing in self._landings:
            self._landings.remove(landing)
        if is_asked:
            self._measure(landing, error)
            self._withdraw(landing)
        if error is None:
            self._breaker.succeeded()
            return
        error = landing.staging.error or error
        self._counts["failed"] += not isinstance(error, Cancelled)
        if is_asked and not isinstance(error, Cancelled | StaleEntry):
            self._breaker.failed(error)
        else:
            self._breaker.released()
        landing.staging.fail(error)

    def _measure(self, landing: Landing, error: FetchError | None) -> None:
        num_bytes = self._counts["landed_bytes"] - landing.asked_at_bytes
        seconds = self._clock() - landing.asked_at_s
        is_late = isinstance(error, DeadlineExceeded) and seconds >= _MIN_SAMPLE_S
        if num_bytes >= Bandwidth.MIN_SAMPLE_BYTES or is_late:
            self.bandwidth.sample(num_bytes, seconds)
