"""What every model of this server has in its KV pool.

SGLang gives each adapter a radix tree of its own. What is inserted there is noted in the cache's
tree too, at a location per adapter, so that one walk finds it for all others. SGLang does not tell
what it evicts: a note is a hint, looked up in SGLang's tree before anything is planned on it, and
corrected where it was wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cachetree import POOL_PREFIX, Location, ModelId, PageHash
from cachetree.planning import Plan
from cachetree.tree import CacheTree
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import NodeId, Req, UnifiedRadixCache
from sglang_droidspeak.store.e_pool import EPool


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


@dataclass(frozen=True, slots=True)
class Held:
    """How many pages of a prompt the device has."""

    exact: int
    approximate: int

    @property
    def is_approximate_longer(self) -> bool:
        return self.approximate > self.exact


@dataclass(eq=False)
class PoolIndex:
    """Scheduler thread only."""

    _tree: CacheTree
    _e_pool: EPool
    _page_size: int
    _num_slots: int
    _ages: OrderedDict[tuple[Location, ModelId, PageHash], None] = field(
        default_factory=OrderedDict, init=False
    )
    """Pages noted, the one longest unused first, and each after those that stand on it."""
    is_told: bool = field(default=False, init=False)
    """Whether others than this server's models ask what the pool has."""
    has_approximate: bool = field(default=False, init=False)
    """Whether SGLang's tree can have approximate KV."""

    def note(self, namespace: str, model: ModelId, pages: Sequence[PageHash]) -> None:
        """These pages, from the root, are now in that namespace of SGLang's tree, as `model`'s."""
        location = pool_of(namespace)
        num_known = self._tree.reach(location, model, pages)
        if num_known < len(pages):
            parent = pages[num_known - 1] if num_known else None
            e_layers = self._e_pool.layers
            self._tree.add_remote(location, model, parent, pages[num_known:], e_layers)
        for page in reversed(pages):
            self._ages[location, model, page] = None
            self._ages.move_to_end((location, model, page))
        while len(self._ages) > self._num_slots // self._page_size:
            (location, model, page), _ = self._ages.popitem(last=False)
            self._tree.drop_remote(location, model, [page])

    def forget(self, lora_id: str) -> None:
        """The adapter is gone, and nobody can ask for its part of SGLang's tree any more."""
        mine = pool_of(lora_id)
        for location in {it for it, _, _ in self._ages if it.partition("@")[0] == mine}:
            self._tree.forget(location)

    def clear(self) -> None:
        """Nothing is in the pool any more."""
        for location in {location for location, _, _ in self._ages}:
            self._tree.forget(location)
        self._ages.clear()
        self.has_approximate = False

    def held(self, req: Req, num_pages: int, tree: UnifiedRadixCache) -> Held:
        """What SGLang would find of the request's first pages in either namespace."""
        namespace = prefixes.namespace_of(req)
        exact = self._num_held(req, namespace, num_pages, tree)
        if not self.has_approximate:
            return Held(exact, 0)
        approximate = self._num_held(req, prefixes.approximate_of(req), num_pages, tree)
        return Held(exact, approximate)

    def _num_held(self, req: Req, namespace: str, num_pages: int, tree: UnifiedRadixCache) -> int:
        _node, slots = prefixes.slots_of(req, namespace, num_pages, tree)
        return len(slots) // self._page_size

    def lock(
        self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache
    ) -> PoolPages | None:
        """As `find`, and SGLang evicts none of them before they are released."""
        found = self.find(plan, pages, req, tree)
        if found is None:
            return None
        node, slots = found
        lock = tree.lock(node)
        return PoolPages(slots, lambda: tree.unlock(lock))

    def find(
        self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache
    ) -> tuple[NodeId, torch.Tensor] | None:
        """The last node and the slots of the plan's pages; None where the note was wrong, which it
        is no more."""
        namespace = plan.location.removeprefix(POOL_PREFIX)
        node, slots = prefixes.slots_of(req, namespace, plan.pages.stop, tree)
        num_there = len(slots) // self._page_size
        if num_there < plan.pages.stop:
            self._tree.drop_remote(plan.location, plan.sender, pages[num_there:])
            return None
        wanted = slots[plan.pages.start * self._page_size :]
        if plan.transition_layers and self._e_pool.num_pages_without(wanted, self._page_size):
            known = pages[: plan.pages.stop]
            self._tree.add_remote(plan.location, plan.sender, None, known, ())
            return None
        return node, wanted
