"""Rates: the cap a worker keeps, and the bandwidth a peer measures."""

from __future__ import annotations

from typing import Protocol

from cachetree.clock import Clock
from cachetree.transport.frames import MIN_FRAME_BYTES

MAX_LAG_S = 0.05
"""How far a busy link may catch up after its thread was not scheduled."""

FRAME_S = 0.01
"""Under a cap a frame takes at most this long, so that a slow link stays smooth."""


class Pace(Protocol):
    """When the next frame may go, and how large it may be."""

    def delay_s(self) -> float:
        """Seconds until the next frame may be sent; 0 for now."""

    def limit(self, frame_bytes: int) -> int:
        """The largest frame under this pace."""

    def spend(self, num_bytes: int) -> None: ...

    def idle(self) -> None:
        """Nothing waits to be sent: unused time is not saved up."""


class Unlimited:
    """No cap."""

    def delay_s(self) -> float:
        return 0.0

    def limit(self, frame_bytes: int) -> int:
        return frame_bytes

    def spend(self, num_bytes: int) -> None:
        pass

    def idle(self) -> None:
        pass


class Cap:
    """At most `bytes_per_s`, evenly."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_s = clock()

    def delay_s(self) -> float:
        return max(0.0, self._free_at_s - self._clock())

    def limit(self, frame_bytes: int) -> int:
        return min(frame_bytes, max(MIN_FRAME_BYTES, int(self._bytes_per_s * FRAME_S)))

    def spend(self, num_bytes: int) -> None:
        start_s = max(self._free_at_s, self._clock() - MAX_LAG_S)
        self._free_at_s = start_s + num_bytes / self._bytes_per_s

    def idle(self) -> None:
        self._free_at_s = max(self._free_at_s, self._clock())


def pace(max_bytes_per_s: float | None, clock: Clock) -> Pace:
    return Unlimited() if max_bytes_per_s is None else Cap(max_bytes_per_s, clock)


class Bandwidth:
    """Exponentially weighted mean of what recent fetches achieved on one link.

    It is forgotten after `MAX_AGE_S` without a sample: a plan that avoids a slow link would
    otherwise never learn that it recovered.
    """

    MAX_AGE_S = 60.0
    MIN_SAMPLE_BYTES = 256 << 10
    WEIGHT = 0.3

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mean: float | None = None
        self._sampled_at_s = clock()

    @property
    def bytes_per_s(self) -> float | None:
        age_s = self._clock() - self._sampled_at_s
        return self._mean if age_s <= self.MAX_AGE_S else None

    def sample(self, num_bytes: int, seconds: float) -> None:
        """Bytes that the link carried while one fetch lived.

        Leave out what is under `MIN_SAMPLE_BYTES`: it measures the round trip.
        """
        rate = num_bytes / max(seconds, 1e-9)
        known = self.bytes_per_s
        self._mean = rate if known is None else known + self.WEIGHT * (rate - known)
        self._sampled_at_s = self._clock()
