"""Deadlines: points in time after which no thread waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Returns seconds on a monotonic clock."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Absolute time on `clock`; waits take the time that remains until it."""

    at_s: float
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """Return the deadline that is `seconds` from now."""
        return cls(clock() + seconds, clock)

    def remaining_s(self) -> float:
        """Seconds left; never negative, nor longer than a thread can wait."""
        return min(max(0.0, self.at_s - self.clock()), threading.TIMEOUT_MAX)

    @property
    def has_passed(self) -> bool:
        """True from `at_s` on."""
        return self.clock() >= self.at_s
