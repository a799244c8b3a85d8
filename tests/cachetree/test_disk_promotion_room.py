"""Lines that a worker reads from disk for peers. Its memory has no room for all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from kept_parts import PAGE_TOTAL, cache_of, fetched, reader_of, settle
from tier_parts import num_at
from transport_parts import MODEL, PARTS, pages_of, store

from cachetree import LOCAL, Cache, Deadline, Location, PageHash, StaleEntry

FIRST, SECOND = pages_of(60, "first "), pages_of(60, "second ")
HOT, PINNED = pages_of(20, "hot "), pages_of(40, "pinned ")


@contextlib.contextmanager
def worker_of(folder: Path) -> Iterator[tuple[Cache, Location]]:
    """Make a worker with memory for 90 pages, and two lines of 60 pages on disk, each in several
    files."""
    disk = {"disk_path": str(folder), "disk_bytes": 16 << 20, "host_bytes": 90 * PAGE_TOTAL}
    with cache_of(**disk) as worker:
        for num_pages, pages in ((60, FIRST), (120, SECOND)):
            for stop in range(10, 61, 10):
                store(worker.tree, pages[:stop])
            settle(worker, num_pages)
        worker.tree.evict()
        assert worker.address
        yield worker, worker.address


num_local = partial(num_at, location=LOCAL)


def test_two_lines_that_fit_one_at_a_time_are_both_read(tmp_path):
    failures: list[Exception] = []

    def fetch_often(cache: Cache, address: Location, pages: Sequence[PageHash]) -> None:
        for _ in range(10):
            try:
                fetched(cache, address, pages)
            except Exception as exc:  # noqa: BLE001
                failures.append(exc)

    with (
        worker_of(tmp_path) as (_, address),
        reader_of(address) as one,
        reader_of(address) as other,
    ):
        threads = [
            threading.Thread(target=fetch_often, args=(cache, address, pages))
            for cache, pages in ((one, FIRST), (other, SECOND))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures


def test_line_that_cannot_fit_beside_a_pin_evicts_nothing(tmp_path):
    with worker_of(tmp_path) as (worker, address), reader_of(address) as cache:
        store(worker.tree, PINNED)
        worker.tree.pin(MODEL, PINNED)
        store(worker.tree, HOT)
        settle(worker, 180)
        with pytest.raises(StaleEntry):
            fetched(cache, address, FIRST)
        assert num_local(worker, HOT) == 20
        assert num_local(worker, FIRST) == 0
        worker.tree.unpin(MODEL, PINNED)
        fetched(cache, address, FIRST)


def test_line_that_cannot_fit_beside_readers_evicts_nothing(tmp_path, monkeypatch):
    """The line's first pages are in memory, and have to stay there."""
    monkeypatch.setattr("cachetree.disk.asker._MAX_ROOM_S", 0.1)
    with worker_of(tmp_path) as (worker, address), reader_of(address) as cache:
        store(worker.tree, FIRST[:5])
        store(worker.tree, PINNED)
        store(worker.tree, HOT)
        settle(worker, 180)
        lease = worker.tree.lease(MODEL, PINNED[:32], "a test", Deadline.after(60))
        assert lease is not None
        with lease, pytest.raises(StaleEntry):
            fetched(cache, address, FIRST)
        assert (num_local(worker, HOT), num_local(worker, FIRST)) == (20, 5)
        fetched(cache, address, FIRST)


def test_pages_that_a_peer_no_longer_wants_are_not_read(tmp_path):
    with worker_of(tmp_path) as (worker, _):
        done = threading.Event()
        worker._disk.promote(
            MODEL, FIRST[-1], PARTS, Deadline.after(60), lambda: False, lambda _: done.set()
        )
        assert done.wait(20)
        assert num_local(worker, FIRST) == 0


def test_pages_read_for_a_peer_stay_until_its_fetch_begins(tmp_path):
    with worker_of(tmp_path) as (worker, address):
        assert address
        let_go: list[object] = []
        done = threading.Event()

        def read(release: object) -> None:
            let_go.append(release)
            done.set()

        worker._disk.promote(MODEL, FIRST[-1], PARTS, Deadline.after(60), lambda: True, read)
        assert done.wait(20)
        worker.tree.evict()
        assert num_local(worker, FIRST) == 60
        (release,) = let_go
        release()
        worker.tree.evict()
        assert num_local(worker, FIRST) == 0
