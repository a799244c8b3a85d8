"""All that one peer fetches: begun, asked for again where something broke, ended in time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from cachetree.checkpoint.family import Family
from cachetree.clock import Clock
from cachetree.errors import (
    Cancelled,
    DeadlineExceeded,
    FetchError,
    ProtocolError,
    StaleEntry,
)
from cachetree.ids import ModelId, PageHash
from cachetree.memory.staging import Staging
from cachetree.transport import wire
from cachetree.transport.breaker import Breaker
from cachetree.transport.channel import Arrival
from cachetree.transport.config import PeerConfig
from cachetree.transport.connection import Connection
from cachetree.transport.frames import Frame
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
            error = FetchError(
                f"{self._who} failed too often; another fetch tries now whether it is well again"
            )
            self.refuse(staging, error)
        else:
            self._landings.append(landing)
            self._ask(link, landing)

    def refuse(self, staging: Staging, error: FetchError) -> None:
        """Fail one that was not begun."""
        self._counts["failed"] += 1
        staging.fail(error)

    def room(self, link: Connection, frame: Frame) -> memoryview | None:
        """Where its bytes go; None for nowhere."""
        landing = self._landing_of(frame)
        try:
            return None if landing is None else landing.room(frame)
        except FetchError as exc:
            self._stop(link, frame.id, exc)
            return None

    def wants(self, frame: Frame) -> bool:
        """Whether somebody still waits for a frame that `room` was given for."""
        landing = self._asked.get(frame.id)
        return landing is not None and landing.staging.error is None

    def placed(self, link: Connection, arrival: Arrival) -> None:
        """A frame came whole into its room."""
        landing = self._landing_of(arrival.frame)
        if landing is None:
            return
        try:
            landing.land(arrival.frame, is_sound=arrival.is_sound)
        except FetchError as exc:
            self._stop(link, landing.id, exc)
        else:
            self._landed(link, landing, arrival.frame.size)

    def read(self, link: Connection, located: wire.Located) -> None:
        """Copy what lies in the worker's memory."""
        landing = self._landing_of(located)
        if landing is None:
            return
        try:
            if link.arena is None:
                raise ProtocolError(f"{self._who} sent places of a memory that is not read here")
            landing.read(located, link.arena)
        except FetchError as exc:
            self._stop(link, landing.id, exc)
        else:
            self._landed(link, landing, located.size)
            if landing.is_complete:  # The worker waits for it.
                link.send(wire.Credit(id=located.id, num_bytes=landing.placed_bytes))

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

    def compare(
        self, link: Connection, pong: wire.Pong, over: Literal["zmq", "data connection"]
    ) -> None:
        """What the worker sends no more, and sent before the pong, should be here.

        Of the two connections neither knows what is still under way in the other.
        """
        for landing in tuple(self._asked.values()):
            if landing.id <= pong.last_id and landing.id not in pong.streams:
                landing.over.add(over)
                if len(landing.over) == 2:
                    what = f"a request to {self._who}, or its last frames, were lost"
                    self._break(link, landing, ProtocolError(what))

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

    def repeat_credit(self, link: Connection) -> None:
        """Tell the worker what was placed, also what it should know: it may have been lost."""
        for landing in self._asked.values():
            landing.repeat_credit()
            if num_bytes := landing.take_credit():
                link.send(wire.Credit(id=landing.id, num_bytes=num_bytes))

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

    def _landing_of(self, frame: Frame | wire.Located) -> Landing | None:
        """None where it crossed with our Cancel; raises ProtocolError."""
        if frame.id > self.last_id:
            raise ProtocolError(f"{self._who} sent a frame that nobody asked for")
        return self._asked.get(frame.id)

    def _landed(self, link: Connection, landing: Landing, num_bytes: int) -> None:
        self._counts["landed_bytes"] += num_bytes
        if landing.is_complete:
            self._end(landing, None)
            return
        # Early enough that the worker goes on while the rest of the window is placed. A frame has
        # room in the other half, whatever is not credited yet.
        least_bytes = min(self._config.window_bytes, link.window_bytes) // 2
        if placed_bytes := landing.take_credit(least_bytes):
            link.send(wire.Credit(id=landing.id, num_bytes=placed_bytes))

    def _stop(self, link: Connection, id: int, error: FetchError) -> None:
        """What came for it could not be taken."""
        landing = self._asked[id]
        if isinstance(error, ProtocolError):
            self._break(link, landing, error)
        else:
            self._end(landing, error)
            link.send(wire.Cancel(id=id))

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
