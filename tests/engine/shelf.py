"""A worker that is killed and started again at the same address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_droidspeak.fleet.servers import Process, WorkerSpec


class Shelf:
    """A worker that can be killed and restarted; `config` returns its file for each life, by
    number."""

    def __init__(self, config: Callable[[int], dict[str, Any]], folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._num_lives = 0
        self.process: Process = self._start()

    def kill(self) -> None:
        self.process.kill()

    def restart(self) -> None:
        """Restart the worker. Returns before it is ready."""
        self.process = self._start()

    def _start(self) -> Process:
        self._num_lives += 1
        spec = WorkerSpec(config=self._config(self._num_lives), name=f"worker-{self._num_lives}")
        return spec.start(self._folder, {})
