"""A family with tiny pages, and a pool without memory: for trees that only count bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cachetree.checkpoint import Family
from cachetree.ids import Span
from cachetree.memory import Blocks, Loan

FAMILY = Family(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=8,
    num_kv_heads=1,
    head_dim=8,
    rope="{}",
    tokenizer="t",
    model_dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=64,
)
"""A family with small sizes: trees count its pages' bytes and allocate none."""


class Unbacked:
    """A pool that lends no memory, so that a tree counts bytes without allocating them."""

    file: Final = None

    def take(self, parts: Sequence[Blocks]) -> Loan:
        return Loan()

    def give_back(self, loan: Loan, places: Sequence[Span]) -> None:
        """Do nothing: `take` lent no memory."""

    def close(self) -> None:
        """Do nothing: the pool holds no memory."""

    def place_of(self, view: memoryview) -> int | None:
        return None
