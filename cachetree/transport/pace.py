"""Rates: the cap a worker keeps, and the bandwidth a peer measures."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from cachetree.clock import Clock
from cachetree.planning import Link, Margin
from cachetree.transport.frames import MIN_FRAME_BYTES

MAX_LAG_S = 0.05
"""How far a busy link may catch up after its thread was not scheduled."""

FRAME_S = 0.01
"""Under a cap a frame takes at most this long, so that a slow link stays smooth."""


class Cap:
    """When the next frame may go, and how large it may be: at most `bytes_per_s`, evenly."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        """Infinity for no cap."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_s = clock()

    def delay_s(self) -> float:
        """Seconds until the next frame may be sent; 0 for now."""
        return max(0.0, self._free_at_s - self._clock())

    def limit(self, frame_bytes: int) -> int:
        """The largest frame of at most `frame_bytes`."""
        return int(min(frame_bytes, max(MIN_FRAME_BYTES, self._bytes_per_s * FRAME_S)))

    def spend(self, num_bytes: int) -> None:
        start_s = max(self._free_at_s, self._clock() - MAX_LAG_S)
        self._free_at_s = start_s + num_bytes / self._bytes_per_s

    def idle(self) -> None:
        """Nothing waits to be sent: unused time is not saved up."""
        self._free_at_s = max(self._free_at_s, self._clock())


class Bandwidth:
    """What recent fetches achieved on one link: their median, the latest counting most.

    One that stalled does not move it, two in a row that were slow do. A plan that avoids a slow
    link would never learn that it recovered: it is taken to be twice as fast for every `MAX_AGE_S`
    beyond the first without a sample. One thread samples, any may read.
    """

    MAX_AGE_S = 60.0
    MIN_SAMPLE_BYTES = 256 << 10
    _NUM_KEPT = 8
    _FADE = 0.75
    """Of a sample's weight with each that follows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=self._NUM_KEPT)
        self._margin = Margin()
        self._known: tuple[float, float, float] | None = None
        """Bytes per second, the margin, and when they were sampled."""

    @property
    def bytes_per_s(self) -> float | None:
        """None where there was no sample for `MAX_AGE_S`."""
        if self._known is None or self._clock() - self._known[2] > self.MAX_AGE_S:
            return None
        return self._known[0]

    @property
    def link(self) -> Link | None:
        """With nothing under way; None where nothing was measured yet."""
        if self._known is None:
            return None
        rate, margin, sampled_at_s = self._known
        age_s = self._clock() - sampled_at_s
        rate *= 2.0 ** max(0.0, age_s / self.MAX_AGE_S - 1)
        return Link(byte_s=1 / rate, margin=margin)

    def sample(self, num_bytes: int, seconds: float) -> None:
        """Bytes that the link carried while one fetch lived.

        Less than `MIN_SAMPLE_BYTES` measures the round trip: leave it out, or where a fetch was
        given up, it says that these had not come.
        """
        rate = max(num_bytes, self.MIN_SAMPLE_BYTES) / max(seconds, 1e-9)
        if self._known is not None:
            self._margin.add(1 / rate, 1 / self._known[0])
        self._rates.append(rate)
        weights = [self._FADE**age for age in range(len(self._rates))]
        newest_first = zip(reversed(self._rates), weights, strict=True)
        median = weighted_median(sorted(newest_first))
        self._known = (median, self._margin.factor, self._clock())


def weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight), ascending."""
    until = list(accumulate(weight for _, weight in pairs))
    return pairs[bisect_left(until, until[-1] / 2)][0]
