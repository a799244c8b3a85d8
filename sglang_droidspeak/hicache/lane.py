"""One way to a backend: slots for what goes it, and a breaker before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from cachetree import Clock, ModelId, PageHash, Step
from sglang_droidspeak.hicache.breaker import Breaker
from sglang_droidspeak.hicache.objects import Objects, Piece

if TYPE_CHECKING:
    from sglang_droidspeak.engine.hicache import Backend

Count = Callable[[str, int], None]
"""Takes a result, and how many objects had it; from any thread."""

_KEYS_PER_CALL: Final = 128
"""As many as SGLang asks about at once."""


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
        with self.breaker.call():
            for start in range(0, len(pages), _KEYS_PER_CALL):
                part = pages[start : start + _KEYS_PER_CALL]
                keys = [self.objects.key(model, page, step) for page in part]
                num = self.backend.num_leading(keys)
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
