"""What became of objects, for the status, the metrics, and now and then the log."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from cachetree import Clock
from cachetree.transport import LogLimiter

log = logging.getLogger(__name__)

Count = Callable[[str, int], None]
"""Takes a result and how many objects had it."""


class Counts:
    """Thread-safe, but for damage, which only the reader's thread sees."""

    def __init__(self, outside: Count, clock: Clock) -> None:
        self._outside: Final = outside
        self._lock: Final = threading.Lock()
        self._by_result: Final[Counter[str]] = Counter()
        self._lines: Final = LogLimiter(clock)

    def add(self, result: str, num: int = 1) -> None:
        with self._lock:
            self._by_result[result] += num
        self._outside(result, num)

    def add_damaged(self, key: str) -> None:
        self.add("damaged")
        if self._lines.may("damage"):
            log.warning(
                "object %s of the HiCache backend is damaged or not ours; others that are found "
                "within %.0f s are counted and not logged",
                key,
                LogLimiter.EVERY_S,
            )

    def by_result(self) -> dict[str, int]:
        with self._lock:
            return dict(self._by_result)
