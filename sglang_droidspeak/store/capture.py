"""Provenance, kept per KV slot as E is, and both of them beside a KV pool.

Because both are indexed by KV slot, chunked prefill, batch mixing, radix sharing, node splits and
decoded tokens need no bookkeeping: whoever holds the slots of a prefix holds its E.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cachetree import ConfigError, Span
from cachetree.corrections import Correction
from sglang_droidspeak.engine.layers import LayerStack
from sglang_droidspeak.engine.names import (
    ForwardMode,
    MHATokenToKVPool,
    ModelRunner,
    ScheduleBatch,
    async_h2d,
    get_parallel,
)
from sglang_droidspeak.start import refuse
from sglang_droidspeak.start.this_server import ThisServer
from sglang_droidspeak.store.e_pool import EPool

log = logging.getLogger(__name__)

_ATTRIBUTE = "droidspeak"


@dataclass(frozen=True, slots=True)
class Attachment:
    """What the linker needs of the model worker, found on its KV pool."""

    runner: ModelRunner
    stack: LayerStack
    e_pool: EPool
    provenance: Provenance
    server: ThisServer
    corrections: Mapping[str, Correction]
    """Of E, by digest, on the device in the model's dtype."""


class Provenance:
    """Which KV slots descend from another model's KV.

    Every token attends to all tokens before it, so approximate KV makes the KV of everything after
    it approximate: a new slot inherits the mark of the slot of the token before it. Costs nothing
    until the first approximate load.
    """

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self._approximate = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.any_approximate = False

    def loaded(self, slots: torch.Tensor, slot_before: torch.Tensor, *, exact: bool) -> None:
        """`slots` now hold loaded or recomputed KV, after the token in `slot_before` (`[0..1]`)."""
        self.any_approximate = self.any_approximate or not exact
        if self.any_approximate and exact:
            self._approximate[slots] = self._approximate[slot_before].any()
        elif self.any_approximate:
            self._approximate.index_fill_(0, slots, True)

    def inherit(self, batch: ScheduleBatch, req_to_token: torch.Tensor) -> torch.Tensor | None:
        """Mark the slots that `batch` is about to write. On the device, without waiting for it.

        Returns of each row of a prefill whether what it reads is approximate, on the host as soon
        as the forward is over; None while nothing is.
        """
        if not self.any_approximate:
            return None
        rows = batch.req_pool_indices
        if batch.forward_mode == ForwardMode.DECODE:
            before = req_to_token[rows, (batch.seq_lens - 2).clamp(min=0)]
            self._approximate[batch.out_cache_loc] = self._approximate[before]
        elif batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            prefix, lengths = (
                async_h2d(it, dtype=torch.int64, device=self._approximate.device)
                for it in (batch.prefix_lens, batch.extend_lens)
            )
            before = req_to_token[rows, (prefix - 1).clamp(min=0)]
            mark = self._approximate[before] & (prefix > 0)
            self._approximate[batch.out_cache_loc] = mark.repeat_interleave(
                lengths, output_size=batch.out_cache_loc.shape[0]
            )
            return mark.to("cpu", non_blocking=True)
        return None

    def is_exact(self, slots: torch.Tensor) -> bool:
        return not (self.any_approximate and bool(self._approximate[slots].any()))

    def num_exact(self, slots: torch.Tensor) -> int:
        """How many leading slots are exact; waits for the device."""
        marked = self._approximate[slots].nonzero() if self.any_approximate else ()
        return int(marked[0]) if len(marked) else slots.shape[0]

    def reset(self) -> None:
        self._approximate.zero_()
        self.any_approximate = False


def correction_bytes(server: ThisServer, dtype: torch.dtype) -> int:
    """What all maps take on each rank's device."""
    tensors = [tensor for it in server.corrections.values() for tensor in it.tensors]
    return sum(it.numel() for it in tensors) * dtype.itemsize


def e_bytes_per_token(server: ThisServer, dtype: torch.dtype) -> int:
    """On each rank."""
    return len(server.transition_layers) * server.e_width * dtype.itemsize


def attach(runner: ModelRunner, server: ThisServer) -> None:
    """Allocate E and start capturing; runs after the KV pool exists and before CUDA graphs do."""
    if runner.is_draft_worker:
        return
    pool = runner.token_to_kv_pool
    refuse.kv_pool(pool, MHATokenToKVPool)
    stack = LayerStack(runner.model)
    num_slots = pool.size + pool.page_size
    provenance = Provenance(num_slots, runner.device)
    start = get_parallel().tp_rank * server.e_width
    columns = Span(start, start + server.e_width)
    e_pool = EPool(server.transition_layers, num_slots, columns, runner)
    e_pool.capture_from(stack)
    corrections = {
        name: it.to(runner.device, runner.dtype) for name, it in server.corrections.items()
    }
    found = Attachment(runner, stack, e_pool, provenance, server, corrections)
    setattr(pool, _ATTRIBUTE, found)


def attachment_of(pool: MHATokenToKVPool) -> Attachment:
    """Raises ConfigError where the plugin's hooks did not run in this process."""
    found = getattr(pool, _ATTRIBUTE, None)
    if found is None:
        raise ConfigError(
            "the droidspeak plugin did not run in the scheduler process; check that SGLANG_PLUGINS "
            "does not exclude it and that `pip show sglang-droidspeak` finds it"
        )
    return found
