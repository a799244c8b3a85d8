"""Entries that outlive their engine: pushed to a worker, kept there, read back by others."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from push_parts import PAGE_TOTAL, PAGES, at_worker, cache_of, fetched, new_store, num_pushed
from security_parts import Party, new_party
from transport_parts import (
    FAMILY,
    FAST,
    MODEL,
    ScriptedWorker,
    ask_status,
    eventually,
    new_tree,
    pages_of,
    store,
)

from cachetree import Cache, CacheConfig, ConfigError, Location, WorkerConfig
from cachetree.transport import wire
from cachetree.transport.advertise import ChangeQueue
from cachetree.transport.pending_stores import PendingStores, _parts
from cachetree.tree import Change

ACCEPTS = WorkerConfig(accepts=True)


def has(cache: Cache, location: Location, num_pages: int) -> Callable[[], bool]:
    return lambda: any(
        (match.location, match.num_pages) == (location, num_pages) for match in cache.match(PAGES)
    )


def test_what_comes_into_a_cache_goes_to_its_worker_in_order() -> None:
    with cache_of(worker=ACCEPTS) as worker:
        with at_worker(worker.address) as cache:
            store(cache.tree, PAGES[:20])
            store(cache.tree, PAGES)
            eventually(num_pushed(cache, stored=2, waiting=0))
            assert worker.tree.num_bytes == 64 * PAGE_TOTAL
            assert cache.status().stores[0].num_pushed_bytes == 64 * PAGE_TOTAL
            eventually(has(cache, worker.address, 64))
        with cache_of(peers=(worker.address,), serves=False) as other:
            assert other.wait_ready(20)
            fetched(other, worker.address, PAGES)


def test_pages_go_both_ways_over_one_session() -> None:
    others = pages_of(64, "other")
    with cache_of(worker=ACCEPTS) as worker:
        store(worker.tree, others)
        with at_worker(worker.address) as cache:
            assert cache.wait_ready(20)
            store(cache.tree, PAGES)
            for _ in range(5):
                fetched(cache, worker.address, others)
            eventually(num_pushed(cache, stored=1))
            fetched(cache, worker.address, PAGES)
            status = worker.status().worker
            assert (status.num_peers, status.num_protocol_errors) == (1, 0)


def test_several_caches_share_one_copy() -> None:
    with (
        cache_of(worker=ACCEPTS) as worker,
        at_worker(worker.address) as one,
        at_worker(worker.address) as two,
    ):
        store(one.tree, PAGES[:40])
        eventually(num_pushed(one, stored=1))
        store(two.tree, PAGES[:40])
        eventually(num_pushed(two, known=1, pushed_bytes=0))
        store(two.tree, PAGES)
        eventually(num_pushed(two, stored=1, pushed_bytes=24 * PAGE_TOTAL))
        assert worker.tree.num_bytes == 64 * PAGE_TOTAL


def test_a_worker_that_lost_the_beginning_is_given_it_again() -> None:
    with cache_of(worker=ACCEPTS) as worker, at_worker(worker.address) as cache:
        store(cache.tree, PAGES[:20])
        store(cache.tree, PAGES[:40])
        eventually(num_pushed(cache, stored=2))
        worker.tree.evict()
        store(cache.tree, PAGES)
        eventually(num_pushed(cache, stored=5, waiting=0))
        fetched(cache, worker.address, PAGES)


def test_what_left_memory_before_its_turn_is_skipped() -> None:
    with cache_of(worker=ACCEPTS) as worker:
        address = worker.address
    with at_worker(address) as cache:
        store(cache.tree, PAGES[:20])
        eventually(lambda: cache.status().stores[0].error)
        cache.tree.evict()
        with cache_of(worker=WorkerConfig(accepts=True, listen=address)):
            eventually(num_pushed(cache, gone=1, waiting=0, stored=0))


def test_everything_is_offered_again_to_a_worker_that_was_restarted() -> None:
    with cache_of(worker=ACCEPTS) as worker:
        address = worker.address
        with at_worker(address) as cache:
            store(cache.tree, PAGES[:20])
            eventually(num_pushed(cache, stored=1))
            worker.close()
            with cache_of(worker=WorkerConfig(accepts=True, listen=address)) as second:
                store(cache.tree, PAGES[:40])
                eventually(lambda: second.tree.num_pages == 40)
                assert cache.status().stores[0].num_restarts == 1


def test_too_many_changes_lead_to_a_new_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachetree.transport.pending_stores._MAX_WAITING", 4)
    with cache_of(worker=ACCEPTS) as worker:
        address = worker.address
    with at_worker(address) as cache:
        for num in range(2, 64, 2):
            store(cache.tree, PAGES[:num])
        with cache_of(worker=WorkerConfig(accepts=True, listen=address)) as worker:
            eventually(lambda: worker.tree.num_pages == 62)


def test_what_waits_is_told_also_where_it_is_more_than_the_queue_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cachetree.transport.pending_stores._MAX_WAITING", 4)
    tree = new_tree()
    stores = PendingStores(Location("tcp://127.0.0.1:1"), tree, lambda: None, time.monotonic)
    stores.begin()
    for num in range(1, 7):
        store(tree, pages_of(1, str(num)))
        assert stores.status.num_waiting == num
    assert stores.has_work


def test_a_worker_that_accepts_nothing_is_told_nothing() -> None:
    with cache_of() as worker, at_worker(worker.address) as cache:
        store(cache.tree, PAGES)
        eventually(num_pushed(cache, refused=1, pushed_bytes=0, waiting=0))
        assert "accepts" in cache.status().stores[0].error
        assert worker.tree.num_bytes == 0


def test_a_worker_without_room_refuses_and_stays_within_its_budget() -> None:
    with (
        cache_of(worker=ACCEPTS, host_bytes=10 * PAGE_TOTAL) as worker,
        at_worker(worker.address) as cache,
    ):
        store(cache.tree, PAGES[:20])
        eventually(num_pushed(cache, refused=1, pushed_bytes=0, waiting=0))
        assert worker.tree.num_bytes == 0


def test_only_those_with_an_allowed_key_can_store(tmp_path: Path) -> None:
    us, friend, stranger = (new_party(tmp_path, name) for name in ("us", "friend", "stranger"))
    settings = msgspec.convert({"accepts": True, **us.serving(friend)}, WorkerConfig)
    with cache_of(worker=settings) as worker:

        def pushing(party: Party) -> contextlib.AbstractContextManager[Cache]:
            peer = msgspec.structs.replace(FAST, key_file=party.key_file)
            keys = {worker.address: us.public_file}
            return at_worker(worker.address, peer=peer, peer_keys=keys)  # type: ignore[arg-type]

        with pushing(stranger) as cache:
            store(cache.tree, PAGES)
            eventually(lambda: "allowed_peers" in cache.status().stores[0].error)
            assert worker.tree.num_bytes == 0
        with pushing(friend) as cache:
            store(cache.tree, PAGES)
            eventually(num_pushed(cache, stored=1))
            fetched(cache, worker.address, PAGES)


def test_what_waits_at_the_end_is_still_pushed() -> None:
    with cache_of(worker=ACCEPTS) as worker:
        with at_worker(worker.address) as cache:
            for num in range(2, 65, 2):
                store(cache.tree, PAGES[:num])
        assert worker.tree.num_pages == 64


def test_closing_waits_for_a_silent_worker_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachetree.transport.peer._MAX_STORE_S", 0.2)
    with ScriptedWorker(lambda *_: None) as worker:
        with at_worker(worker.address) as cache:
            store(cache.tree, PAGES)
            eventually(lambda: any(isinstance(it, wire.Store) for it in worker.received))
            begun_at_s = time.monotonic()
        assert 0.2 <= time.monotonic() - begun_at_s < 2
        (status,) = cache.status().stores
        assert (status.num_waiting, status.num_stored) == (1, 0)


def test_a_store_that_is_not_answered_in_time_is_given_up_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its session goes on, and what is fetched in it."""
    monkeypatch.setattr("cachetree.transport.pending_stores._STORE_S", 0.1)
    with ScriptedWorker(lambda *_: None) as worker, at_worker(worker.address) as cache:
        store(cache.tree, PAGES[:2])
        eventually(num_pushed(cache, refused=1, waiting=0))
        (status,) = cache.status().stores
        assert "too long" in status.error
        eventually(lambda: wire.Cancel(id=1) in worker.received)
        (peer,) = cache.status().peers
        assert (peer.state, peer.num_losses) == ("ready", 0)


def test_an_entry_of_very_many_small_pages_is_named_in_several_messages() -> None:
    """One message would be too large, and would end the session each time it was tried."""
    pages = tuple(pages_of(70_000))
    change = Change(added=True, model=MODEL, parent=None, pages=pages, e_layers=())
    parts = list(_parts(change, page_bytes=64))
    assert sum((part.pages for part in parts), ()) == pages
    for part in parts:
        wire.encode(new_store(part.pages))


def test_a_queue_that_is_closed_takes_in_nothing_even_where_it_begins_again() -> None:
    tree = new_tree(PAGES[:2])
    queue = ChangeQueue(tree.subscribe, 4, lambda: None)
    queue.close()
    assert [len(change.pages) for change in queue.restart()] == [2]
    store(tree, PAGES[:4])
    assert len(queue) == 0


def test_stores_must_be_among_the_peers() -> None:
    with pytest.raises(ConfigError, match=r"stores has tcp://127\.0\.0\.1:2"):
        CacheConfig(peers=("tcp://127.0.0.1:1",), stores=("tcp://127.0.0.1:2",))


@contextlib.contextmanager
def served(folder: Path, listen: str = "tcp://127.0.0.1:0") -> Iterator[tuple[object, Location]]:
    """`cachetree serve` with a disk, as an operator starts it."""
    config = folder / "serve.yaml"
    cache = {
        "host_bytes": 64 << 20,
        "disk_path": str(folder / "disk"),
        "disk_bytes": 128 << 20,
        "worker": {"listen": listen},
    }
    config.write_text(json.dumps({"family": msgspec.to_builtins(FAMILY), "cache": cache}))
    command = [sys.executable, "-m", "cachetree.cli", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, Location(process.stdout.readline().split()[-1])
        finally:
            process.kill()


def test_entries_outlive_the_engine_that_made_them_and_the_worker_too(tmp_path: Path) -> None:
    with served(tmp_path) as (process, address):
        engine = [sys.executable, __file__, address]
        with subprocess.Popen(engine, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout.readline() == "pushed\n"
            first.kill()
        with cache_of(peers=(address,), serves=False) as second:
            assert second.wait_ready(20)
            fetched(second, address, PAGES)
        process.send_signal(signal.SIGTERM)  # type: ignore[attr-defined]
        assert process.wait(60) == 0  # type: ignore[attr-defined]
    with served(tmp_path) as (_, address), cache_of(peers=(address,), serves=False) as third:
        assert third.wait_ready(20)
        eventually(has(third, address, 64))
        fetched(third, address, PAGES)
        assert ask_status(address, timeout_s=5).num_received_bytes == 0


def _engine(address: Location) -> None:
    with at_worker(address) as cache:
        store(cache.tree, PAGES)
        eventually(num_pushed(cache, stored=1))
        print("pushed", flush=True)
        signal.pause()


if __name__ == "__main__":
    _engine(Location(sys.argv[1]))
