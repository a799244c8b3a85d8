"""Caches that push to a worker, and a peer that may break the protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import msgspec
from tier_parts import fetch
from transport_parts import (
    E_LAYER,
    FAMILY,
    FAST,
    MODEL,
    PAGE_BYTES,
    pages_of,
)

from cachetree import (
    Cache,
    CacheConfig,
    Location,
    PageHash,
    Span,
)
from cachetree.transport import wire
from cachetree.tree import join_hashes

PAGES = pages_of(64)
PAGE_TOTAL = (FAMILY.num_layers + 1) * PAGE_BYTES


@contextlib.contextmanager
def cache_of(**config: object) -> Iterator[Cache]:
    settings = {"host_bytes": 64 << 20, "peer": FAST, **config}
    with Cache(FAMILY, msgspec.convert(settings, CacheConfig)) as cache:
        yield cache


def at_worker(address: Location, **config: object) -> contextlib.AbstractContextManager[Cache]:
    """A cache that pushes to a worker and reads from it."""
    return cache_of(peers=(address,), stores=(address,), serves=False, **config)


def fetched(cache: Cache, location: Location, pages: Sequence[PageHash]) -> None:
    """Fetch all of them from there and compare every byte."""
    fetch(cache, location, pages, Span(0, len(pages)))


def num_pushed(cache: Cache, **counts: int) -> Callable[[], bool]:
    def are() -> bool:
        (status,) = cache.status().stores
        return all(getattr(status, f"num_{name}") == num for name, num in counts.items())

    return are


def new_store(pages: Sequence[PageHash] = PAGES[:2], **other: object) -> wire.Store:
    fields = {
        "id": 1,
        "model": MODEL,
        "parent": b"",
        "pages": join_hashes(pages),
        "e_layers": (E_LAYER,),
        "timeout_ms": 5000,
        **other,
    }
    return wire.Store(**fields)  # type: ignore[arg-type]


@contextlib.contextmanager
def reader_of(address: Location) -> Iterator[Cache]:
    """A cache that stores nothing and is connected to one worker."""
    with cache_of(peers=(address,), serves=False) as cache:
        assert cache.wait_ready(20)
        yield cache
