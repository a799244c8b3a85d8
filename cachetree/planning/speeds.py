"""Recently measured speeds of the device and of links. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf, log2
from typing import Final

SECONDS_PER_TOKEN: Final = 1e-4
"""Seconds per token of an 8B model on one GPU, assumed until the device is measured. Until then
only the ratio of two costs matters."""
_ATTENTION_TOKENS_PER_HIDDEN: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Cost of a prefill. A pass takes the following seconds, at least `least_s`, times a factor:

    `fixed_s + token_s * tokens + context_s * tokens * (mean tokens before each)`

    The factor, from `curve`, is observed / predicted for recent passes of about this length.
    """

    least_s: float = 0.0
    """Least seconds of any pass: the launches of kernels on a GPU, or reading the weights."""
    fixed_s: float = 0.0
    """Seconds of a pass that do not depend on its tokens."""
    token_s: float
    """Seconds per token of everything except attention to earlier tokens."""
    context_s: float
    """Seconds that a token's attention to one earlier token takes."""
    margin: float = 1.0
    """Safety factor on predicted times, from recent passes (see `Margin`)."""
    most_tokens: float = inf
    """Largest number of tokens of one pass; more tokens take several passes."""
    known_tokens: float = inf
    """Tokens of the longest measured pass. The costs of longer passes count as unknown."""
    curve: tuple[tuple[float, float], ...] = ()
    """Points (log2 of tokens, observed / predicted), ascending. The curve is linear between two
    points, and flat beyond the last."""

    @classmethod
    def of_sizes(cls, hidden_size: int) -> PrefillCost:
        """Estimate costs from the hidden size h only. Per layer, a token takes about 24 h²
        operations (12 h² weights), and 4 h operations for every earlier token. With 6 h earlier
        tokens both are equal."""
        attention_tokens = _ATTENTION_TOKENS_PER_HIDDEN * hidden_size
        return cls(token_s=SECONDS_PER_TOKEN, context_s=SECONDS_PER_TOKEN / attention_tokens)

    def seconds(self, start: int, stop: int) -> float:
        """Seconds for tokens `[start, stop)`, with earlier tokens in the cache."""
        num_tokens = stop - start
        num_passes = max(1, ceil(num_tokens / self.most_tokens))
        each = num_tokens / num_passes
        return num_passes * self.pass_s(each, each * (start + stop) / 2)

    def pass_s(self, num_tokens: float, context: float) -> float:
        """Seconds of one pass. `context` is the number of earlier tokens, summed over the pass's
        tokens."""
        linear_s = self.fixed_s + self.token_s * num_tokens + self.context_s * context
        return max(self.least_s, linear_s) * self.factor(num_tokens)

    def knows(self, num_tokens: int) -> bool:
        return min(num_tokens, self.most_tokens) <= self.known_tokens

    def factor(self, num_tokens: float) -> float:
        """Factor of `curve` for a pass of that many tokens."""
        if not self.curve or num_tokens <= 0:
            return 1.0
        at = log2(num_tokens)
        index = bisect_left(self.curve, at, key=lambda point: point[0])
        if index in (0, len(self.curve)):
            return self.curve[min(index, len(self.curve) - 1)][1]
        (x0, y0), (x1, y1) = self.curve[index - 1 : index + 1]
        return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """State of a link that running fetches share evenly. While a new fetch runs, each other fetch
    gets as many bytes as the new one, or all bytes that it still needs.

    A fetch of B bytes, with A bytes ahead of it and a backlog of r1, r2, ..., takes (B + A +
    min(r1, B) + min(r2, B) + ...) × byte_s × margin, without `fixed_s`.
    """

    byte_s: float
    fixed_s: float = 0.0
    """Least seconds of any fetch: a round trip, and the time until the server notices the end."""
    margin: float = 1.0
    """Safety factor on predicted times, from recent transfers (see `Margin`)."""
    backlog: Sequence[int] = ()
    """Bytes that each running fetch still has to transfer."""
    ahead: int = 0
    """Largest number of bytes that the link transfers before a new fetch. They belong to fetches
    with an earlier turn, and to abandoned fetches that cannot be stopped any more."""
    frame_bytes: int = 0
    """Largest number of bytes of a frame. Arrived bytes are counted in whole frames."""
    copy_byte_s: float = 0.0
    """Seconds per byte from host memory into the device's KV slots."""

    def seconds(self, num_bytes: int) -> float:
        """Predicted seconds until `num_bytes` of a new fetch have arrived. Add `fixed_s` for the
        whole."""
        return self.margin * self.byte_s * self._carried(num_bytes)

    def rest_s(self, elapsed_s: float, num_landed: int, num_bytes: int) -> float:
        """Return the least seconds for the rest of a fetch, at its rate so far. `num_landed` is at
        least one. The frame that is on its way counts as transferred."""
        carried = self._carried(min(num_landed + self.frame_bytes, num_bytes))
        return elapsed_s * (self._carried(num_bytes) / carried - 1)

    def _carried(self, num_bytes: int) -> int:
        """Return how many bytes the link transfers for all fetches until `num_bytes` of a new fetch
        have arrived."""
        if not num_bytes:
            return 0
        return num_bytes + self.ahead + sum(min(rest, num_bytes) for rest in self.backlog)

    def copy_s(self, num_bytes: int) -> float:
        return self.copy_byte_s * num_bytes


FREE_LINK: Final = Link(byte_s=0.0)
"""Link that takes no time. It stands for the engine's own pool, and for unknown links."""

QUANTILE: Final = 0.9
"""Share of recent observations that the margin has to cover."""
MOST: Final = 1.5
"""Largest margin. With a larger margin reuse would never be tried, and speeds would not be measured
again."""
_NUM_KEPT: Final = 64


class Margin:
    """Safety factor for predictions: the `QUANTILE` of observed / predicted over recent
    observations, at least 1 and at most `MOST`."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_NUM_KEPT)

    def add(self, observed_s: float, predicted_s: float) -> None:
        if predicted_s > 0:
            self._ratios.append(observed_s / predicted_s)

    @property
    def factor(self) -> float:
        """Return the margin. It is 1 before the first observation."""
        ratios = sorted(self._ratios)
        quantile = ratios[int(QUANTILE * (len(ratios) - 1))] if ratios else 1.0
        return min(max(quantile, 1.0), MOST)


def weighted_median(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the median of (value, weight) pairs; 0 if there are none."""
    ascending = sorted(pairs)
    until = list(accumulate(weight for _, weight in ascending))
    return ascending[bisect_left(until, until[-1] / 2)][0] if ascending else 0.0


def most_of(values: Iterable[float]) -> float | None:
    """Return a value that two thirds of the values do not exceed; None if there are none."""
    ascending = sorted(values)
    return ascending[2 * (len(ascending) - 1) // 3] if ascending else None
