"""One way to a backend: slots for what goes it, and a breaker before it, which says whether it is
worth asking: a backend fails, hangs, and recovers on its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cachetree import Clock, ModelId, PageHash, Step
from cachetree.transport import Backoff
from sglang_droidspeak.engine.hicache import Backend
from sglang_droidspeak.hicache.objects import Objects, Piece

log = logging.getLogger(__name__)

Count = Callable[[str, int], None]
"""Takes a result, and how many objects had it; from any thread."""

_KEYS_PER_CALL: Final = 128
"""As many as SGLang asks about at once."""
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
        self.longest_answer_s = 0.0
        """Of a lane's `num_leading`, since the thread that calls it set this to 0."""

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


@dataclass(frozen=True, slots=True)
class Lane:
    """Every call may hang, or raise whatever the backend raises."""

    backend: Backend
    objects: Objects
    slots: range
    breaker: Breaker
    count: Count
    clock: Clock

    def num_leading(self, model: ModelId, pages: Sequence[PageHash], step: Step) -> int:
        """How many of the first pages have this step in the backend."""
        for start in range(0, len(pages), _KEYS_PER_CALL):
            part = pages[start : start + _KEYS_PER_CALL]
            keys = [self.objects.key(model, page, step) for page in part]
            begun_at_s = self.clock()
            with self.breaker.call():
                num = self.backend.num_leading(keys)
            took_s = self.clock() - begun_at_s
            self.breaker.longest_answer_s = max(self.breaker.longest_answer_s, took_s)
            if num < len(keys):
                return start + max(0, num)
        return len(pages)

    def batches(
        self, model: ModelId, pages: Sequence[PageHash], steps: Sequence[Step]
    ) -> Iterator[list[Piece]]:
        """The objects of all pages at each step in turn, as many at a time as there are slots."""
        pieces = (
            Piece(index, step, self.objects.key(model, page, step))
            for step in steps
            for index, page in enumerate(pages)
        )
        while batch := list(islice(pieces, len(self.slots))):
            yield batch

    def memory(self, index: int) -> memoryview:
        """Where the object of that index in a batch lies."""
        return self.backend.slots[self.slots[index]]

    def read(self, batch: Sequence[Piece]) -> Sequence[bool]:
        """Fill as many slots; which of the objects were there."""
        keys, slots, sizes = self._told(batch)
        with self.breaker.call():
            return self.backend.read(keys, slots, sizes)

    def write(self, batch: Sequence[Piece]) -> bool:
        """Store as many slots; False where one of them was not taken."""
        keys, slots, sizes = self._told(batch)
        with self.breaker.call():
            return self.backend.write(keys, slots, sizes)

    def _told(self, batch: Sequence[Piece]) -> tuple[list[str], range, list[int]]:
        sizes = [self.objects.size(it.step) for it in batch]
        return [it.key for it in batch], self.slots[: len(batch)], sizes
