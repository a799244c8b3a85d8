"""What stands beside a KV pool: E, captured in every forward from its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cachetree import ConfigError, Span
from cachetree.corrections import Correction
from sglang_droidspeak.engine.layers import LayerStack
from sglang_droidspeak.engine.names import MHATokenToKVPool, ModelRunner, get_parallel
from sglang_droidspeak.start import refuse
from sglang_droidspeak.start.this_server import ThisServer
from sglang_droidspeak.store.e_pool import EPool

_ATTRIBUTE = "droidspeak"


@dataclass(frozen=True, slots=True)
class Attachment:
    """What the linker needs of the model worker, found on its KV pool."""

    runner: ModelRunner
    stack: LayerStack | None
    """None if layers of this class cannot be recomputed."""
    e_pool: EPool
    server: ThisServer
    corrections: Mapping[str, Correction]
    """Of E, by digest, on the device in the model's dtype."""


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
    stack = LayerStack(runner.model) if server.has_blocks else None
    start = get_parallel().tp_rank * server.e_width
    columns = Span(start, start + server.e_width)
    e_pool = EPool(server.transition_layers, pool.size + pool.page_size, columns, runner)
    if stack is not None:
        e_pool.capture_from(stack)
    corrections = {
        name: it.to(runner.device, runner.dtype) for name, it in server.corrections.items()
    }
    found = Attachment(runner, stack, e_pool, server, corrections)
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
