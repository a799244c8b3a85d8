"""Script that runs in a server before it starts. It makes the last rank fail in chosen cases."""

from __future__ import annotations

from typing import Any

import slow_device
import torch

from cachetree.ids import Span

NUM_BROKEN = 240
"""Length of the prefix for which the last rank cannot read E."""
BROKEN_BLOCK = Span(1, 3)
"""Block at which the last rank runs out of memory, between the first layer's two sums over all
ranks. No other test of these servers recomputes this block, and no server chooses it by itself."""


def place() -> None:
    from sglang_droidspeak.engine.layers import LayerStack
    from sglang_droidspeak.request.source import Staged

    read_e, run = Staged.read_e, LayerStack.run

    def read_or_break(self: Staged, layer: int, at: Span, into: torch.Tensor) -> None:
        num_tokens = len(self._plan.pages) * self._pool.page_size
        if num_tokens == NUM_BROKEN and torch.distributed.get_rank() > 0:
            raise MemoryError("this rank has no memory for it")
        read_e(self, layer, at, into)

    def run_or_break(self: LayerStack, block: Span, *rest: Any) -> None:
        if block == BROKEN_BLOCK and torch.distributed.get_rank() > 0:
            self._layers[block.start].mlp.register_forward_pre_hook(_break)
        run(self, block, *rest)

    Staged.read_e, LayerStack.run = read_or_break, run_or_break


def _break(*_: object) -> None:
    raise MemoryError("this rank has no memory for a layer")


if __name__ == "__main__":
    slow_device.place()
    place()
