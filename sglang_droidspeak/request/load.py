"""What a request has while it loads: pages of its source, and the KV slots that they go into. A
thread copies them while the scheduler thread computes, on CUDA on a stream of its own. `Copies`
orders these streams, and runs without SGLang."""

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

TimedCopies = list[tuple[torch.cuda.Event, torch.cuda.Event]]
"""Events on a stream: before and after each copy."""
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
        """Record an event behind all work queued so far; `forward_waits` and `end` wait for it."""
        self._events[index][layer] = event = self._device.Event()
        event.record()

    @contextlib.contextmanager
    def timed(self, timed_copies: TimedCopies) -> Iterator[None]:
        """Between two events of the current stream; where the host copies, its clock does."""
        if not self._is_timed:
            yield
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        stop.record()
        timed_copies.append((start, stop))

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


class ForwardWaitExceeded(FetchError):
    """Layers predicted to have arrived had not when the forward had waited for them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """Begun with the batch of its request, over when the batch's forward is.

    All that the loader thread sees of a request. It copies; the scheduler thread may abandon the
    load, after which nothing more is written into the slots.
    """

    plan: Plan
    source: Source
    at: Span
    """Where its tokens stand in the prompt, within plan.pages; SGLang may have promised fewer."""
    slots: torch.Tensor
    """KV slots of these tokens, on the device, int64."""
    head: Span = EMPTY_SPAN
    """Tokens right before `at`, whose KV the batch computes in full first; often none."""
    patience_s: float = math.inf
    """How long its forward may still wait for layers that are late."""
    copies_s: list[tuple[float, float]] = field(default_factory=list, init=False)
    """When each layer's began and ended, decoding included, on monotonic time; on CUDA were
    issued."""
    timed_copies: TimedCopies = field(default_factory=list, init=False)
    """On CUDA, before and after each layer's copies on their stream."""
    copied_bytes: int = field(default=0, init=False)
    """Out of host memory, as they are stored."""
    error: FetchError | None = field(default=None, init=False)
    """Why it was abandoned: the scheduler thread computes the slots itself, and the loader writes
    nothing more."""
    is_good: bool = field(default=True, init=False)
    """Whether its slots hold what they should, however that came about."""
    _copying: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def whole(self) -> Span:
        """All tokens that its batch brings beside its new ones."""
        return Span(self.at.start - len(self.head), self.at.stop)

    @property
    def cause(self) -> str:
        """Of a full prefill of its pages; empty where there was none."""
        return "" if self.error is None else type(self.error).__name__

    @property
    def copied_s(self) -> float:
        """Time that the loader has spent copying; on CUDA issuing the copies."""
        return sum(stop_s - start_s for start_s, stop_s in self.copies_s)

    @property
    def copy_s(self) -> float:
        """What the copies took where they ran, once its batch is over."""
        if not self.timed_copies or not all(stop.query() for _, stop in self.timed_copies):
            return self.copied_s
        return sum(start.elapsed_time(stop) for start, stop in self.timed_copies) / 1000

    def copy(self, layer: int, copies: Copies) -> None:
        """Copy a layer once it has come; not one that is computed, or does not come. Blocks."""
        if layer in self.plan.block:
            return
        try:
            self.source.wait(Step(Kind.KV, layer))
        except FetchError:
            return
        except Exception:  # The loader goes on with other loads.
            log.exception("layer %d cannot be waited for", layer)
            self.fail()
            return
        with self._copying:
            if self.error is not None:
                return
            started_s = time.monotonic()
            try:
                with copies.timed(self.timed_copies):
                    self.copied_bytes += self.source.copy(layer, self.at, self.slots)
                self.copies_s.append((started_s, time.monotonic()))
            except Exception:
                log.exception("loading layer %d failed", layer)
                self.is_good = False

    def wait_staged(self, deadline: Deadline) -> FetchError | None:
        """Block until every layer is there; why it is not, where it is not by then."""
        if self.error is not None or not self.is_good:
            return self.error or FetchError("a layer could not be copied")
        staging = self.source.staging
        try:
            for step in staging.steps:
                staging.wait(step, deadline)
            staging.check()  # The loader has left layers out that came late.
        except FetchError as exc:
            return staging.error or ForwardWaitExceeded(*exc.args)
        return None

    def fail(self) -> None:
        """A layer was not copied. If the scheduler thread has abandoned the load, the slots hold
        what that thread computes, and stay good."""
        with self._copying:
            if self.error is None:
                self.is_good = False

    def abandon(self, error: FetchError) -> None:
        """Returns once nothing of it is being copied."""
        self.source.staging.fail(error)
        with self._copying:
            self.error = self.error or error


class Loader:
    """Copies for whole batches, layer by layer in the order in which the forward reads them.

    `counter` is what SGLang's KV pool waits on before each layer. A load whose layers do not come
    is left out: the scheduler thread has noticed it in `Load.wait_staged`, recomputes the slots
    itself, and the layer counts as done. If the thread itself fails, so does the batch, and every
    later one at once.
    """

    def __init__(self, num_layers: int, copies: Copies) -> None:
        from sglang_droidspeak.engine.names import LayerWiseLoadCounter

        self._num_layers = num_layers
        self._copies = copies
        self.counter = LayerWiseLoadCounter(num_layers, copies.forward_waits)
        self.is_alive = True
        """False once the thread has failed."""
        self._thread: WorkerThread[tuple[int, Sequence[Load]]] = WorkerThread(
            "droidspeak-loader", self._run, fail=self._fail
        )

    def start(self, loads: Sequence[Load]) -> int:
        """Begin them; returns the index that the batch's forward waits on."""
        index = self.counter.update_producer()
        self._copies.begin(index)
        for load in () if self.is_alive else loads:
            load.fail()  # Before the forward, which then computes the prefix in full.
        self._thread.put((index, loads))
        return index

    def read_by_current_stream(self, index: int) -> None:
        """What the current stream was given to do until now reads what that batch staged."""
        self._copies.record(index, READS)

    def abandon(self, load: Load, error: FetchError) -> None:
        """Write nothing more of `load`: what the current stream writes from now on stays."""
        load.abandon(error)
        self._copies.current_stream_waits()

    def finish(self, index: int) -> None:
        """Wait until nothing of that batch is being written, nor read from staging, any more."""
        self.counter.finish(index)
        self._copies.end(index)

    def close(self) -> None:
        self._thread.close(10)

    def _run(self, batches: Iterator[tuple[int, Sequence[Load]]]) -> None:
        with torch.inference_mode(), self._copies.on_stream():
            for index, loads in batches:
                for layer in range(self._num_layers):
                    for load in loads:
                        load.copy(layer, self._copies)
                    self._copies.record(index, layer)
                    self.counter.complete(index, layer)

    def _fail(self, batch: tuple[int, Sequence[Load]], error: Exception) -> None:
        index, loads = batch
        self.is_alive = False
        for load in loads:
            load.fail()
        self._copies.stop()
        self.counter.fail(index, error)
