"""How fast the device and the links are, as it was measured of late. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf, log2
from typing import Final

SECONDS_PER_TOKEN: Final = 1e-4
"""About what an 8B model takes on one GPU; without knowledge of the machine only ratios count."""
_ATTENTION_TOKENS_PER_HIDDEN: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """`fixed_s + token_s * tokens + context_s * tokens * (tokens before each, on average)`, or
    `least_s` where that is more, times what passes of about that length took of it."""

    least_s: float = 0.0
    """Of any pass, however short: on a GPU its launches, or reading the weights."""
    fixed_s: float = 0.0
    """What a pass takes beside its tokens."""
    token_s: float
    """Of everything but attention to the tokens before."""
    context_s: float
    """Of attention to one token before."""
    margin: float = 1.0
    """What passes of late took of what was predicted."""
    most_tokens: float = inf
    """Of one pass; more take several."""
    known_tokens: float = inf
    """Of longer passes nothing is known."""
    curve: tuple[tuple[float, float], ...] = ()
    """(log2 of tokens, observed / predicted), ascending; between them linear, beyond them flat."""

    @classmethod
    def of_sizes(cls, hidden_size: int) -> PrefillCost:
        """From the sizes alone. Per layer a token takes about 24 h² operations (12 h² weights) and
        4 h for every token before it, so that both are equal at 6 h."""
        attention_tokens = _ATTENTION_TOKENS_PER_HIDDEN * hidden_size
        return cls(token_s=SECONDS_PER_TOKEN, context_s=SECONDS_PER_TOKEN / attention_tokens)

    def seconds(self, start: int, stop: int) -> float:
        """Of tokens `[start, stop)`, with those before them in the cache."""
        num_tokens = stop - start
        num_passes = max(1, ceil(num_tokens / self.most_tokens))
        each = num_tokens / num_passes
        return num_passes * self.pass_s(each, each * (start + stop) / 2)

    def pass_s(self, num_tokens: float, context: float) -> float:
        """Of one pass; `context` sums up how many tokens are before each."""
        linear_s = self.fixed_s + self.token_s * num_tokens + self.context_s * context
        return max(self.least_s, linear_s) * self.factor(num_tokens)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """As it is now. Fetches share it evenly: one ends when it and as much of each other have come.

    For its bytes B, A bytes ahead of it and a backlog of r1, r2, ...:
    (B + A + min(r1, B) + min(r2, B) + ...) × byte_s.
    """

    byte_s: float
    fixed_s: float = 0.0
    """Of any fetch, however short: a round trip, and until its end is seen."""
    margin: float = 1.0
    """What transfers of late took of what was predicted."""
    backlog: Sequence[int] = ()
    """Bytes that each fetch under way still has to bring."""
    ahead: int = 0
    """Bytes that come first, at most: of fetches whose turn is before, or that nobody waits for any
    more and nobody can stop."""
    frame_bytes: int = 0
    """What comes is seen in parts of so many bytes at most."""
    copy_byte_s: float = 0.0
    """From host memory into the device's KV slots."""

    def seconds(self, num_bytes: int) -> float:
        """Until that many bytes of a new fetch have come, beside `fixed_s`."""
        return self.margin * self.byte_s * self._carried(num_bytes)

    def rest_s(self, elapsed_s: float, num_landed: int, num_bytes: int) -> float:
        """What the rest of a fetch takes at least, at the rate at which the link carried what has
        come of it, which is something, and the frame that comes now."""
        carried = self._carried(min(num_landed + self.frame_bytes, num_bytes))
        return elapsed_s * (self._carried(num_bytes) / carried - 1)

    def _carried(self, num_bytes: int) -> int:
        """Of all fetches, until so much of a new one has come."""
        if not num_bytes:
            return 0
        return num_bytes + self.ahead + sum(min(rest, num_bytes) for rest in self.backlog)

    def copy_s(self, num_bytes: int) -> float:
        return self.copy_byte_s * num_bytes


FREE_LINK: Final = Link(byte_s=0.0)
"""The engine's own pool, and what nothing is known of."""

QUANTILE: Final = 0.9
"""One in ten of what was seen of late took longer than the prediction times the margin."""
MOST: Final = 1.5
"""No margin is larger: beyond it nothing would be tried that could show that it has changed."""
_NUM_KEPT: Final = 64


class Margin:
    """The `QUANTILE` of observed / predicted over the last observations, from 1 to `MOST`."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_NUM_KEPT)

    def add(self, observed_s: float, predicted_s: float) -> None:
        if predicted_s > 0:
            self._ratios.append(observed_s / predicted_s)

    @property
    def factor(self) -> float:
        """1 until something was predicted."""
        ratios = sorted(self._ratios)
        found = ratios[int(QUANTILE * (len(ratios) - 1))] if ratios else 1.0
        return min(max(found, 1.0), MOST)


def weighted_median(pairs: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight); 0 of none."""
    ascending = sorted(pairs)
    until = list(accumulate(weight for _, weight in ascending))
    return ascending[bisect_left(until, until[-1] / 2)][0] if ascending else 0.0


def most_of(values: Iterable[float]) -> float | None:
    """What two in three do not exceed; None of none."""
    ascending = sorted(values)
    return ascending[2 * (len(ascending) - 1) // 3] if ascending else None
