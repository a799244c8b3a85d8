"""One way to a backend: slots for what goes it, and whether it is worth asking. A backend fails,
hangs, and recovers on its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from typing import Final

from cachetree import STALL_S, Calls, Clock, ModelId, PageHash, Step
from cachetree.transport import Backoff
from sglang_droidspeak.engine.hicache import Backend
from sglang_droidspeak.hicache.objects import Objects, Piece

log = logging.getLogger(__name__)

_KEYS_PER_CALL: Final = 128
"""As many as SGLang asks about at once."""
MAX_FAILURES: Final = 3
"""In a row; then nothing is asked for a while."""
MIN_PAUSE_S: Final = 30.0


class Lane:
    """For reading, or for writing; `slots` are its own. Thread-safe, but one thread moves objects.

    Every call may hang, or raise whatever the backend raises; the caller says how it went.
    """

    def __init__(
        self, purpose: str, backend: Backend, objects: Objects, slots: range, clock: Clock
    ) -> None:
        self._purpose: Final = purpose
        self._backend: Final = backend
        self._objects: Final = objects
        self._slots: Final = slots
        self._clock: Final = clock
        self._lock = threading.Lock()
        self._calls: Final = Calls(clock, STALL_S)
        self._num_failures = 0
        self._pauses: Final = Backoff(MIN_PAUSE_S)
        self._paused_until_s = 0.0
        self.longest_answer_s = 0.0
        """Of `num_leading`, since the thread that calls it set this to 0."""

    @property
    def is_paused(self) -> bool:
        """Nothing should be asked now: it failed of late, or a call hangs."""
        return self._clock() < self._paused_until_s or self._calls.have_stalled

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

    def num_leading(self, model: ModelId, pages: Sequence[PageHash], step: Step) -> int:
        """How many of the first pages have this step in the backend."""
        for start in range(0, len(pages), _KEYS_PER_CALL):
            part = pages[start : start + _KEYS_PER_CALL]
            keys = [self._objects.key(model, page, step) for page in part]
            begun_at_s = self._clock()
            with self._calls:
                num = self._backend.num_leading(keys)
            self.longest_answer_s = max(self.longest_answer_s, self._clock() - begun_at_s)
            if num < len(keys):
                return start + max(0, num)
        return len(pages)

    def batches(
        self, model: ModelId, pages: Sequence[PageHash], steps: Sequence[Step]
    ) -> Iterator[list[Piece]]:
        """The objects of all pages at each step in turn, as many at a time as there are slots."""
        named = ((step, index, page) for step in steps for index, page in enumerate(pages))
        while some := list(islice(named, len(self._slots))):
            pieces = []
            for (step, index, page), slot in zip(some, self._slots, strict=False):
                memory = self._backend.slots[slot][: self._objects.size(step)]
                key = self._objects.key(model, page, step)
                pieces.append(Piece(index, step, key, slot, memory))
            yield pieces

    def read(self, batch: Sequence[Piece]) -> list[tuple[Piece, bool]]:
        """Fill their slots; which of them were there."""
        with self._calls:
            found = self._backend.read(*self._told(batch))
        return list(zip_longest(batch, found[: len(batch)], fillvalue=False))

    def write(self, batch: Sequence[Piece]) -> bool:
        """Store their slots; False where one of them was not taken."""
        with self._calls:
            return self._backend.write(*self._told(batch))

    def _told(self, batch: Sequence[Piece]) -> tuple[list[str], list[int], list[int]]:
        return (
            [it.key for it in batch],
            [it.slot for it in batch],
            [it.memory.nbytes for it in batch],
        )
