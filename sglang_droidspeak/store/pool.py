"""What every model of this server has in its KV pool.

SGLang gives each adapter a radix tree of its own. What is inserted there is noted in the cache's
tree too, at a location per adapter, so that one walk finds it for all others. SGLang does not tell
what it evicts: a note is a hint, looked up in SGLang's tree before anything is planned on it, and
corrected where it was wrong. Ranks look up what they like, so notes differ between them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from cachetree import POOL_PREFIX, Location, ModelId, PageHash
from cachetree.planning import Plan
from cachetree.tree import CacheTree
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
from sglang_droidspeak.ranks import Ranks

_MAX_PLACES: Final = 256
"""Namespaces of which something is noted, each up to as much as the pool can hold. An activated
adapter has one for every place at which it was invoked."""


def pool_of(namespace: str) -> Location:
    """Where the KV lies that this server has for requests of that namespace."""
    return Location(f"{POOL_PREFIX}{namespace}")


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages of one model in SGLang's tree."""

    slots: torch.Tensor
    """KV slots of the plan's pages, int64."""
    release: Callable[[], None] = lambda: None
    """SGLang may evict them again."""
    has_e: bool = False
    """All that a recompute of them can begin with."""


@dataclass(frozen=True, slots=True)
class Held:
    """How many pages of a prompt the device has."""

    exact: int
    approximate: int


@dataclass(eq=False)
class PoolIndex:
    """Scheduler thread only."""

    _tree: CacheTree
    _e_layers: Sequence[int]
    """Of which layers SGLang's forwards leave E beside the KV."""
    _page_size: int
    _num_slots: int
    _ranks: Ranks
    _places: OrderedDict[Location, None] = field(default_factory=OrderedDict, init=False)
    """Where something is noted, the one longest unused first."""
    is_read: bool = field(default=False, init=False)
    """Whether anybody asks what the pool has, or may: a model of this server, or others."""
    has_approximate: bool = field(default=False, init=False)
    """Whether SGLang's tree can have approximate KV."""

    def note(
        self,
        namespace: str,
        model: ModelId,
        pages: Sequence[PageHash],
        num_there: int,
        num_loaded: int,
    ) -> None:
        """SGLang inserts these pages, from the root, into that namespace of its tree, as `model`'s.
        It has the first `num_there`, and of the others the first `num_loaded` come without E.

        A page that is noted with E has it in whatever slots the tree has for it. Whoever may load
        comes here before each insertion, and what was not loaded was computed by SGLang's own
        forwards, which write E; who never comes here loads nothing. What the tree has keeps its
        slots and so its note: unnoted, it counts as without E, and behind such a page E is of no
        use.
        """
        location = pool_of(namespace)
        self._tree.remote.limit(location, self._num_slots // self._page_size)
        self._places[location] = None
        self._places.move_to_end(location)
        if len(self._places) > _MAX_PLACES:
            self._leave(list(self._places)[:1])
        num_known = self._tree.remote.reach(location, model, pages)
        start = min(num_there, num_known)
        if start < len(pages):
            parent = pages[start - 1] if start else None
            has_e = num_loaded <= num_there <= num_known
            e_layers = self._e_layers if has_e else ()
            self._tree.remote.add(location, model, parent, pages[start:], e_layers)

    def forget(self, lora_id: str) -> None:
        """The adapter is gone, and nobody can ask for its part of SGLang's tree any more."""
        mine = pool_of(lora_id)
        self._leave([it for it in self._places if it.partition("@")[0] == mine])

    def clear(self) -> None:
        """Nothing is in the pool any more."""
        self._leave(list(self._places))
        self.has_approximate = False

    def _leave(self, places: Iterable[Location]) -> None:
        for location in places:
            self._tree.remote.forget(location)
            self._tree.remote.leave(location)
            del self._places[location]

    def held(self, req: Req, num_pages: int, tree: UnifiedRadixCache) -> Held:
        """What SGLang would find of the request's first pages in either namespace."""
        exact = prefixes.num_held(req, prefixes.namespace_of(req), num_pages, tree)
        if not self.has_approximate:
            return Held(exact, 0)
        approximate = prefixes.num_held(req, prefixes.approximate_of(req), num_pages, tree)
        return Held(exact, approximate)

    def lock(
        self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache
    ) -> PoolPages | None:
        """The plan's pages, of which SGLang evicts none before they are released; None where `has`
        says so on any rank. All ranks do this for the same requests, in the same order."""
        if not all(self._ranks.least([self.has(plan, pages, req, tree)])):
            return None
        namespace = plan.location.removeprefix(POOL_PREFIX)
        node, slots = prefixes.use(req, namespace, plan.pages.stop, tree)
        lock = tree.lock(node)
        slots = slots[plan.pages.start * self._page_size :]
        return PoolPages(slots, lambda: tree.unlock(lock), self._has_e(plan, pages))

    def has(self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache) -> bool:
        """Whether SGLang has all of the plan's pages still, and they the E that it needs; what is
        gone is noted. Asks the device for nothing."""
        namespace = plan.location.removeprefix(POOL_PREFIX)
        num_there = prefixes.num_held(req, namespace, plan.pages.stop, tree)
        if num_there < plan.pages.stop:
            self._tree.remote.drop(plan.location, plan.sender, pages[num_there:])
            return False
        return not plan.transition_layers or self._has_e(plan, pages)

    def _has_e(self, plan: Plan, pages: Sequence[PageHash]) -> bool:
        asked = plan.location, plan.sender, pages[: plan.pages.stop], self._e_layers
        return bool(self._e_layers) and self._tree.remote.reach(*asked) == plan.pages.stop
