"""Wakes an I/O thread that waits in a poller."""

from __future__ import annotations

import select
import socket
import threading
from typing import Final

CLOSE_S: Final = 5.0
"""How long a thread that was woken to end may take."""


class Wakeup:
    """`wake` is called from any thread and never blocks; `drain` by the thread that was woken."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._is_pending = False
        self._is_closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with self._lock:
            if not self._is_pending and not self._is_closed:
                self._is_pending = True
                self._writer.send(b"\0")

    def wait(self, timeout_s: float) -> None:
        """Until `wake`, or until the time is over."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def drain(self) -> None:
        """Call before looking at what was queued, so that no later wake is lost."""
        with self._lock:
            if self._is_pending:
                self._is_pending = False
                self._reader.recv(16)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._reader.close()
            self._writer.close()
