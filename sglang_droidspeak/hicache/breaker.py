"""Whether a backend is worth asking: it fails, hangs, and recovers on its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Final

from cachetree import Clock
from cachetree.transport import Backoff

log = logging.getLogger(__name__)

MAX_FAILURES: Final = 3
"""In a row; then nothing is asked for a while."""
MIN_PAUSE_S: Final = 30.0
STALL_S: Final = 2.0
"""A call that takes longer hangs; until it ends, nothing more is asked."""


class Breaker:
    """Every call to the backend for one purpose runs inside `call`. Thread-safe."""

    def __init__(self, purpose: str, clock: Clock) -> None:
        self._purpose: Final = purpose
        self._clock = clock
        self._lock = threading.Lock()
        self._begun_at_s: dict[int, float] = {}
        self._num_failures = 0
        self._pauses: Final = Backoff(MIN_PAUSE_S)
        self._paused_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """Nothing should be asked now."""
        now = self._clock()
        with self._lock:
            oldest = min(self._begun_at_s.values(), default=now)
        return now < self._paused_until_s or now - oldest > STALL_S

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Time what runs inside; the caller says how it went."""
        thread = threading.get_ident()
        with self._lock:
            self._begun_at_s[thread] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._begun_at_s[thread]

    def fail(self, cause: object) -> None:
        with self._lock:
            self._num_failures += 1
            if self._num_failures % MAX_FAILURES:
                return
            pause_s = self._pauses.next_s()
            self._paused_until_s = self._clock() + pause_s
        log.warning(
            "the HiCache backend fails at %s (%s); it is asked again in %.0f s",
            self._purpose,
            cause,
            pause_s,
        )

    def succeed(self) -> None:
        with self._lock:
            self._num_failures = 0
            self._pauses.reset()
