"""How long to wait before the next attempt."""

from __future__ import annotations

import random


class Backoff:
    """Twice as long each time, up to a bound."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._most_s = most_s

    def next_s(self) -> float:
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._most_s)
        return pause_s

    def drawn_s(self) -> float:
        """Between 0 and the next one, so that not all who lost a worker come back at once."""
        return random.uniform(0.0, self.next_s())

    def reset(self) -> None:
        """It went well."""
        self._next_s = self._first_s
