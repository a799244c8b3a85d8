"""Caches, one of which reads from a worker, and fetches that compare every byte."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import msgspec
from fault_proxy import FaultProxy
from tier_parts import fetch
from transport_parts import E_LAYER, FAMILY, FAST, PAGE_BYTES, eventually, pages_of

from cachetree import LOCAL, Cache, CacheConfig, Location, PageHash, Span
from cachetree.transport import PullStatus

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


def num_kept(worker: Cache, pages: Sequence[PageHash] = PAGES) -> int:
    """Return how many of the first pages the worker has in memory, with E."""
    return next(
        (it.e_pages.get(E_LAYER, 0) for it in worker.match(pages) if it.location == LOCAL), 0
    )


def moved_bytes(worker: Cache) -> int:
    return sum(it.num_landed_bytes for it in worker.status().peers)


def keep(engine: Cache, **settings: object) -> contextlib.AbstractContextManager[Cache]:
    """Make a worker that keeps copies of one engine."""
    return cache_of(keeps=(engine.address,), **settings)


def pulls(worker: Cache) -> PullStatus:
    (peer,) = worker.status().peers
    return peer.pulls


def settled(worker: Cache) -> bool:
    """Whether the worker has heard everything, and has nothing left to fetch."""
    return worker.wait_ready(0) and pulls(worker).num_waiting == 0


@contextlib.contextmanager
def cut_off(engine: Cache, **settings: object) -> Iterator[tuple[Cache, Callable[[], None]]]:
    """Make a worker that keeps copies of one engine, and a function that ends its session. The
    snapshot of the next session names all entries again."""
    with (
        FaultProxy(engine.address, seed=0) as proxy,
        cache_of(keeps=(proxy.address,), **settings) as worker,
    ):

        def cut() -> None:
            (before,) = worker.status().peers
            proxy.cut()
            eventually(lambda: worker.status().peers[0].num_losses > before.num_losses)
            eventually(lambda: settled(worker))

        yield worker, cut
