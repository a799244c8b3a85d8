"""The thread that copies layers into KV slots while the scheduler thread computes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from cachetree import FetchError, Turns
from sglang_droidspeak.engine.names import LayerWiseLoadCounter
from sglang_droidspeak.request.copies import Copies
from sglang_droidspeak.request.load import Load

log = logging.getLogger(__name__)


class Loader:
    """Copies for whole batches, layer by layer in the order in which the forward reads them.

    `counter` is what SGLang's KV pool waits on before each layer. A load whose layers do not come
    is left out: the scheduler thread has noticed it in `Load.wait_staged`, recomputes the slots
    itself, and the layer counts as done.
    """

    def __init__(self, num_layers: int, copies: Copies) -> None:
        self._num_layers = num_layers
        self._copies = copies
        self.counter = LayerWiseLoadCounter(num_layers, self._copies.forward_waits)
        self._turns: Turns[tuple[int, Sequence[Load]]] = Turns("droidspeak-loader", self._run)

    def start(self, loads: Sequence[Load]) -> int:
        """Begin them; returns the index that the batch's forward waits on."""
        index = self.counter.update_producer()
        self._copies.wait_for_forwards()
        self._turns.put((index, loads))
        return index

    def read_by_current_stream(self, index: int) -> None:
        """What the current stream was given to do until now reads what that batch staged."""
        self._copies.record_reads(index)

    def abandon(self, load: Load, error: FetchError) -> None:
        """Write nothing more of `load`: what the current stream writes from now on stays."""
        load.abandon(error)
        self._copies.current_stream_waits()

    def finish(self, index: int) -> None:
        """Wait until nothing of that batch is being written, nor read from staging, any more."""
        self.counter.finish(index)
        self._copies.forget(index)

    def close(self) -> None:
        self._turns.close(10)

    def _run(self, batches: Iterator[tuple[int, Sequence[Load]]]) -> None:
        with torch.inference_mode():
            for index, loads in batches:
                for layer in range(self._num_layers):
                    try:
                        with self._copies.of(index, layer):
                            for load in loads:
                                load.copy(layer, self._copies.timed)
                    except Exception:
                        log.exception("loading layer %d failed", layer)
                        for load in loads:
                            load.is_broken = True
                    self.counter.complete(index, layer)
