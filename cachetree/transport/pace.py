"""Rates: a worker's cap, and the bandwidth that a peer measures."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from cachetree.clock import Clock
from cachetree.errors import Cancelled, DeadlineExceeded, FetchError
from cachetree.planning import FREE_LINK, Link, Margin, most_of, weighted_median
from cachetree.transport.frames import MIN_FRAME_BYTES

MAX_LAG_S = 0.05
"""Seconds that a busy link may catch up after its thread was not scheduled."""

FRAME_S = 0.01
"""Longest time of a frame in seconds under a cap, so that a slow link stays smooth."""


class Cap:
    """Decides when the next frame may be sent and how large it may be: at most `bytes_per_s`,
    evenly."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        """Infinity means no cap."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_s = clock()

    def delay_s(self) -> float:
        """Seconds until the next frame may be sent; 0 for now."""
        return max(0.0, self._free_at_s - self._clock())

    def limit(self, frame_bytes: int) -> int:
        """Largest frame of at most `frame_bytes`."""
        return int(min(frame_bytes, max(MIN_FRAME_BYTES, self._bytes_per_s * FRAME_S)))

    def spend(self, num_bytes: int) -> None:
        start_s = max(self._free_at_s, self._clock() - MAX_LAG_S)
        self._free_at_s = start_s + num_bytes / self._bytes_per_s

    def idle(self) -> None:
        """Note that nothing waits to be sent: unused time is not saved up."""
        self._free_at_s = max(self._free_at_s, self._clock())


class Bandwidth:
    """Measures one link from recent fetches: a fixed time per fetch, and a time per byte.

    One stalled fetch changes neither, unless it completed and no other was short. If two in a row
    were much slower or much faster than predicted, the link has changed, and older samples are
    dropped. The fixed time is what two thirds of short fetches did not exceed beside their bytes.
    The rate is a median, in which a fetch weighs as much as its bytes are of its time.

    A plan that avoids a slow link would never learn that it recovered. So the link counts as twice
    as fast for every `MAX_AGE_S` without a sample after the first, up to a million times. One
    thread samples at a time; any thread may read.
    """

    MAX_AGE_S = 60.0
    MIN_SAMPLE_BYTES = 256 << 10
    _NUM_KEPT = 16
    _CHANGED = 1.5
    """Factor between time and prediction, either way, that shows a change of the link."""
    _SHORT_S = 0.01
    """Most seconds that a short fetch takes for its bytes. The rest of its time is the fixed time;
    in longer fetches the rest is noise."""
    _TRIP_S = 0.0005
    """Seconds of a round trip in one rack; used until a short fetch shows another."""
    _LONG = 4.0
    """Least time for its bytes, in fixed times, of a fetch that measures the rate."""
    _ROUNDS = 4
    _MOST_DOUBLINGS = 20.0
    _MIN_LATE_S = 0.1
    _MIN_GIVEN_UP_S = 0.01
    """Seconds of the shortest fetch that says something about the link although its reader gave it
    up. If it missed its deadline, the limit is `_MIN_LATE_S`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[int, float]] = deque(maxlen=self._NUM_KEPT)
        self._margin = Margin()
        self._off = 0
        """1 after a sample much slower than predicted, -1 after one much faster, otherwise 0."""
        self._known: tuple[Link, float] | None = None
        """The measured link, and the time of its last sample."""

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second; None if there was no sample for `MAX_AGE_S`."""
        known = self._known
        if known is None or self._clock() - known[1] > self.MAX_AGE_S:
            return None
        return 1 / known[0].byte_s

    @property
    def link(self) -> Link | None:
        """Return the link without running fetches; None until something was measured."""
        if self._known is None:
            return None
        known, sampled_at_s = self._known
        doublings = max(0.0, (self._clock() - sampled_at_s) / self.MAX_AGE_S - 1)
        faster = 2.0 ** min(doublings, self._MOST_DOUBLINGS)
        fixed_s = (known.fixed_s or self._TRIP_S) / faster
        return replace(known, byte_s=known.byte_s / faster, fixed_s=fixed_s)

    def note(self, num_bytes: int, seconds: float, error: FetchError | None) -> None:
        """Sample a fetch that has ended, with this error or None, if it says something about the
        link."""
        is_late = isinstance(error, DeadlineExceeded) and seconds >= self._MIN_LATE_S
        is_given_up = isinstance(error, Cancelled) and seconds >= self._MIN_GIVEN_UP_S
        link = self.link or FREE_LINK
        was_due = seconds >= link.fixed_s + link.seconds(self.MIN_SAMPLE_BYTES)
        if num_bytes >= self.MIN_SAMPLE_BYTES or (was_due and (is_late or is_given_up)):
            self.sample(num_bytes, seconds)

    def sample(self, num_bytes: int, seconds: float) -> None:
        """Sample the bytes that the link carried during one fetch.

        Fewer than `MIN_SAMPLE_BYTES` measure the round trip, so leave them out. If a fetch was
        given up, few bytes only say that the others had not arrived, not how long a complete fetch
        takes.
        """
        num_bytes, seconds = max(num_bytes, self.MIN_SAMPLE_BYTES), max(seconds, 1e-9)
        if self._known is not None:
            known, _ = self._known
            bytes_s = num_bytes * known.byte_s
            if bytes_s >= self._LONG * known.fixed_s:  # Otherwise it shows how round trips vary.
                self._margin.add(seconds, known.fixed_s + bytes_s)
            self._forget_another_link(seconds / (known.fixed_s + bytes_s))
        self._samples.append((num_bytes, seconds))
        self._known = self._fit(), self._clock()

    def _forget_another_link(self, ratio: float) -> None:
        off = int(ratio > self._CHANGED) - int(ratio < 1 / self._CHANGED)
        if off and off == self._off:
            last = self._samples[-1]
            self._samples.clear()
            self._samples.append(last)
        self._off = off

    def _fit(self) -> Link:
        fixed_s, byte_s = 0.0, weighted_median((s / n, n) for n, s in self._samples)
        for _ in range(self._ROUNDS):
            short = (it for it in self._samples if it[0] * byte_s <= self._SHORT_S)
            trips_s = (s - n * byte_s for n, s in short if n > self.MIN_SAMPLE_BYTES)
            fixed_s = max(0.0, most_of(trips_s) or 0.0)
            # If all of it were fixed time, a fetch would say nothing about its bytes.
            byte_s = weighted_median(
                (max(s - fixed_s, s / 2) / n, n * byte_s / (fixed_s + n * byte_s))
                for n, s in self._samples
            )
        return Link(byte_s=byte_s, fixed_s=fixed_s, margin=self._margin.factor)
