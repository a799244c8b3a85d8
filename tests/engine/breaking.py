"""Run in a server before it starts: the last rank cannot read the E of a prefix of this length."""

from __future__ import annotations

from typing import Any

import torch

NUM_BROKEN = 240


def place() -> None:
    from sglang_droidspeak.store.rows import Coding

    load = Coding.load

    def load_or_break(self: Coding, raw: memoryview, like: torch.Tensor) -> Any:
        rows = load(self, raw, like)
        if len(rows) == NUM_BROKEN and torch.distributed.get_rank() > 0:
            raise MemoryError("this rank has no memory for it")
        return rows

    Coding.load = load_or_break


if __name__ == "__main__":
    place()
