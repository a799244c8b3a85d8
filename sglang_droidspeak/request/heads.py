"""Recognise heads: first pages that many prompts share. Each model computes its heads itself.

If a shared template came from another model, every later answer would be approximate. So requests
read approximate KV only behind the head of their prompt, such as a system prompt. A head of n pages
is recognised once n prompts, at least two, have continued differently behind it. Then a model
computes the head once: on average, at most one page for each of these prompts.

The first requests with a head may have loaded it as approximate KV. Once a head is recognised,
later requests read in another namespace (`prefixes.approximate_of`), in which the head is exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from cachetree import PageHash

MAX_HEAD: Final = 64
"""Number of pages of the longest head that is recognised."""
_MAX_KNOWN: Final = 8192
"""Largest number of keys of `SharedHeads._next`. The page unused for longest is forgotten first."""


class SharedHeads:
    """Heads (first pages) that the prompts so far share. All ranks note the same prompts in the
    same order. Scheduler thread only."""

    def __init__(self) -> None:
        self._next: Final[OrderedDict[PageHash, set[PageHash]]] = OrderedDict()
        """Different pages that came next after each page, up to the number that makes a head."""

    def note(self, pages: Sequence[PageHash]) -> None:
        """Note the first pages of a prompt. A page's hash stands for all pages up to this one."""
        for number, page in enumerate(pages[:MAX_HEAD], 1):
            following = self._next.setdefault(page, set())
            self._next.move_to_end(page)
            if number < len(pages) and len(following) < max(2, number):
                following.add(pages[number])
        while len(self._next) > _MAX_KNOWN:
            self._next.popitem(last=False)

    def length(self, pages: Sequence[PageHash]) -> int:
        """Return the number of first pages that are this prompt's head. 0 for most prompts."""
        ends = (
            number
            for number, page in enumerate(pages[:MAX_HEAD], 1)
            if len(self._next.get(page, ())) >= max(2, number)
        )
        return max(ends, default=0)
