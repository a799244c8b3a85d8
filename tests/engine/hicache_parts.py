"""Caches over HiCache backends: SGLang's own, and some that misbehave."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import tier_parts
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from transport_parts import E_LAYER, FAMILY, MODEL, eventually, store

from cachetree import (
    Cache,
    CacheConfig,
    CacheTree,
    Clock,
    Family,
    ModelId,
    NoteSpeed,
    PageHash,
    Span,
)
from sglang_droidspeak.hicache import HICACHE, HiCacheTier, Objects, hicache_tier

plan_of = partial(tier_parts.plan_of, HICACHE)
SENDERS: Mapping[ModelId, Collection[int]] = {MODEL: (E_LAYER,)}


class Counts(Counter[str]):
    def __call__(self, result: str, num: int) -> None:
        self[result] += num


def open_cache(path: Path, family: Family = FAMILY, **config: Any) -> Cache:
    tier = hicache_tier("file", {"file_storage_path": str(path)}, SENDERS, Counts())
    return Cache(family, CacheConfig(serves=False, **config), tiers=[tier])


def tier_of(cache: Cache) -> HiCacheTier:
    tier = cache._tiers[HICACHE]
    assert isinstance(tier, HiCacheTier)
    return tier


num_there = partial(tier_parts.num_at, location=HICACHE)
num_with_e = partial(tier_parts.num_e_at, location=HICACHE)


def search(cache: Cache, pages: Sequence[PageHash]) -> int:
    """Ask the backend, and return how many of the pages it has."""
    for result in cache.search(pages):
        eventually(lambda it=result: it.is_over)
    return num_there(cache, pages)


def fetch(cache: Cache, pages: Sequence[PageHash], span: Span, seconds: float = 10) -> None:
    tier_parts.fetch(cache, HICACHE, pages, span, seconds)


def objects_of(cache: Cache) -> Mapping[str, int]:
    """Return how many objects were counted, by result."""
    counts = tier_of(cache)._count
    assert isinstance(counts, Counts)
    return counts


class Shelf:
    """A backend that keeps objects in a dict. `before` may raise, block, or count."""

    def __init__(self, before: Callable[[str], None] = lambda _call: None) -> None:
        self.before = before
        slot_bytes = Objects(FAMILY).slot_bytes
        self.slots = [memoryview(bytearray(slot_bytes)) for _ in range(8)]
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self.takes = True
        self.lies = False
        self.is_closed = False

    def num_leading(self, keys: Sequence[str]) -> int:
        self.calls.append(("exists", len(keys)))
        self.before("exists")
        if self.lies:
            return len(keys)
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))

    def read(self, keys: Sequence[str], slots: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        self.calls.append(("read", len(keys)))
        self.before("read")
        for key, slot, size in zip(keys, slots, sizes, strict=True):
            if key in self.objects:
                self.slots[slot][:size] = self.objects[key]
        return [key in self.objects for key in keys]

    def write(self, keys: Sequence[str], slots: Sequence[int], sizes: Sequence[int]) -> bool:
        self.calls.append(("write", len(keys)))
        self.before("write")
        for key, slot, size in zip(keys, slots, sizes, strict=True):
            if self.takes:
                self.objects[key] = bytes(self.slots[slot][:size])
        return self.takes

    def close(self) -> None:
        self.is_closed = True


def cache_over(shelf: Shelf, clock: Clock = time.monotonic, **config: Any) -> Cache:
    def make(tree: CacheTree, note_speed: NoteSpeed) -> HiCacheTier:
        return HiCacheTier(tree, shelf, SENDERS, note_speed, Counts(), clock)

    return Cache(FAMILY, CacheConfig(serves=False, **config), tiers=[make], clock=clock)


class PointerStore(HiCacheStorage):
    """A backend that moves memory by address, only through the registered host pool."""

    objects: ClassVar[dict[str, bytes]] = {}

    def __init__(self, config: Any, _kwargs: Any) -> None:
        self.suffix = f"{config.model_name}_{config.tp_rank}"

    def _halves(self, keys: Sequence[str], indices: torch.Tensor) -> list[tuple[str, int, int]]:
        assert indices.numel() == len(keys) * self.mem_pool_host.page_size
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(indices)
        names = [f"{key}_{self.suffix}_{half}" for key in keys for half in "kv"]
        return list(zip(names, addresses, sizes, strict=True))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, _extra: Any = None) -> Any:
        for name, address, size in self._halves(keys, host_indices):
            self.objects[name] = ctypes.string_at(address, size)
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, _extra: Any = None) -> Any:
        halves = self._halves(keys, host_indices)
        for name, address, size in halves:
            if name in self.objects:
                assert len(self.objects[name]) == size
                ctypes.memmove(address, self.objects[name], size)
        is_stored = [name in self.objects for name, _, _ in halves]
        return [all(pair) for pair in zip(is_stored[::2], is_stored[1::2], strict=True)]

    def exists(self, key: str) -> bool:
        return f"{key}_{self.suffix}_v" in self.objects

    def get(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    batch_get = set = batch_set = get  # type: ignore[assignment]


def store_without_e(cache: Cache, pages: list[PageHash]) -> None:
    """Store pages without E, like pages that were loaded from another cache."""
    reservation = cache.tree.reserve(MODEL, None, pages)
    assert reservation is not None
    reservation.commit()


def store_and_wait(cache: Cache, pages: list[PageHash], parent: PageHash | None = None) -> None:
    before = num_with_e(cache, pages)
    store(cache.tree, pages, parent)
    eventually(lambda: parent or num_with_e(cache, pages) == len(pages) > before)
