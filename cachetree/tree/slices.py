"""Long work on a tree, in slices between which others have its lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

SLICE: Final = 16
"""Steps, most of which look at one node, before others may have the lock."""
_PAUSE_S: Final = 50e-6
"""Between two slices. A lock is not fair: whoever waits for it gets it while nobody wants it."""


def in_slices(lock: threading.Lock, steps: Iterator[T], num_at_once: int = SLICE) -> Iterator[T]:
    """What the steps say, which are done with the lock held, so many at once, as that is asked."""
    while True:
        with lock:
            some = list(islice(steps, num_at_once))
        yield from some
        if len(some) < num_at_once:
            return
        time.sleep(_PAUSE_S)


def run_in_slices(lock: threading.Lock, steps: Iterator[object], num_at_once: int = SLICE) -> None:
    """Do all of them."""
    for _ in in_slices(lock, steps, num_at_once):
        pass
