"""Streams, events, graphs and locks of a virtual device: each carries the clocks that order it."""

from __future__ import annotations

import _thread
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from virtual_cuda import VirtualCuda, _Operation

Clock = dict[int, int]
"""Number of each stream's operations that are ordered before a moment."""


class Stream:
    def __init__(self, cuda: VirtualCuda, number: int, priority: int = 0) -> None:
        self._cuda = cuda
        self.priority = priority
        self.id = self.cuda_stream = number
        cuda.new_stream(number)

    def wait_event(self, event: Event) -> None:
        self._cuda.fence("wait_event", lambda: self._cuda.join(self.id, event.clock))

    def wait_stream(self, stream: Stream) -> None:
        clock = self._cuda.clock_of(stream.id)
        self._cuda.fence("wait_stream", lambda: self._cuda.join(self.id, clock))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._cuda.host_waits(self._cuda.clock_of(self.id), "synchronize")


class Graph:
    """Operations that are run again on the same memory; what orders them is not watched."""

    def __init__(self) -> None:
        self.operations: list[tuple[_Operation, list[torch.Tensor]]] = []

    def replay(self) -> None:
        with _disable_current_modes():
            for operation, made in self.operations:
                for before, now in zip(made, operation.execute(), strict=True):
                    if before.data_ptr() != now.data_ptr():
                        before.copy_(now)


class Event:
    """An event that is over only after a query: the first query answers yes, and then it is
    over."""

    def __init__(self, cuda: VirtualCuda) -> None:
        self._cuda = cuda
        self.clock: Clock = {}
        self._is_recorded = self._is_known_over = False

    def record(self, stream: Stream | None = None) -> None:
        self.clock = self._cuda.clock_of((stream or self._cuda.current_stream()).id)
        self._is_recorded, self._is_known_over = True, False

    def wait(self, stream: Stream | None = None) -> None:
        of = stream or self._cuda.current_stream()
        self._cuda.fence("wait", lambda: self._cuda.join(of.id, self.clock))

    def synchronize(self) -> None:
        self._cuda.host_waits(self.clock, "synchronize")
        self._is_known_over = True

    def query(self) -> bool:
        self._cuda.fence("query", self._is_over)
        return True

    def elapsed_time(self, stop: Event) -> float:
        if not (self._is_recorded and stop._is_recorded):
            raise RuntimeError("an event was not recorded")
        if not stop._is_known_over:
            raise RuntimeError("the event may not be over yet")
        return 1.0

    def _is_over(self) -> None:
        self._is_known_over = True
        self._cuda.host_joins(self.clock)


class Lock:
    """A lock that carries the clock of the thread that released it to the thread that takes it."""

    def __init__(self, cuda: VirtualCuda) -> None:
        self._lock = _thread.allocate_lock()
        self._cuda = cuda
        self._clock: Clock = {}
        self.locked = self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_mine = self._lock.acquire(blocking, timeout)
        if is_mine:
            self._cuda.host_joins(self._clock)
        return is_mine

    def release(self) -> None:
        for stream, number in self._cuda.host_clock().items():
            self._clock[stream] = max(number, self._clock.get(stream, -1))
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_exc: object) -> None:
        self.release()
