"""Wake a thread that waits in a poller."""

from __future__ import annotations

import os
import threading
from typing import Final

CLOSE_S: Final = 5.0
"""Seconds after which `close` no longer waits for a thread to end."""


class Wakeup:
    """Event that wakes a thread from its poller. Any thread calls `wake`, which never blocks. The
    woken thread calls `drain`."""

    def __init__(self) -> None:
        self._counter = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._is_pending = False
        self._is_closed = False

    def fileno(self) -> int:
        return self._counter

    def wake(self) -> None:
        with self._lock:
            if not self._is_pending and not self._is_closed:
                self._is_pending = True
                os.eventfd_write(self._counter, 1)

    def drain(self) -> None:
        """Reset the event. Call it before reading the queue, so that no later wake is lost."""
        with self._lock:
            if self._is_pending:
                self._is_pending = False
                os.eventfd_read(self._counter)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._counter)
