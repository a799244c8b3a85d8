"""What became of objects, for the status, the metrics, and now and then the log."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from cachetree import Clock

log = logging.getLogger(__name__)

QUIET_S: Final = 60.0
"""Between two lines of the log on damage."""

Count = Callable[[str, int], None]
"""Takes a result and how many objects had it."""


class Counts:
    """Thread-safe."""

    def __init__(self, outside: Count, clock: Clock) -> None:
        self._outside = outside
        self._clock = clock
        self._lock = threading.Lock()
        self._by_result: Counter[str] = Counter()
        self._quiet_until_s = 0.0

    def add(self, result: str, num: int = 1) -> None:
        with self._lock:
            self._by_result[result] += num
        self._outside(result, num)

    def add_damaged(self, key: str) -> None:
        self.add("damaged")
        with self._lock:
            if self._clock() < self._quiet_until_s:
                return
            self._quiet_until_s = self._clock() + QUIET_S
        log.warning(
            "object %s of the HiCache backend is damaged or not ours; others that are found within "
            "%.0f s are counted and not logged",
            key,
            QUIET_S,
        )

    def by_result(self) -> dict[str, int]:
        with self._lock:
            return dict(self._by_result)
