"""What a cache asks of a further place that keeps entries: a disk, a store of the cluster."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from cachetree.clock import Deadline
from cachetree.ids import Location, ModelId, PageHash
from cachetree.memory import Staging
from cachetree.tree import CacheTree

_NICENESS: Final = 10

NoteSpeed = Callable[[int, float], None]
"""Takes bytes read and the seconds that they took."""


class Search:
    """A question to a tier: over when what it found is in the tree, or at its deadline."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline: Final = deadline
        self._answered = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether nobody need wait for it any more."""
        return self._answered.is_set() or self.deadline.has_passed

    def end(self) -> None:
        """The tier has answered; from any thread."""
        self._answered.set()


class Tier(Protocol):
    """Keeps entries at a location of its own, and shows the tree which.

    It learns of new entries from the tree. `fetch`, `note_use` and `search` return at once and
    raise nothing; whatever goes wrong is a miss.
    """

    @property
    def location(self) -> Location:
        """Of its entries, in the tree and in plans; it never changes."""

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        """Fill `staging` in a thread of its own; what goes wrong fails it."""

    def note_use(self, model: ModelId, pages: Sequence[PageHash]) -> None:
        """These pages were read from memory: here too they are not the ones to go."""

    def search(self, pages: Sequence[PageHash]) -> Search:
        """Find out how much of a prompt is here; over at once where the tree knows already."""

    def status(self) -> msgspec.Struct:
        """What an operator is shown; from any thread."""

    def close(self) -> None:
        """Idempotent; takes seconds at most."""


MakeTier = Callable[[CacheTree, NoteSpeed], Tier]
"""Raises ConfigError where the tier cannot work."""


def give_way() -> None:
    """Have the calling thread run after others, where the system can tell threads apart.

    Nor does it take a processor from whoever computes there when it wakes (`SCHED_BATCH`).
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
