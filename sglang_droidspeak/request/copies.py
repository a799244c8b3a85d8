"""Order between the streams of copies and of forwards. Runs without SGLang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

Laps = list[tuple[torch.cuda.Event, torch.cuda.Event]]
"""Of copies on a stream: before and after each."""
READS: Final = -1
"""In place of a layer: what the forward's stream reads of a batch's staging."""


class Copies:
    """Order between the copy stream and the forward stream on CUDA; nothing to order elsewhere."""

    def __init__(self, forward_stream: torch.cuda.Stream | None, device: str) -> None:
        self._device: Final = torch.get_device_module(device)
        self._forwards: Final = forward_stream
        self._taken: Final = [forward_stream, self._device.current_stream()]
        self._stream: Final = self.another_stream()
        self._is_timed: Final = device == "cuda"
        self._events: Final[dict[int, dict[int, torch.cuda.Event]]] = {}
        """By batch and layer: its copies, all that were begun, are done."""

    def another_stream(self) -> Any:
        """Draw a stream that runs no forwards and was not drawn here before. torch hands out 32
        CUDA streams in turn, and SGLang has some of them."""
        while (stream := self._device.Stream()) in self._taken:
            pass
        self._taken.append(stream)
        return stream

    def begin(self, index: int) -> None:
        """A batch's slots may have been freed by a forward that still runs and writes them."""
        self._events[index] = {}
        self._stream.wait_stream(self._device.current_stream())
        if self._forwards is not None:
            self._stream.wait_stream(self._forwards)

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """For a thread that copies, once: when it leaves the stream it is on the process's first
        device, which may be another server's."""
        return self._device.stream(self._stream)

    def record(self, index: int, layer: int) -> None:
        """What the current stream was given to do until now is waited for."""
        self._events[index][layer] = event = self._device.Event()
        event.record()

    @contextlib.contextmanager
    def timed(self, laps: Laps) -> Iterator[None]:
        """Between two events of the current stream; where the host copies, its clock does."""
        if not self._is_timed:
            yield
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        stop.record()
        laps.append((start, stop))

    def forward_waits(self, index: int, layer: int) -> None:
        """Called by the KV pool before a forward reads `layer`, also if the layer failed: then no
        event was recorded."""
        if event := self._events[index].get(layer):
            self._device.current_stream().wait_event(event)

    def current_stream_waits(self) -> None:
        self._device.current_stream().wait_stream(self._stream)

    def stop(self) -> None:
        """Block until no copy runs. A device that is gone runs none."""
        with contextlib.suppress(Exception):
            self._device.synchronize()

    def end(self, index: int) -> None:
        for event in self._events.pop(index, {}).values():
            event.synchronize()
