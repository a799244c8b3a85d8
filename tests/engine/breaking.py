"""Run in a server before it starts: the last rank cannot read the E of a prefix of this length."""

from __future__ import annotations

import torch

NUM_BROKEN = 240


def place() -> None:
    from cachetree import Span
    from sglang_droidspeak.request.source import Staged

    e = Staged.e

    def read_or_break(self: Staged, layer: int, tokens: Span) -> torch.Tensor:
        num_tokens = len(self._plan.pages) * self._pool.page_size
        if num_tokens == NUM_BROKEN and torch.distributed.get_rank() > 0:
            raise MemoryError("this rank has no memory for it")
        return e(self, layer, tokens)

    Staged.e = read_or_break


if __name__ == "__main__":
    place()
