"""Order between the streams of copies and of forwards. Runs without SGLang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

Laps = list[tuple[torch.cuda.Event, torch.cuda.Event]]
"""Of copies on a stream: before and after each."""
_READS = -1
"""In place of a layer: what the forward's stream reads of a batch's staging."""


class Copies:
    """Order between the copy stream and the forward stream on CUDA; nothing to order elsewhere."""

    def __init__(self, forward_stream: torch.cuda.Stream | None, device: str) -> None:
        self._forwards = forward_stream
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._events: dict[tuple[int, int], torch.cuda.Event] = {}

    def wait_for_forwards(self) -> None:
        """Slots may have been freed by a forward that still runs and writes them."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            if self._forwards is not None:
                self._stream.wait_stream(self._forwards)

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """For a thread that copies, once: when it leaves the stream it is on the process's first
        device, which may be another server's."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextlib.contextmanager
    def of(self, index: int, layer: int) -> Iterator[None]:
        """Those of one layer of one batch are waited for."""
        yield
        if self._stream is not None:
            self._events[index, layer] = event = torch.cuda.Event()
            event.record(self._stream)

    @contextlib.contextmanager
    def timed(self, laps: Laps) -> Iterator[None]:
        """Between two events of the copy stream; where the host copies, its clock does."""
        if self._stream is None:
            yield
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        yield
        stop.record(self._stream)
        laps.append((start, stop))

    def record_reads(self, index: int) -> None:
        """The current stream copies out of host memory, too."""
        if self._stream is not None:
            self._events[index, _READS] = event = torch.cuda.Event()
            event.record()

    def forward_waits(self, index: int, layer: int) -> None:
        """Called by the KV pool before a forward reads `layer`."""
        event = self._events.get((index, layer))
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def current_stream_waits(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def forget(self, index: int) -> None:
        for key in [key for key in list(self._events) if key[0] == index]:
            self._events.pop(key).synchronize()
