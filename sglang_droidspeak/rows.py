"""Rows of KV and E between the KV pool's layout and the bytes that cachetree stores.

stored, per layer   KV  [token, (K, V), head, head_dim]     E  [token, hidden]
pool, per layer     K   [slot, head, head_dim]   V  the same
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang_droidspeak.compat.names import MHATokenToKVPool


class PoolRows:
    """Reads and writes whole layers of chosen slots of one KV pool."""

    def __init__(self, pool: MHATokenToKVPool) -> None:
        self._pool = pool

    def read_into(self, layer: int, slots: torch.Tensor, target: memoryview) -> None:
        """Copy the KV of `slots` to host bytes; on CUDA it waits for the copy."""
        rows = self._host(target)
        for part, buffer in enumerate(self._buffers(layer)):
            rows[:, part] = buffer[slots].to("cpu")

    def write_from(self, layer: int, slots: torch.Tensor, source: memoryview) -> None:
        """Copy host bytes into `slots`, on the current stream; does not wait on CUDA."""
        rows = self._host(source).to(slots.device, non_blocking=True)
        for part, buffer in enumerate(self._buffers(layer)):
            buffer[slots] = rows[:, part]

    def _buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool.k_buffer[layer], self._pool.v_buffer[layer]

    def _host(self, raw: memoryview) -> torch.Tensor:
        heads, width = self._pool.k_buffer[0].shape[1:]
        return torch.frombuffer(raw, dtype=self._pool.dtype).view(-1, 2, heads, width)


def host_e(raw: memoryview, like: torch.Tensor) -> torch.Tensor:
    """Host bytes as rows of the dtype and width of `like`, without a copy."""
    return torch.frombuffer(raw, dtype=like.dtype).view(-1, like.shape[-1])
