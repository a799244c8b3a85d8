"""Deadlines: points in time after which no thread waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Function that returns seconds on a monotonic clock."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time on `clock` after which a wait gives up. Waits take `remaining_s()` as their timeout."""

    at_s: float
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """Return the deadline that is `seconds` from now."""
        return cls(clock() + seconds, clock)

    def remaining_s(self) -> float:
        """Return the seconds left, at least 0 and at most as long as a thread can wait."""
        return min(max(0.0, self.at_s - self.clock()), threading.TIMEOUT_MAX)

    @property
    def has_passed(self) -> bool:
        """Whether the time is over. True from `at_s` on."""
        return self.clock() >= self.at_s
