"""How fast this server computes and loads, measured as it serves."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import torch

_MIN_TOKEN_LAYERS = 512
"""Smaller forwards measure overhead, not speed."""
_MIN_LOAD_BYTES = 256 << 10
_WEIGHT = 0.3
_MAX_OPEN = 64
"""Forwards timed and not yet read; the oldest are dropped."""


class Meter:
    """Moving average of forwards. On CUDA it times with events and never synchronises."""

    def __init__(self, device: str, num_layers: int, step_tokens: int) -> None:
        """`step_tokens` are those of SGLang's largest prefill in one step."""
        self.step_tokens: Final = step_tokens
        self._num_layers = num_layers
        self._on_cuda = device == "cuda"
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque(maxlen=_MAX_OPEN)
        self._s_per_token_layer: float | None = None
        self._load_bytes_per_s = math.inf

    def full_prefill_s(self, num_tokens: int) -> float | None:
        """Predicted time of all layers over that many tokens."""
        speed = self.s_per_token_layer
        return None if speed is None else speed * num_tokens * self._num_layers

    @property
    def s_per_token_layer(self) -> float | None:
        """Seconds; None until something was measured."""
        while self._open and self._open[0][1].query():
            start, stop, token_layers = self._open.popleft()
            self._add(start.elapsed_time(stop) / 1000, token_layers)
        return self._s_per_token_layer

    @property
    def load_bytes_per_s(self) -> float:
        """Stored bytes that the loader brings into slots; infinite until something was measured.

        On CUDA, where copies run beside everything else, it stays so.
        """
        return self._load_bytes_per_s

    def loaded(self, num_bytes: int, seconds: float) -> None:
        if self._on_cuda or num_bytes < _MIN_LOAD_BYTES:
            return
        new, old = num_bytes / max(seconds, 1e-9), self._load_bytes_per_s
        self._load_bytes_per_s = new if old == math.inf else old + _WEIGHT * (new - old)

    @contextlib.contextmanager
    def forward(self, token_layers: int) -> Iterator[None]:
        """Measure one forward over that many tokens × layers."""
        if token_layers < _MIN_TOKEN_LAYERS:
            yield
        elif self._on_cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._open.append((start, stop, token_layers))
        else:
            started_s = time.perf_counter()
            yield
            self._add(time.perf_counter() - started_s, token_layers)

    def _add(self, seconds: float, token_layers: int) -> None:
        new, old = seconds / token_layers, self._s_per_token_layer
        self._s_per_token_layer = new if old is None else old + _WEIGHT * (new - old)
