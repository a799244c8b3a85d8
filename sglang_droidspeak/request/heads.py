"""First pages that many prompts share: a model computes these itself, whoever has them.

A page of a template that came from another model makes every later answer approximate. So requests
read approximate KV only behind the head that their prompt shares with others, such as a system
prompt. A head of n pages is recognised once n prompts have gone different ways behind it, at least
two: each of them pays for one page at most, as the head is computed once.

The first requests with a head may have loaded it as approximate KV. Whoever comes after it was
recognised reads in another namespace (`prefixes.approximate_of`), in which the head is exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from cachetree import PageHash

MAX_HEAD: Final = 64
"""Pages of the longest head that is recognised."""
_MAX_KNOWN: Final = 8192
"""Pages whose followers are known; the one longest unused is forgotten first."""


class SharedHeads:
    """Scheduler thread only; on all ranks with the same prompts, in the same order."""

    def __init__(self) -> None:
        self._next: Final[OrderedDict[PageHash, set[PageHash]]] = OrderedDict()
        """By page: different pages that came next, as many as a head needs."""

    def note(self, pages: Sequence[PageHash]) -> None:
        """A prompt begins with these pages; a page hash covers all pages before it."""
        for number, page in enumerate(pages[:MAX_HEAD], 1):
            following = self._next.setdefault(page, set())
            self._next.move_to_end(page)
            if number < len(pages) and len(following) < max(2, number):
                following.add(pages[number])
        while len(self._next) > _MAX_KNOWN:
            self._next.popitem(last=False)

    def length(self, pages: Sequence[PageHash]) -> int:
        """How many of a prompt's first pages are a head; none of most prompts."""
        ends = (
            number
            for number, page in enumerate(pages[:MAX_HEAD], 1)
            if len(self._next.get(page, ())) >= max(2, number)
        )
        return max(ends, default=0)
