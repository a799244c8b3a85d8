"""Long work on a tree in slices; other threads get its lock in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

SLICE: Final = 16
"""Number of steps (of a caller's generator) in one slice. Most look at one node."""
_PAUSE_S: Final = 50e-6
"""Seconds between two slices. Without a pause, the next slice would often take the lock before
threads that wait."""


def in_slices(lock: threading.Lock, steps: Iterator[T], num_at_once: int = SLICE) -> Iterator[T]:
    """Run the steps as the caller asks for their results, and yield the results. The lock is held
    during each slice of `num_at_once` steps, and free between slices."""
    while True:
        with lock:
            some = list(islice(steps, num_at_once))
        yield from some
        if len(some) < num_at_once:
            return
        time.sleep(_PAUSE_S)


def run_in_slices(lock: threading.Lock, steps: Iterator[object], num_at_once: int = SLICE) -> None:
    """Run all steps, in slices as `in_slices` does."""
    for _ in in_slices(lock, steps, num_at_once):
        pass
