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
        self._held_bytes = 0
        # One thread, made when first needed: it computes beside the forward that runs.
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="droidspeak-decoder")

    def begin(self, num_bytes: int, decode: Callable[[], torch.Tensor]) -> Decoding | None:
        """None while what others hold leaves no room. `decode` runs on the decoder's thread."""
        if self._held_bytes and self._held_bytes + num_bytes > _MOST_BYTES:
            return None
        self._held_bytes += num_bytes
        return Decoding(self._thread.submit(decode), lambda: self._end(num_bytes))

    def _end(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes


class Decoding:
    """E of one layer of one request, until `end`."""

    def __init__(self, rows: Future[torch.Tensor], end: Callable[[], None]) -> None:
        self._rows: Final = rows
        self._end: Final = end

    @property
    def is_over(self) -> bool:
        return self._rows.done()

    def rows(self) -> torch.Tensor:
        """Blocks until it is over; raises what went wrong."""
        return self._rows.result()

    def end(self) -> None:
        """Nobody reads it any more."""
        self._rows.cancel()
        self._end()
