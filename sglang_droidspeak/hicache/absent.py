"""Which pages a storage backend does not have, for a while."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from cachetree import Clock, ModelId, PageHash, Part

MAX_ABSENT: Final = 1 << 16


class AbsentPages:
    """Pages that were not there, and until when that is believed. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: OrderedDict[tuple[ModelId, Part, PageHash], float] = OrderedDict()

    def add(self, model: ModelId, part: Part, page: PageHash, seconds: float) -> None:
        with self._lock:
            self._until_s.pop((model, part, page), None)
            self._until_s[model, part, page] = self._clock() + seconds
            if len(self._until_s) > MAX_ABSENT:
                self._until_s.popitem(last=False)

    def has(self, model: ModelId, part: Part, page: PageHash) -> bool:
        return self._until_s.get((model, part, page), 0.0) > self._clock()
