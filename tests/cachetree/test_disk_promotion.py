"""Pages that are only on disk: advertised, fetched by peers, and in memory again afterwards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from disk_parts import data_files
from kept_parts import PAGE_TOTAL, cache_of, fetched, reader_of, settle
from tier_parts import plan_of
from transport_parts import (
    E_LAYER,
    MODEL,
    PAGE_BYTES,
    RawPeer,
    content,
    eventually,
    pages_of,
    store,
)

from cachetree import DISK, Cache, Deadline, FetchError, Location, ModelId, PageHash, StaleEntry
from cachetree.disk import DiskTier
from cachetree.ids import LOCAL, Span
from cachetree.memory import scatter
from cachetree.transport import wire
from cachetree.tree import Lease, join_hashes

PAGES = pages_of(64)
ROOM = 64 * PAGE_TOTAL


@contextlib.contextmanager
def on_disk_only(folder: Path, **config: object) -> Iterator[tuple[Cache, Location]]:
    """Make a worker that has entries on disk, and none in memory."""
    disk = {"disk_path": str(folder), "disk_bytes": 64 << 20, "host_bytes": ROOM}
    with cache_of(**{**disk, **config}) as worker:
        store(worker.tree, PAGES[:20])
        store(worker.tree, PAGES)
        settle(worker, 64)
        worker.tree.evict()
        assert worker.tree.num_pages == 0
        assert worker.address
        yield worker, worker.address


def seen(cache: Cache, location: Location) -> list[tuple[int, dict[int, int]]]:
    matches = [match for match in cache.match(PAGES) if match.location == location]
    return [(match.num_pages, dict(match.e_pages)) for match in matches]


def test_pages_only_on_disk_are_advertised_and_fetched(tmp_path):
    with on_disk_only(tmp_path) as (worker, address), reader_of(address) as cache:
        assert seen(cache, address) == [(64, {E_LAYER: 64})]
        fetched(cache, address, PAGES)
        assert worker.tree.num_pages == 64, "not promoted"
        status = worker.status().worker
        assert (status.hits, status.misses) == ({"disk": 1}, {"memory": 1})
        fetched(cache, address, PAGES)
        status = worker.status().worker
        assert status.hits == {"disk": 1, "memory": 1}


def test_a_part_that_is_only_on_disk_joins_the_part_in_memory(tmp_path):
    with on_disk_only(tmp_path) as (worker, address), reader_of(address) as cache:
        store(worker.tree, PAGES[:10])
        fetched(cache, address, PAGES)
        assert worker.tree.num_pages == 64


def test_an_advert_ends_only_with_the_last_copy(tmp_path):
    disk = {"disk_path": str(tmp_path), "disk_bytes": 64 << 20}
    with cache_of(**disk) as worker, reader_of(worker.address) as cache:
        store(worker.tree, PAGES)
        settle(worker, 64)
        eventually(lambda: seen(cache, worker.address))  # type: ignore[arg-type]
        worker.tree.evict()
        store(worker.tree, pages_of(1, "a marker"))
        settle(worker, 65)
        eventually(lambda: cache.match(pages_of(1, "a marker")))
        # E is told of after its KV.
        eventually(lambda: seen(cache, worker.address) == [(64, {E_LAYER: 64})])  # type: ignore[arg-type]

        worker.tree.evict()  # Else the marker could be written once more.
        worker._disk._store.evict(None, ())  # type: ignore[union-attr]
        eventually(lambda: not seen(cache, worker.address))  # type: ignore[arg-type]

        store(worker.tree, PAGES)
        settle(worker, 64)
        worker._disk._store.evict(None, ())  # type: ignore[union-attr]
        eventually(lambda: not worker.status().disk.num_pages)  # type: ignore[union-attr]
        eventually(lambda: seen(cache, worker.address) == [(64, {E_LAYER: 64})])  # type: ignore[arg-type]
        worker.tree.evict()
        eventually(lambda: not seen(cache, worker.address))  # type: ignore[arg-type]


def test_fetch_without_room_in_memory_is_stale(tmp_path, monkeypatch):
    monkeypatch.setattr("cachetree.disk.asker._MAX_ROOM_S", 0.1)
    with on_disk_only(tmp_path) as (worker, address), reader_of(address) as cache:
        other = pages_of(64, "held")
        store(worker.tree, other)
        settle(worker, 128)
        lease = worker.tree.lease(MODEL, other, "test", Deadline.after(30))
        assert lease is not None
        with lease, pytest.raises(StaleEntry):
            fetched(cache, address, PAGES)
        fetched(cache, address, PAGES)


def test_a_damaged_disk_makes_a_fetch_stale_and_its_advert_goes(tmp_path):
    with on_disk_only(tmp_path) as (_, address), reader_of(address) as cache:
        for file in data_files(tmp_path):
            blob = bytearray(file.read_bytes())
            blob[len(blob) // 4] ^= 1
            file.write_bytes(blob)
        with pytest.raises(FetchError):
            fetched(cache, address, PAGES)
        eventually(lambda: seen(cache, address) != [(64, {E_LAYER: 64})])


def slow(worker: Cache, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let reads from the worker's disk wait until this event is set."""
    goes_on = threading.Event()
    store_ = worker._disk._store  # type: ignore[union-attr]
    read = store_.read

    def wait_and_read(*args: object) -> None:
        assert goes_on.wait(10)
        read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store_, "read", wait_and_read)
    return goes_on


A_FETCH = wire.Fetch(
    id=1,
    model=MODEL,
    pages=join_hashes(PAGES),
    steps=(("kv", 0),),
    frame_bytes=64 << 10,
    timeout_ms=10_000,
)


def test_the_worker_answers_while_its_disk_is_slow(tmp_path, monkeypatch):
    with on_disk_only(tmp_path) as (worker, _):
        goes_on = slow(worker, monkeypatch)
        spans: list[str] = []
        worker._worker._service = replace(
            worker._worker._service, note_served=lambda *span: spans.append(span[-1])
        )
        with RawPeer(worker._worker.address) as peer:
            peer.send(A_FETCH)
            assert peer.ask(wire.Ping()) == wire.Pong()
            assert peer.ask(wire.Cancel(id=1)) == wire.Ended(id=1, error="cancelled")
            with RawPeer(worker._worker.address) as gone:
                gone.send(A_FETCH)
                assert gone.ask(wire.Ping()) == wire.Pong()
            status = worker._worker.status
            eventually(lambda: status().fetches_by_outcome == {"cancelled": 1, "lost": 1})
            goes_on.set()
            eventually(lambda: worker.tree.num_pages)
            assert peer.ask(wire.Ping()) == wire.Pong()
            assert not peer.frames, "a cancelled fetch went on"
            assert status().fetches_by_outcome == {"cancelled": 1, "lost": 1}
        why = "it was {} while its pages were read from disk"
        assert spans == [why.format("cancelled"), why.format("lost")]


def test_failure_after_a_read_ends_only_its_session(tmp_path):
    with on_disk_only(tmp_path) as (worker, address), reader_of(address) as cache:
        lease = worker.tree.lease

        def fail(model: ModelId, pages: Sequence[PageHash], owner: str, *args: object) -> Lease:
            if owner.startswith("peer "):
                raise RuntimeError("broken here")
            return lease(model, pages, owner, *args)  # type: ignore[arg-type, return-value]

        worker.tree.lease = fail  # type: ignore[method-assign, assignment]
        with RawPeer(address) as peer:
            bye = peer.ask(A_FETCH)
            assert isinstance(bye, wire.Bye)
            assert "the worker failed" in bye.reason
        (status,) = cache.status().peers
        assert (status.state, status.num_losses) == ("ready", 0)


def test_a_local_fetch_from_disk_is_promoted_where_there_is_room(tmp_path):
    with on_disk_only(tmp_path) as (worker, _):
        fetched(worker, DISK, PAGES)
        eventually(lambda: worker.tree.num_pages == 64)
        worker.tree.evict()
        other = pages_of(1, "other")
        store(worker.tree, other)
        settle(worker, 65)
        fetched(worker, DISK, PAGES)
        fetched(worker, DISK, PAGES)
        assert worker.match(other)[0].location == "local", "others were evicted for it"


def test_kv_in_memory_hides_from_nobody_the_e_on_disk(tmp_path):
    """A server stores KV of its own model that it has read from a peer, without E."""
    with on_disk_only(tmp_path) as (worker, address), reader_of(address) as cache:
        num_written = worker._disk.status().counts.num_written_entries
        with worker.tree.reserve(MODEL, None, PAGES) as reservation:
            for step in reservation.steps:
                kv = b"".join(content(page, step) for page in PAGES)
                scatter(reservation.views(step), memoryview(kv))
            reservation.commit()
        assert {it.location: dict(it.e_pages) for it in worker.match(PAGES)} == {
            LOCAL: {},
            DISK: {E_LAYER: 64},
        }
        before = worker._disk.status().counts.num_read_bytes
        assert seen(cache, address) == [(64, {E_LAYER: 64})]
        fetched(cache, address, PAGES)
        assert worker._disk.status().counts.num_read_bytes - before == 64 * PAGE_BYTES, "only E"
        assert worker.match(PAGES)[0].e_pages == {E_LAYER: 64}
        settle(worker, 64)
        assert worker._disk.status().counts.num_written_entries == num_written


def test_a_fetch_for_which_no_promotion_is_left_is_stale_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("cachetree.disk.tier._MAX_PROMOTIONS", 0)
    with on_disk_only(tmp_path) as (worker, address), RawPeer(address) as peer:
        ended = peer.ask(A_FETCH)
        assert isinstance(ended, wire.Ended)
        assert ended.error == "stale"
        assert worker.status().worker.fetches_by_outcome == {"stale": 1}


@pytest.mark.parametrize("gives_up", [False, True])
def test_greedy_peer_leaves_promotions_for_others(tmp_path, monkeypatch, gives_up):
    with on_disk_only(tmp_path) as (worker, address):
        goes_on = slow(worker, monkeypatch)
        with RawPeer(address) as greedy, RawPeer(address) as modest:
            for id in range(1, 201):
                greedy.send(msgspec.structs.replace(A_FETCH, id=id))
                if gives_up:
                    greedy.send(wire.Cancel(id=id))
            greedy.send(wire.Ping())
            assert list(iter(greedy.receive, wire.Pong())), "beyond its share"
            modest.send(A_FETCH)
            assert modest.ask(wire.Ping()) == wire.Pong()
            goes_on.set()
            assert modest.fetched(64 * PAGE_BYTES)


def test_waiting_fetches_come_before_promotion_into_memory(tmp_path, monkeypatch):
    calls: list[str] = []

    def noted(disk: DiskTier, name: str) -> None:
        real = getattr(disk, name)

        def call(*args: object) -> None:
            calls.append(name)
            real(*args)

        monkeypatch.setattr(disk, name, call)

    with on_disk_only(tmp_path) as (worker, _):
        for name in ("_fetch", "_promote"):
            noted(worker._disk, name)
        goes_on = slow(worker, monkeypatch)
        plan = plan_of(DISK, Span(0, len(PAGES)))
        stagings = [worker.fetch(plan, PAGES, Deadline.after(10)) for _ in range(4)]
        goes_on.set()
        eventually(lambda: len(calls) == 8)
        # One of the two threads may not have said yet what it does.
        assert calls.index("_promote") >= 3
        assert all(it is not None and it.is_complete for it in stagings)
