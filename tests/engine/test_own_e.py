"""A server stores E of its own model. For loaded pages, E is taken from the place from which they
came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transport_parts import E_LAYER, FAMILY, MODEL, eventually, pages_of

from cachetree import DISK, KV, LOCAL, Cache, CacheConfig, Change, Location, PageHash, Part, Span
from sglang_droidspeak.store.e_pool import EPool
from sglang_droidspeak.store.insertions import Offload, Offloader

PAGE = FAMILY.page_size
PAGES = pages_of(4)


class Rig:
    """A rig that stores pages of which the first were loaded. It says which KV and E the cache
    took."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.stored: list[Change] = []
        self.copied: set[tuple[int, ...]] = set()
        """Slots with content that was stored."""
        cache.tree.subscribe(self.stored.append)

    def store(self, pages: list[PageHash], num_loaded: int, num_before: int = 0) -> None:
        runner: Any = SimpleNamespace(dtype=torch.float32, device="cpu")
        new = pages[num_before:]
        e_pool = EPool((E_LAYER,), len(new) * PAGE, Span(0, 8), runner)
        slots = torch.arange(len(new) * PAGE)
        e_pool.valid[slots[num_loaded * PAGE :]] = True
        pool: Any = SimpleNamespace(e_pool=e_pool, page_size=PAGE)
        pool.store = lambda _targets, slots: self.copied.add(tuple(slots.tolist()))
        offloader = Offloader(self.cache, pool, None)
        before = pages[:num_before]
        offloader.put(Offload(model=MODEL, before=before, pages=new, slots=slots, ready=()))
        offloader.close()

    def pages_of(self, part: Part) -> list[PageHash]:
        return [page for it in self.stored if it.added and it.part == part for page in it.pages]


@pytest.mark.parametrize("num_loaded", [0, 1, 4])
def test_pages_are_stored_with_e_unless_pages_before_them_were_loaded_without(num_loaded):
    config = CacheConfig(host_bytes=1 << 20, staging_bytes=1 << 16, serves=False)
    with Cache(FAMILY, config) as cache:
        rig = Rig(cache)
        rig.store(PAGES, num_loaded)
    assert rig.pages_of(KV) == PAGES
    assert rig.pages_of(Part(E_LAYER)) == ([] if num_loaded else PAGES)


def test_pages_that_follow_stored_ones_are_copied_from_their_own_slots():
    config = CacheConfig(host_bytes=1 << 20, staging_bytes=1 << 16, serves=False)
    with Cache(FAMILY, config) as cache:
        rig = Rig(cache)
        rig.store(PAGES[:2], 0)
        rig.copied.clear()
        rig.store(PAGES, 0)
    assert rig.copied == {tuple(range(2 * PAGE, 4 * PAGE))}


@pytest.mark.parametrize("num_before", [0, 2])
def test_e_of_loaded_pages_is_brought_from_disk_for_what_follows(tmp_path, num_before):
    disk = {"disk_path": str(tmp_path), "disk_bytes": 1 << 20}
    config = CacheConfig(host_bytes=1 << 20, staging_bytes=1 << 16, serves=False, **disk)
    with Cache(FAMILY, config) as cache:
        rig = Rig(cache)
        rig.store(PAGES[:3], 0)
        eventually(lambda: num_with_e(cache, DISK) == 3 and not cache.tree.held_bytes)
        cache.tree.evict()
        if num_before:
            reservation = cache.tree.reserve(MODEL, None, PAGES[:num_before])
            reservation.commit()
        rig.store(PAGES, num_loaded=3 - num_before, num_before=num_before)
        assert num_with_e(cache, LOCAL) == 4
        eventually(lambda: num_with_e(cache, DISK) == 4)


def num_with_e(cache: Cache, location: Location) -> int:
    matches = [it for it in cache.match(PAGES) if it.location == location]
    return matches[0].e_pages.get(E_LAYER, 0) if matches else 0
