"""Keep E of the transition layers per KV slot, beside the KV pool. Runs without SGLang.

E is indexed by KV slot. So the slots of a prefix lead to its E, too. E needs no bookkeeping of its
own in chunked prefill, mixed batches, radix sharing, node splits and decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from cachetree import ConfigError, Span
from cachetree.corrections import Correction

if TYPE_CHECKING:
    from sglang_droidspeak.engine.layers import LayerStack
    from sglang_droidspeak.engine.names import ForwardBatch, MHATokenToKVPool, ModelRunner
    from sglang_droidspeak.start.this_server import ThisServer

_ATTRIBUTE = "droidspeak"


class EPool:
    """E of the transition layers for every KV slot, and whether a slot's E is valid.

    `e[layer]` is `[slots, columns]` in the model's dtype; `valid` is `[slots]`. A slot's E is valid
    from SGLang's own forward over its token until the slot is loaded or partially prefilled.

    Every rank computes all of E and keeps its own columns; `Ranks.whole` joins them.
    """

    def __init__(
        self, layers: tuple[int, ...], num_slots: int, columns: Span, runner: ModelRunner
    ) -> None:
        """`columns` are the columns of E that this rank keeps."""
        self._columns = slice(columns.start, columns.stop)
        self.no_rows = torch.empty(0, len(columns), dtype=runner.dtype, device=runner.device)
        """Empty tensor with the dtype, width and device of E, from which to make buffers."""
        self.e = {layer: self.no_rows.new_zeros(num_slots, len(columns)) for layer in layers}
        self.valid = torch.zeros(num_slots, dtype=torch.bool, device=runner.device)

    def capture_from(self, stack: LayerStack) -> None:
        """Fill the pool in every forward from now on; call before CUDA graphs are captured."""
        for layer, rows in self.e.items():
            stack.on_e(layer, partial(self._write, rows))
        if self.e:
            stack.on_e(max(self.e), self._mark)

    def invalidate(self, slots: torch.Tensor) -> None:
        self.valid.index_fill_(0, slots, False)

    def adopt(self, source: torch.Tensor, slots: torch.Tensor, block: Span) -> None:
        """Copy E from the slots `source` to `slots`, except in the layers of `block`, which have
        just written E. Both sets of slots hold the same tokens, of two models with equal E."""
        for layer, rows in self.e.items():
            if layer not in block:
                rows[slots] = rows[source]
        self.valid[slots] = self.valid[source]

    def num_pages_without(self, slots: torch.Tensor, page_size: int) -> int:
        """Number of leading pages, up to and including the last page that lacks E in some slot. 0
        if all pages have E."""
        lacks = (~self.valid[slots].view(-1, page_size).all(1)).nonzero()
        return int(lacks[-1]) + 1 if len(lacks) else 0

    def _write(self, rows: torch.Tensor, forward_batch: ForwardBatch, value: torch.Tensor) -> None:
        # Most partial prefills begin with another model's E. They compute no E of this model.
        if getattr(forward_batch, "has_own_e", True):
            slots = forward_batch.out_cache_loc
            rows[slots] = value[: slots.shape[0], self._columns]

    def _mark(self, forward_batch: ForwardBatch, _value: torch.Tensor) -> None:
        if not hasattr(forward_batch, "has_own_e"):
            # Not `valid[...] = True`: that copies a scalar from the host, which no graph captures.
            self.valid.index_fill_(0, forward_batch.out_cache_loc, True)


@dataclass(frozen=True, slots=True)
class Attachment:
    """Objects that the model worker makes and the linker needs. They are attached to the KV pool,
    where the linker finds them."""

    runner: ModelRunner
    stack: LayerStack | None
    """Decoder layers of the model. None if layers of this class cannot be recomputed."""
    e_pool: EPool
    server: ThisServer
    corrections: Mapping[str, Correction]
    """Maps that correct E, on the device in the model's dtype. Keys are digests."""

    def buffers(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate two buffers for the E of the tokens that one forward recomputes. The first is
        for this rank's columns, the second for all columns of corrected E. A buffer is empty if the
        server does not need it."""
        rows, hidden = self.e_pool.no_rows, self.server.identity.hidden_size
        e = rows.new_empty(num_tokens if self.stack is not None else 0, rows.shape[1])
        return e, rows.new_empty(num_tokens if self.corrections else 0, hidden)


def correction_bytes(server: ThisServer, dtype: torch.dtype) -> int:
    """Return the bytes that all maps that correct E take on each rank's device."""
    tensors = [tensor for it in server.corrections.values() for tensor in it.tensors]
    return sum(it.numel() for it in tensors) * dtype.itemsize


def e_bytes_per_token(server: ThisServer, dtype: torch.dtype) -> int:
    """Return the bytes of one token's E at all kept layers, on each rank."""
    return len(server.transition_layers) * server.e_width * dtype.itemsize


def attach(runner: ModelRunner, server: ThisServer) -> None:
    """Allocate E and start capturing it. Call it after the KV pool is made and before CUDA graphs
    are captured."""
    from sglang_droidspeak.engine.layers import LayerStack
    from sglang_droidspeak.engine.names import MHATokenToKVPool, get_parallel
    from sglang_droidspeak.start import refuse

    if runner.is_draft_worker:
        return
    pool = runner.token_to_kv_pool
    refuse.check_kv_pool(pool, MHATokenToKVPool)
    stack = LayerStack(runner.model) if server.has_blocks else None
    start = get_parallel().tp_rank * server.e_width
    columns = Span(start, start + server.e_width)
    e_pool = EPool(server.transition_layers, pool.size + pool.page_size, columns, runner)
    if stack is not None:
        e_pool.capture_from(stack)
    corrections = {
        name: it.to(runner.device, runner.dtype) for name, it in server.corrections.items()
    }
    setattr(pool, _ATTRIBUTE, Attachment(runner, stack, e_pool, server, corrections))


def attachment_of(pool: MHATokenToKVPool) -> Attachment:
    """Return a KV pool's attachment. Raises ConfigError if the plugin did not run in this
    process."""
    attachment = getattr(pool, _ATTRIBUTE, None)
    if attachment is None:
        raise ConfigError(
            "the droidspeak plugin did not run in the scheduler process; check that SGLANG_PLUGINS "
            "does not exclude it and that `pip show sglang-droidspeak` finds it"
        )
    return attachment
