"""Caches, one of which reads from a worker, and fetches that compare every byte."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec
from tier_parts import fetch
from transport_parts import FAMILY, FAST, PAGE_BYTES, eventually, pages_of

from cachetree import Cache, CacheConfig, Location, PageHash, Span

PAGES = pages_of(64)
PAGE_TOTAL = (FAMILY.num_layers + 1) * PAGE_BYTES


@contextlib.contextmanager
def cache_of(**config: object) -> Iterator[Cache]:
    settings = {"host_bytes": 64 << 20, "peer": FAST, **config}
    with Cache(FAMILY, msgspec.convert(settings, CacheConfig)) as cache:
        yield cache


def fetched(cache: Cache, location: Location, pages: Sequence[PageHash]) -> None:
    """Fetch all of these pages from the location, and compare every byte."""
    fetch(cache, location, pages, Span(0, len(pages)))


@contextlib.contextmanager
def reader_of(address: Location) -> Iterator[Cache]:
    """Make a cache that stores nothing and is connected to one worker."""
    with cache_of(peers=(address,), serves=False) as cache:
        assert cache.wait_ready(20)
        yield cache


def settle(worker: Cache, num_pages: int) -> None:
    """Wait until this many pages are on disk with their E, and nothing but pins keeps pages.

    The disk writes a page's KV first, and its E later. If memory evicted the E before that, it
    would never be written.
    """
    eventually(lambda: worker.status().disk.num_bytes >= num_pages * PAGE_TOTAL)  # type: ignore[union-attr]
    eventually(lambda: worker.status().disk.num_pages == num_pages)  # type: ignore[union-attr]
    eventually(lambda: worker.tree.held_bytes == worker.tree.num_pinned_bytes)
