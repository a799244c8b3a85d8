"""What is stored with E is this model's own: loaded pages are stored without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transport_parts import E_LAYER, FAMILY, MODEL, pages_of

from cachetree import Cache, CacheConfig, Span
from sglang_droidspeak.store.e_pool import EPool
from sglang_droidspeak.store.insertions import Offload, Offloader

PAGE, NUM_PAGES = FAMILY.page_size, 4


@pytest.mark.parametrize("num_loaded", [0, 1, 3, 4])
def test_loaded_pages_are_stored_without_e(num_loaded: int) -> None:
    runner: Any = SimpleNamespace(dtype=torch.float32, device="cpu")
    e_pool = EPool((E_LAYER,), NUM_PAGES * PAGE, Span(0, 8), runner)
    slots = torch.arange(NUM_PAGES * PAGE)
    e_pool.valid[slots[num_loaded * PAGE :]] = True
    pool: Any = SimpleNamespace(e_pool=e_pool, page_size=PAGE, store=lambda *_: None)
    config = CacheConfig(host_bytes=1 << 20, staging_bytes=1 << 16, serves=False)
    with Cache(FAMILY, config) as cache:
        pages, stored = pages_of(NUM_PAGES), []
        cache.tree.subscribe(stored.append)
        offloader = Offloader(cache, pool, None)
        offloader.put(Offload(model=MODEL, parent=None, pages=pages, slots=slots, ready=()))
        offloader.close()
    with_e = [page for it in stored if it.added and it.e_layers for page in it.pages]
    without = [page for it in stored if it.added and not it.e_layers for page in it.pages]
    assert (without, with_e) == (pages[:num_loaded], pages[num_loaded:])
