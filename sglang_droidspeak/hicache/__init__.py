"""KV and E in the storage backends of SGLang's HiCache, as a tier of the cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cachetree import MakeTier, ModelId, NoteSpeed
from cachetree.tree import CacheTree
from sglang_droidspeak.engine.hicache import Backend
from sglang_droidspeak.hicache.lane import Count
from sglang_droidspeak.hicache.objects import Objects
from sglang_droidspeak.hicache.tier import HICACHE, HiCacheStatus, HiCacheTier, num_slots

__all__ = ["HICACHE", "HiCacheStatus", "HiCacheTier", "Objects", "hicache_tier"]


def hicache_tier(
    name: str,
    config: Mapping[str, Any],
    senders: Mapping[ModelId, Collection[int]],
    count: Count = lambda _result, _num: None,
) -> MakeTier:
    """What a Cache needs to make the tier; raises ConfigError when it does."""

    def make(tree: CacheTree, note_speed: NoteSpeed) -> HiCacheTier:
        objects = Objects(tree.family)
        backend = Backend(
            name,
            config,
            tp_rank=tree.family.tp_rank,
            tp_size=tree.family.tp_size,
            slot_bytes=objects.slot_bytes,
            num_slots=num_slots(objects),
        )
        return HiCacheTier(tree, backend, senders, note_speed, count=count)

    return make
