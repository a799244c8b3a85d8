"""How long to wait before the next attempt to reach a worker."""

from __future__ import annotations

import random

from cachetree.transport.config import PeerConfig


class Pauses:
    """Random, so that not all who lost a worker come back at once; longer each time."""

    def __init__(self, config: PeerConfig) -> None:
        self._config = config
        self._most_s = config.reconnect_s

    def next_s(self) -> float:
        pause_s = random.uniform(0.0, self._most_s)
        self._most_s = min(2 * self._most_s, self._config.max_reconnect_s)
        return pause_s

    def reset(self) -> None:
        """It was reached."""
        self._most_s = self._config.reconnect_s
