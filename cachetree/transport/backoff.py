"""Behaviour after failures: growing pauses, a breaker after many errors, and few log lines."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Final

from cachetree.clock import Clock
from cachetree.errors import CacheTreeError, without_frames
from cachetree.transport.config import PeerConfig


class Backoff:
    """Pauses between attempts. Each is twice as long as the last, up to ten times the first."""

    def __init__(self, first_s: float) -> None:
        self._first_s = self._next_s = first_s

    def next_s(self) -> float:
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, 10 * self._first_s)
        return pause_s

    def drawn_s(self) -> float:
        """Return a random part of the next pause, in seconds, so that peers of a lost worker do not
        all return at once."""
        return random.uniform(0.0, self.next_s())

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._next_s = self._first_s


class Breaker:
    """Stop fetches from a worker if errors come too fast. Later let one fetch (the probe) try.

        closed ── breaker_errors within breaker_window_s ──► open
        open ── the cooldown is over ──► half open: `admits` one fetch, the probe
        half open ── `succeeded` ──► closed, the cooldown is cooldown_s again
        half open ── `failed` ──► open, the cooldown doubled up to ten times cooldown_s

    Used by one thread; any thread may read the properties.
    """

    def __init__(self, config: PeerConfig, clock: Clock) -> None:
        self._config: Final = config
        self._clock = clock
        self._errors_at_s: deque[float] = deque(maxlen=config.breaker_errors)
        self._cooldowns = Backoff(config.cooldown_s)
        self._probe_at_s: float | None = None
        """Time at which the cooldown ends, or has ended. None while the breaker is closed."""
        self._is_probing = False
        self.error: CacheTreeError | None = None
        """The last counted error."""

    @property
    def probe_in_s(self) -> float | None:
        """Seconds until a probe may start: 0 while half open, None while closed."""
        probe_at_s = self._probe_at_s
        return None if probe_at_s is None else max(0.0, probe_at_s - self._clock())

    @property
    def is_open(self) -> bool:
        return bool(self.probe_in_s)

    def admits(self) -> bool:
        """Return whether a fetch may start now. If the breaker is half open, one fetch may: the
        probe."""
        if self.is_open or self._is_probing:
            return False
        self._is_probing = self._probe_at_s is not None
        return True

    def failed(self, error: CacheTreeError) -> None:
        """Count an error of the worker or of the link. Does nothing while the breaker is open."""
        if self.is_open:
            return
        self.error = without_frames(error)
        now_s = self._clock()
        if self._probe_at_s is not None:
            self._open(now_s)
            return
        self._errors_at_s.append(now_s)
        is_full = len(self._errors_at_s) == self._errors_at_s.maxlen
        if is_full and now_s - self._errors_at_s[0] <= self._config.breaker_window_s:
            self._open(now_s)

    def succeeded(self) -> None:
        if self._is_probing:
            self._is_probing = False
            self._probe_at_s = None
            self._cooldowns.reset()

    def released(self) -> None:
        """Note that a fetch has ended without showing whether the worker works. If it was the
        probe, the next fetch may be the probe."""
        self._is_probing = False

    def _open(self, now_s: float) -> None:
        self._errors_at_s.clear()
        self._is_probing = False
        self._probe_at_s = now_s + self._cooldowns.next_s()


class LogLimiter:
    """Limit log lines about other servers: one line a minute for each name, and at most `MAX_NAMES`
    names a minute."""

    EVERY_S: Final = 60.0
    MAX_NAMES: Final = 256

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._said_at_s: dict[str, float] = {}

    def may(self, who: str) -> bool:
        now_s = self._clock()
        for name, said_at_s in tuple(self._said_at_s.items()):  # Oldest first.
            if now_s - said_at_s < self.EVERY_S:
                break
            del self._said_at_s[name]
        if who in self._said_at_s or len(self._said_at_s) >= self.MAX_NAMES:
            return False
        self._said_at_s[who] = now_s
        return True
