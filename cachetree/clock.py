"""A point in time after which nobody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Seconds on a monotonic clock."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Absolute time on `clock`; waits take what remains of it."""

    at_s: float
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """So many seconds from now."""
        return cls(clock() + seconds, clock)

    def remaining_s(self) -> float:
        """Never negative, nor longer than a thread can wait."""
        return min(max(0.0, self.at_s - self.clock()), threading.TIMEOUT_MAX)

    @property
    def has_passed(self) -> bool:
        """True from `at_s` on."""
        return self.clock() >= self.at_s
