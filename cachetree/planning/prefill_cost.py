"""What a pass over some tokens of a prompt takes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import Final

SECONDS_PER_TOKEN: Final = 1e-4
"""About what an 8B model takes on one GPU; without knowledge of the machine only ratios count."""
_ATTENTION_TOKENS_PER_HIDDEN: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """`fixed_s + token_s * tokens + context_s * tokens * (tokens before each, on average)`, times
    what passes of about that length took of it."""

    fixed_s: float = 0.0
    """Of any pass, however short: on a GPU the launches."""
    token_s: float
    """Of everything but attention to the tokens before."""
    context_s: float
    """Of attention to one token before."""
    margin: float = 1.0
    """What passes of late took of what was predicted (`cachetree.planning.margin`)."""
    most_tokens: float = inf
    """Of one pass; more take several."""
    known_tokens: float = inf
    """Of longer passes nothing is known."""
    curve: tuple[tuple[float, float], ...] = ()
    """(log2 of tokens, observed / predicted), ascending; between them linear, beyond them flat."""

    @classmethod
    def of_sizes(
        cls, hidden_size: int, seconds_per_token: float = SECONDS_PER_TOKEN
    ) -> PrefillCost:
        """From the sizes alone. Per layer a token takes about 24 h² operations (12 h² weights) and
        4 h for every token before it, so that both are equal at 6 h."""
        attention_tokens = _ATTENTION_TOKENS_PER_HIDDEN * hidden_size
        return cls(token_s=seconds_per_token, context_s=seconds_per_token / attention_tokens)

    @property
    def attention_tokens(self) -> float:
        """How many stand before a token whose attention to them costs as much as all the rest."""
        return self.token_s / self.context_s

    def seconds(self, start: int, stop: int) -> float:
        """Of tokens `[start, stop)`, with those before them in the cache."""
        num_tokens = stop - start
        num_passes = max(1, ceil(num_tokens / self.most_tokens))
        token_s = self.token_s + self.context_s * (start + stop) / 2
        return (num_passes * self.fixed_s + num_tokens * token_s) * self.factor(
            num_tokens / num_passes
        )

    def knows(self, num_tokens: int) -> bool:
        return min(num_tokens, self.most_tokens) <= self.known_tokens

    def factor(self, num_tokens: float) -> float:
        """Of `curve`."""
        if not self.curve or num_tokens <= 0:
            return 1.0
        at = log2(num_tokens)
        index = bisect_left(self.curve, at, key=lambda point: point[0])
        if index in (0, len(self.curve)):
            return self.curve[min(index, len(self.curve) - 1)][1]
        (x0, y0), (x1, y1) = self.curve[index - 1 : index + 1]
        return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
