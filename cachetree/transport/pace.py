"""Rates of links: a worker's limit for sending, and the bandwidth that a peer measures."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from cachetree.clock import Clock
from cachetree.errors import Cancelled, DeadlineExceeded, FetchError
from cachetree.planning import FREE_LINK, Link, Margin, most_of, weighted_median
from cachetree.transport.frames import MIN_FRAME_BYTES

MAX_LAG_S = 0.05
"""A sending thread that ran late may catch up the bytes of at most this many seconds."""

FRAME_S = 0.01
"""Largest number of seconds that a frame takes under a rate limit, to keep the rate smooth."""


class Cap:
    """Limit a rate evenly to `bytes_per_s`: decide when the next frame may start, and its size."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        """`bytes_per_s` of infinity means no limit."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_s = clock()

    def delay_s(self) -> float:
        """Return the seconds until the next frame may be sent; 0 means now."""
        return max(0.0, self._free_at_s - self._clock())

    def limit(self, frame_bytes: int) -> int:
        """Return the largest size of a frame, at most `frame_bytes`."""
        return int(min(frame_bytes, max(MIN_FRAME_BYTES, self._bytes_per_s * FRAME_S)))

    def spend(self, num_bytes: int) -> None:
        start_s = max(self._free_at_s, self._clock() - MAX_LAG_S)
        self._free_at_s = start_s + num_bytes / self._bytes_per_s

    def idle(self) -> None:
        """Note that there was nothing to send until now. Later frames may not use the lost time."""
        self._free_at_s = max(self._free_at_s, self._clock())


class Bandwidth:
    """Measure one link from recent fetches: a fixed time per fetch, and a time per byte.

    From each short fetch we subtract the time of its bytes. Two thirds of the differences do not
    exceed the fixed time. The time per byte is a median, in which fetches with mostly bytes count
    more. So one stalled fetch changes little. If two fetches in a row were much slower or much
    faster than predicted, the link has changed, and older samples are dropped.

    Plans avoid a slow link, and so would never learn that it has recovered. So after `MAX_AGE_S`
    without a sample, the link counts as twice as fast for every further `MAX_AGE_S`, up to a
    million times. One thread samples at a time; any thread may read.
    """

    MAX_AGE_S = 60.0
    MIN_SAMPLE_BYTES = 256 << 10
    _NUM_KEPT = 16
    _CHANGED = 1.5
    """If measured and predicted time differ by more than this factor, the link has changed."""
    _SHORT_S = 0.01
    """Largest number of seconds that the bytes of a short fetch take. The rest of a short fetch's
    time measures the fixed time. In longer fetches the rest is noise."""
    _TRIP_S = 0.0005
    """Seconds of a round trip in one rack, assumed until a short fetch was measured."""
    _LONG = 4.0
    """Least ratio of the time of a fetch's bytes to the fixed time. A fetch below this ratio does
    not show how good predictions are."""
    _ROUNDS = 4
    _MOST_DOUBLINGS = 20.0
    _MIN_LATE_S = 0.1
    _MIN_GIVEN_UP_S = 0.01
    """A fetch that its reader gave up can be a sample after this many seconds. A fetch that missed
    its deadline can be one after `_MIN_LATE_S`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[int, float]] = deque(maxlen=self._NUM_KEPT)
        self._margin = Margin()
        self._off = 0
        """1 if the last sample was much slower than predicted, -1 if much faster, otherwise 0."""
        self._known: tuple[Link, float] | None = None
        """The measured link, and the time of its last sample."""

    @property
    def bytes_per_s(self) -> float | None:
        """Measured bytes per second. None if there was no sample for `MAX_AGE_S`."""
        known = self._known
        if known is None or self._clock() - known[1] > self.MAX_AGE_S:
            return None
        return 1 / known[0].byte_s

    @property
    def link(self) -> Link | None:
        """Measured link, for a fetch that shares it with no other. None before any sample."""
        if self._known is None:
            return None
        known, sampled_at_s = self._known
        doublings = max(0.0, (self._clock() - sampled_at_s) / self.MAX_AGE_S - 1)
        faster = 2.0 ** min(doublings, self._MOST_DOUBLINGS)
        fixed_s = (known.fixed_s or self._TRIP_S) / faster
        return replace(known, byte_s=known.byte_s / faster, fixed_s=fixed_s)

    def note(self, num_bytes: int, seconds: float, error: FetchError | None) -> None:
        """Record a fetch that has ended: completely, or with `error`. Fetches that say nothing
        about the link are ignored."""
        is_late = isinstance(error, DeadlineExceeded) and seconds >= self._MIN_LATE_S
        is_given_up = isinstance(error, Cancelled) and seconds >= self._MIN_GIVEN_UP_S
        link = self.link or FREE_LINK
        was_due = seconds >= link.fixed_s + link.seconds(self.MIN_SAMPLE_BYTES)
        if num_bytes >= self.MIN_SAMPLE_BYTES or (was_due and (is_late or is_given_up)):
            self.sample(num_bytes, seconds)

    def sample(self, num_bytes: int, seconds: float) -> None:
        """Record that the link carried `num_bytes` during the seconds of one fetch.

        Bytes below `MIN_SAMPLE_BYTES` count as `MIN_SAMPLE_BYTES`. The caller leaves out short
        complete fetches, because these measure the round trip only.
        """
        num_bytes, seconds = max(num_bytes, self.MIN_SAMPLE_BYTES), max(seconds, 1e-9)
        if self._known is not None:
            known, _ = self._known
            bytes_s = num_bytes * known.byte_s
            if bytes_s >= self._LONG * known.fixed_s:  # Shorter fetches vary with the round trip.
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
            # At least half of a fetch's time counts for its bytes.
            byte_s = weighted_median(
                (max(s - fixed_s, s / 2) / n, n * byte_s / (fixed_s + n * byte_s))
                for n, s in self._samples
            )
        return Link(byte_s=byte_s, fixed_s=fixed_s, margin=self._margin.factor)
