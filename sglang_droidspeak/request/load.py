"""Copy a request's pages from its source into KV slots, in a thread beside the scheduler thread.

On CUDA the thread copies on a stream of its own. `Copies` orders the streams, and runs without
SGLang.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from cachetree import EMPTY_SPAN, Deadline, FetchError, Kind, Span, Step, WorkerThread
from cachetree.planning import Plan

if TYPE_CHECKING:
    from sglang_droidspeak.request.source import Source

log = logging.getLogger(__name__)

READS: Final = -1
"""Key of the event after which a batch's forward reads no staging memory any more. The keys of
other events are numbers of layers."""
_BEGUN: Final = -2
_DONE: Final = -3
"""Keys of two more events: before a batch's first copy, and after its last copy."""
_ABOVE_FORWARDS: Final = -1
"""Priority of the copy stream, above SGLang's streams (0). Otherwise a copy kernel, which needs few
multiprocessors, would wait until a matrix product leaves some free."""


class Copies:
    """Order the copy stream and the forward stream on CUDA. Does nothing without CUDA."""

    def __init__(self, forward_stream: torch.cuda.Stream | None, device: str) -> None:
        self._device: Final = torch.get_device_module(device)
        self._forwards: Final = forward_stream
        self._taken: Final = [forward_stream, self._device.current_stream()]
        self._stream: Final = self.another_stream(_ABOVE_FORWARDS)
        self._has_clock: Final = device == "cuda"
        self._events: Final[dict[int, dict[int, torch.cuda.Event]]] = {}
        """Events by batch and layer. The device reaches an event after the layer's copies."""

    def another_stream(self, priority: int = 0) -> Any:
        """Return a stream that runs no forwards, and that this function has not returned before.
        torch hands out 32 CUDA streams of each priority in turn, and SGLang uses some of them."""
        while (stream := self._device.Stream(priority=priority)) in self._taken:
            pass
        self._taken.append(stream)
        return stream

    def begin(self, index: int) -> None:
        """Let a batch's copies wait for all forwards so far. A running forward may still write the
        batch's slots."""
        self._events[index] = {}
        self._stream.wait_stream(self._device.current_stream())
        if self._forwards is not None:
            self._stream.wait_stream(self._forwards)

    def start_clock(self, index: int) -> None:
        """Record the start of the batch's copies, so that `end` returns their seconds on the
        device. Call it right after `begin`."""
        if self._has_clock:
            self._events[index][_BEGUN] = event = self._device.Event(enable_timing=True)
            event.record(self._stream)

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Enter the copy stream for the whole life of a copying thread. A thread that leaves the
        stream is on the process's first device, which may belong to another server."""
        return self._device.stream(self._stream)

    def record(self, index: int, layer: int) -> None:
        """Record an event behind the current stream's work, for `forward_waits` and `end`."""
        self._events[index][layer] = event = self._device.Event()
        event.record()

    def stop_clock(self, index: int) -> None:
        """Record the end of the batch's timed copies. Call it before the batch's last `record`.
        Does nothing if `start_clock` was not called for the batch."""
        if _BEGUN in self._events[index]:
            self._events[index][_DONE] = event = self._device.Event(enable_timing=True)
            event.record()

    def forward_waits(self, index: int, layer: int) -> None:
        """Let the current stream wait for a layer's copies, if any were recorded. The KV pool calls
        this before a forward reads `layer`, even if the layer's load has failed."""
        if event := self._events[index].get(layer):
            self._device.current_stream().wait_event(event)

    def current_stream_waits(self) -> None:
        self._device.current_stream().wait_stream(self._stream)

    def stop(self) -> None:
        """Block until no copy runs. Ignore errors: if the device is lost, no copy runs."""
        with contextlib.suppress(Exception):
            self._device.synchronize()

    def end(self, index: int, host_s: float = 0.0) -> float | None:
        """Wait until the batch's copies are done, and return their seconds: `host_s` if the host
        copied, None if the device copied without a clock."""
        events = self._events.pop(index, {})
        for event in events.values():
            event.synchronize()
        if not self._has_clock:
            return host_s
        return events[_BEGUN].elapsed_time(events[_DONE]) / 1000 if _DONE in events else None


class ForwardWaitExceeded(FetchError):
    """A forward has waited for late layers as long as allowed, and they have not arrived."""


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """The copies of one request. They begin with its batch and end with the batch's forward.

    The loader thread sees nothing else of a request. The scheduler thread may abandon the load;
    then the loader thread writes nothing more into the slots.
    """

    plan: Plan
    source: Source
    at: Span
    """Tokens to load, by their position in the prompt. They are some or all tokens of `plan.pages`,
    because SGLang may have given fewer slots."""
    slots: torch.Tensor
    """KV slots of the loaded tokens, on the device, int64."""
    head: Span = EMPTY_SPAN
    """Tokens right before `at`, which the batch computes in full first. Often none."""
    patience_s: float = math.inf
    """Seconds that the forward may still wait for late layers."""
    copies_s: list[tuple[float, float]] = field(default_factory=list, init=False)
    """Start and end of each layer's copy with its decoding, on monotonic time. On CUDA, start and
    end of the calls that issue the copy."""
    copy_s: float | None = field(default=None, init=False)
    """Share of the seconds of the batch's copies, on the device or host, by this load's bytes. None
    if the batch has not ended, or was not timed."""
    copied_bytes: int = field(default=0, init=False)
    """Stored bytes that were copied out of host memory."""
    error: FetchError | None = field(default=None, init=False)
    """Reason why the load was abandoned, or None. The scheduler thread computes the slots of an
    abandoned load, and the loader writes nothing more into them."""
    is_good: bool = field(default=True, init=False)
    """Whether the slots hold correct KV, loaded or computed."""
    _copying: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def whole(self) -> Span:
        """All prefix tokens that the batch fills: the head and the loaded tokens."""
        return Span(self.at.start - len(self.head), self.at.stop)

    @property
    def cause(self) -> str:
        """Name of the error that caused a full prefill; empty if there was none."""
        return "" if self.error is None else type(self.error).__name__

    @property
    def copied_s(self) -> float:
        """Seconds that the loader has spent on copies. On CUDA, on issuing the copies."""
        return sum(stop_s - start_s for start_s, stop_s in self.copies_s)

    def copy(self, layer: int) -> None:
        """Copy a layer once it has arrived. Skip a layer that is recomputed, or that cannot be
        fetched. Blocks."""
        if layer in self.plan.block:
            return
        try:
            self.source.wait(Step(Kind.KV, layer))
        except FetchError:
            return
        except Exception:  # The loader continues with other loads.
            log.exception("waiting for layer %d failed", layer)
            self.fail()
            return
        with self._copying:
            if self.error is not None:
                return
            started_s = time.monotonic()
            try:
                self.copied_bytes += self.source.copy(layer, self.at, self.slots)
                self.copies_s.append((started_s, time.monotonic()))
            except Exception:
                log.exception("loading layer %d failed", layer)
                self.is_good = False

    def wait_staged(self, deadline: Deadline) -> FetchError | None:
        """Block until every layer is staged. Return None, or the error if a layer is not staged in
        time."""
        if self.error is not None or not self.is_good:
            return self.error or FetchError("a layer could not be copied")
        staging = self.source.staging
        try:
            for step in staging.steps:
                staging.wait(step, deadline)
            staging.check()  # The loader has skipped layers that came late.
        except FetchError as exc:
            return staging.error or ForwardWaitExceeded(*exc.args)
        return None

    def fail(self) -> None:
        """Note that a layer was not copied. The slots of an abandoned load stay good, because the
        scheduler thread computes them."""
        with self._copying:
            if self.error is None:
                self.is_good = False

    def abandon(self, error: FetchError) -> None:
        """Stop the load because of `error`. Returns once the loader copies nothing more of it."""
        self.source.staging.fail(error)
        with self._copying:
            self.error = self.error or error


class Loader:
    """Copy the loads of whole batches into KV slots, layer by layer in the order of the forward.

    SGLang's KV pool waits on `counter` before each layer. If a load's layers do not arrive, the
    loader skips them and marks them as done in `counter`. `Load.wait_staged` then returns the
    error, and the scheduler thread recomputes the slots. If the loader thread fails, its batch and
    every later batch fail at once.
    """

    def __init__(self, num_layers: int, copies: Copies) -> None:
        from sglang_droidspeak.engine.names import LayerWiseLoadCounter

        self._num_layers = num_layers
        self._copies = copies
        self.counter = LayerWiseLoadCounter(num_layers, copies.forward_waits)
        self.is_alive = True
        """False once the thread has failed."""
        self._loads: dict[int, Sequence[Load]] = {}
        """Loads of each batch that has not ended. Keys are batch indices."""
        self._thread: WorkerThread[tuple[int, Sequence[Load]]] = WorkerThread(
            "droidspeak-loader", self._run, fail=self._fail
        )

    def start(self, loads: Sequence[Load]) -> int:
        """Begin a batch's loads. Returns the index that the batch's forward waits on."""
        index = self.counter.update_producer()
        # Time only if all is staged: the device's clock would also count waits for late layers.
        staged = [it.source.staging for it in loads]
        are_there = any(it.num_bytes for it in staged) and all(it.is_complete for it in staged)
        self._copies.begin(index)
        if are_there:
            self._copies.start_clock(index)
        self._loads[index] = loads
        for load in () if self.is_alive else loads:
            load.fail()  # The forward will compute the prefix in full.
        self._thread.put((index, loads))
        return index

    def read_by_current_stream(self, index: int) -> None:
        """Record an event behind the current stream's reads of the batch's staging memory. `finish`
        waits for this event."""
        self._copies.record(index, READS)

    def abandon(self, load: Load, error: FetchError) -> None:
        """Stop a load because of `error`. The loader then overwrites nothing that the current
        stream writes into its slots."""
        load.abandon(error)
        self._copies.current_stream_waits()

    def finish(self, index: int) -> None:
        """Wait until the batch's copies are done, and nothing reads its staging memory any more."""
        self.counter.finish(index)
        loads = self._loads.pop(index, ())
        num_bytes = sum(it.copied_bytes for it in loads) or 1
        copies_s = self._copies.end(index, sum(it.copied_s for it in loads))
        for load in loads if copies_s is not None else ():
            load.copy_s = copies_s * load.copied_bytes / num_bytes

    def close(self) -> None:
        self._thread.close(10)

    def _run(self, batches: Iterator[tuple[int, Sequence[Load]]]) -> None:
        with torch.inference_mode(), self._copies.on_stream():
            for index, loads in batches:
                for layer in range(self._num_layers):
                    for load in loads:
                        load.copy(layer)
                    if layer == self._num_layers - 1:
                        self._copies.stop_clock(index)
                    self._copies.record(index, layer)
                    self.counter.complete(index, layer)

    def _fail(self, batch: tuple[int, Sequence[Load]], error: Exception) -> None:
        index, loads = batch
        self.is_alive = False
        for load in loads:
            load.fail()
        self._copies.stop()
        self.counter.fail(index, error)
