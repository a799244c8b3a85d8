"""Index the pages that each model of this server has in the KV pool, for its other models.

SGLang gives each adapter a radix tree of its own. This index notes each insertion also in the
cache's tree, at one location per adapter. So one look-up finds the pages of all models. SGLang does
not report evictions, so a note is only a hint. Before a plan uses a note, each rank looks up the
pages in SGLang's tree, and corrects its note. Until then, the notes of two ranks may differ.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from cachetree import KV, POOL_PREFIX, Location, ModelId, PageHash, Part
from cachetree.planning import Plan
from cachetree.tree import CacheTree
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
from sglang_droidspeak.ranks import Ranks

_MAX_PLACES: Final = 256
"""Largest number of namespaces (suffixes of SGLang's `extra_key`) with notes. Each may have notes
for all pages of the pool. An activated adapter has one for each token at which it began to act."""
_MAX_POOLS: Final = 4
"""Largest number of notes in all, as a multiple of the pages that the pool can hold."""


def pool_of(namespace: str) -> Location:
    """Return the location of KV in SGLang's tree under a namespace (suffix of `extra_key`)."""
    return Location(f"{POOL_PREFIX}{namespace}")


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages of one model that are locked in SGLang's tree until `release`."""

    slots: torch.Tensor
    """KV slots of the plan's pages, int64."""
    release: Callable[[], None] = lambda: None
    """Function that lets SGLang evict the pages again."""
    has_e: bool = False
    """Whether these pages have E at every layer at which a recompute can begin."""


@dataclass(frozen=True, slots=True)
class Held:
    """Numbers of leading pages of a prompt that the device has, by kind of KV."""

    exact: int
    approximate: int


@dataclass(eq=False)
class PoolIndex:
    """Notes of the pages in this server's KV pool, for each namespace (suffix of SGLang's
    `extra_key`). Scheduler thread only."""

    _tree: CacheTree
    _e_parts: Sequence[Part]
    """Layers at which SGLang's forwards store E beside the KV."""
    _page_size: int
    _num_slots: int
    _ranks: Ranks
    _places: OrderedDict[Location, None] = field(default_factory=OrderedDict, init=False)
    """Locations with notes. The location that was unused for longest is first."""
    _loaded: OrderedDict[tuple[str, PageHash], None] = field(
        default_factory=OrderedDict, init=False
    )
    """Namespace (suffix of `extra_key`) and hash of each page made from another model's KV, oldest
    first. Later pages of the prompt, which this model computed itself, have no note."""
    is_read: bool = field(default=False, init=False)
    """Whether a model of this server may read pages of another model of this server. It may if the
    server has adapters."""
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
        """Note pages of `model` that SGLang is about to insert from the root of its tree, into a
        namespace (suffix of `extra_key`).

        SGLang's tree already has the first `num_there` pages. Of the others, the pages before
        `num_loaded` have no E.

        If a page is noted with E, its slots in SGLang's tree have E. This holds because every
        request that may load is noted before each insertion. SGLang's own forwards computed all
        pages that were not loaded, and wrote their E. Pages that the tree already has keep their
        slots and notes. A page without a note counts as without E, and no E behind it is used.
        """
        location, remote = pool_of(namespace), self._tree.remote
        most = self._num_slots // self._page_size * (1 + len(self._e_parts))
        remote.limit(location, most)
        self._places[location] = None
        self._places.move_to_end(location)
        num_known, _ = self._noted(location, model, pages)
        start = min(num_there, num_known)
        if start < len(pages):
            parent = pages[start - 1] if start else None
            has_e = num_loaded <= num_there <= num_known
            remote.add(location, model, parent, pages[start:])
            for part in self._e_parts:
                if has_e:
                    remote.add(location, model, parent, pages[start:], part)
                else:  # These pages have other slots now.
                    remote.drop(location, model, pages[start:], part)
        while len(self._places) > _MAX_PLACES or (
            sum(remote.num_pages[it] for it in self._places) > _MAX_POOLS * most
        ):
            self._leave([next(iter(self._places))])

    def forget(self, lora_id: str) -> None:
        """Forget an unloaded adapter: no request can reach its part of SGLang's tree any more."""
        mine = pool_of(lora_id)
        self._leave([it for it in self._places if it.partition("@")[0] == mine])

    def clear(self) -> None:
        """Forget all notes: the pool is empty."""
        self._leave(list(self._places))
        self._loaded.clear()
        self.has_approximate = False

    def _leave(self, places: Iterable[Location]) -> None:
        for location in places:
            self._tree.remote.forget(location)
            self._tree.remote.leave(location)
            del self._places[location]

    def note_loaded(self, namespace: str, pages: Iterable[PageHash]) -> None:
        """Note that these pages of a namespace (suffix of `extra_key`) were made from another
        model's KV. A note stays if SGLang evicts its page. The oldest notes are forgotten if there
        are too many: `_MAX_POOLS` times the pages of the pool."""
        self.has_approximate = True
        for page in pages:
            self._loaded[namespace, page] = None
            self._loaded.move_to_end((namespace, page))
        while len(self._loaded) > _MAX_POOLS * self._num_slots // self._page_size:
            self._loaded.popitem(last=False)

    def num_loaded(self, namespace: str, pages: Iterable[PageHash]) -> int:
        return sum((namespace, page) in self._loaded for page in pages)

    def held(self, req: Req, num_pages: int, tree: UnifiedRadixCache) -> Held:
        """Return how many of the request's first pages the device has as exact KV, and how many as
        approximate KV."""
        exact = prefixes.num_held(req, prefixes.namespace_of(req), num_pages, tree)
        if not self.has_approximate:
            return Held(exact, 0)
        approximate = prefixes.num_held(req, prefixes.approximate_of(req), num_pages, tree)
        return Held(exact, approximate)

    def lock(
        self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache
    ) -> PoolPages | None:
        """Lock the plan's pages, so that SGLang evicts none until they are released. Return None on
        all ranks if one rank lacks a page. All ranks call this for the same requests, in the same
        order."""
        (num_pages,) = self._ranks.least([self._num_held(plan, pages, req, tree)])
        if not self._is_all(plan, pages, num_pages):
            return None
        namespace = plan.location.removeprefix(POOL_PREFIX)
        node, slots = prefixes.use(req, namespace, plan.pages.stop, tree)
        lock = tree.lock(node)
        slots = slots[plan.pages.start * self._page_size :]
        has_e = self._num_with_e(plan, pages) == plan.pages.stop
        return PoolPages(slots, lambda: tree.unlock(lock), has_e)

    def has(self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache) -> bool:
        """Return whether SGLang still has all pages of the plan, with the E that the plan needs.
        Drop the notes of evicted pages. Reads nothing from the device."""
        return self._is_all(plan, pages, self._num_held(plan, pages, req, tree))

    def _is_all(self, plan: Plan, pages: Sequence[PageHash], num_pages: int) -> bool:
        if num_pages == plan.pages.stop:
            return True
        self._tree.remote.drop(plan.location, plan.sender, pages[num_pages:])
        return False

    def _num_held(
        self, plan: Plan, pages: Sequence[PageHash], req: Req, tree: UnifiedRadixCache
    ) -> int:
        """Return how many of the prompt's leading pages SGLang holds and the plan can use."""
        namespace = plan.location.removeprefix(POOL_PREFIX)
        num_pages = prefixes.num_held(req, namespace, plan.pages.stop, tree)
        return (
            min(num_pages, self._num_with_e(plan, pages)) if plan.transition_layers else num_pages
        )

    def _num_with_e(self, plan: Plan, pages: Sequence[PageHash]) -> int:
        return self._noted(plan.location, plan.sender, pages[: plan.pages.stop])[1]

    def _noted(
        self, location: Location, model: ModelId, pages: Sequence[PageHash]
    ) -> tuple[int, int]:
        """Return how many leading pages have a note, and how many of these have a note of E as
        well. This counts as a use of the notes."""
        num_kv, *with_e = (
            self._tree.remote.reach(location, model, pages, part, is_use=True)
            for part in (KV, *self._e_parts)
        )
        return num_kv, min(with_e, default=0)
