"""E that comes encoded, decoded by a thread of its own while its request waits.

A device decodes as it reads, and nobody waits for that. On a CPU the scheduler's thread would do it
before a recompute, with every other request waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_MOST_BYTES: Final = 512 << 20
"""Decoded E of requests that wait; a single one may have more."""


class Decoder:
    """Called by the scheduler's thread. What is decoded lies in memory that is no cache's, so only
    so much of it is made ahead."""

    def __init__(self) -> None:
        self._bytes: dict[Future[torch.Tensor], int] = {}
        # One thread, made when first needed: it computes beside the forward that runs.
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="droidspeak-decoder")

    def begin(
        self, num_bytes: int, decode: Callable[[], torch.Tensor]
    ) -> Future[torch.Tensor] | None:
        """None while what others hold leaves no room. `decode` runs on the decoder's thread."""
        if self._bytes and sum(self._bytes.values()) + num_bytes > _MOST_BYTES:
            return None
        rows = self._thread.submit(decode)
        self._bytes[rows] = num_bytes
        return rows

    def end(self, rows: Future[torch.Tensor]) -> None:
        """Nobody reads them any more."""
        rows.cancel()
        del self._bytes[rows]
