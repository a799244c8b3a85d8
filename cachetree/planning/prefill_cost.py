"""What a full prefill of some tokens of a prompt takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cachetree.checkpoint.family import Family

SECONDS_PER_TOKEN: Final = 1e-4
"""About what an 8B model takes on one GPU; without knowledge of the machine only ratios count."""
_ATTENTION_TOKENS_PER_HIDDEN: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Token t of a prompt costs `seconds_per_token * (1 + t / attention_tokens)`."""

    seconds_per_token: float
    """Of everything but attention to the tokens before it."""
    attention_tokens: float
    """How many tokens stand before one whose attention to them costs as much as all the rest."""

    @classmethod
    def of(cls, family: Family, seconds_per_token: float = SECONDS_PER_TOKEN) -> PrefillCost:
        """From the sizes alone. Per layer a token takes about 24 h² operations (12 h² weights) and
        4 h for every token before it, so that both are equal at 6 h."""
        return cls(
            seconds_per_token=seconds_per_token,
            attention_tokens=_ATTENTION_TOKENS_PER_HIDDEN * family.hidden_size,
        )

    def seconds(self, start: int, stop: int) -> float:
        """Of tokens `[start, stop)`, with those before them in the cache."""
        depth = (start + stop) / 2 / self.attention_tokens
        return self.seconds_per_token * (stop - start) * (1 + depth)
