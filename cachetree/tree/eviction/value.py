"""`value`: what saves least per byte goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, log2
from typing import Final

from cachetree.planning import PrefillCost
from cachetree.tree.entries import LocalEntry
from cachetree.tree.eviction.leaf_heap import LeafHeap

HALF_LIFE: Final = 0.25
"""After this share of the budget has come in, a use counts half. Where it is longer, what was read
by many while their task lasted outstays the task: on the shipped multi-agent trace and 64 GiB, a
half-life of one budget saves two thirds as much."""


class ByValue:
    """Expected saving = seconds to recompute × probability of reuse ÷ bytes.

    seconds      of the prefill model, which makes a token dearer the more stand before it. All
                 models of a family have the same sizes, so that the price of a token alone decides
                 nothing
    probability  in proportion to the uses, of which each counts half as much after the cache has
                 taken in `HALF_LIFE` of its budget. Being made is the first use; uses of what went
                 from below an entry are its own
    bytes        KV and E

    All uses fade alike, so that two entries keep their order until one is used: the logarithm of an
    entry's value at time 0 is a key that time does not change, and a heap of those needs no ageing.
    Approximations: E has no price of its own, and a walk that leads to a new entry counts at the
    one above it twice, then and when the new one goes. Without the depth it is LFU with ageing.
    """

    def __init__(self, cost: PrefillCost, page_tokens: int, host_bytes: int) -> None:
        self._cost = cost
        self._page_tokens = page_tokens
        self._half_life_bytes = HALF_LIFE * max(1, host_bytes)
        self._now = 0.0
        """In half-lives."""
        self._heap = LeafHeap(self.key, _inherit)
        self.remove = self._heap.remove
        self.free = self._heap.put
        self.victims = self._heap.leaves

    def add(self, entries: Sequence[LocalEntry]) -> None:
        self._now += sum([entry.num_bytes for entry in entries]) / self._half_life_bytes
        for entry in entries:
            entry.hits = -inf
        self.use(entries[-1:])
        self._heap.put(entries[-1])

    def use(self, entries: Iterable[LocalEntry]) -> None:
        for entry in entries:
            entry.hits = _log_sum(entry.hits, self._now)

    def split(self, head: LocalEntry, tail: LocalEntry) -> None:
        tail.hits, head.hits = head.hits, -inf

    def key(self, entry: LocalEntry) -> float:
        """The logarithm of the value, as seen from time 0."""
        node = entry.node
        seconds = self._cost.seconds(node.start * self._page_tokens, node.stop * self._page_tokens)
        return entry.hits + log2(seconds / entry.num_bytes)


def _inherit(above: LocalEntry, entry: LocalEntry) -> None:
    above.hits = _log_sum(above.hits, entry.hits)


def _log_sum(a: float, b: float) -> float:
    """log2(2^a + 2^b), also where the powers are beyond a float."""
    low, high = min(a, b), max(a, b)
    return high + log2(1 + 2.0 ** (low - high)) if low > -inf else high
