"""A worker keeps copies of the entries that engines compute. The copies outlive the engines, and
other servers read them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
from kept_parts import (
    PAGE_TOTAL,
    PAGES,
    cache_of,
    cut_off,
    fetched,
    keep,
    moved_bytes,
    num_kept,
    pulls,
    reader_of,
)
from security_parts import Party, new_party
from serve_parts import serving
from transport_parts import (
    E_LAYER,
    FAST,
    MODEL,
    PAGE_BYTES,
    eventually,
    pages_of,
    store,
)

from cachetree import LOCAL, Cache, CacheTree, Location, WorkerConfig
from cachetree.disk import entry_file
from cachetree.metrics import health_of

OTHERS = pages_of(64, "other")


@contextlib.contextmanager
def fleet(num_engines: int = 1, **settings: object) -> Iterator[tuple[Cache, list[Cache]]]:
    """Make a worker that keeps copies, and its engines."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(cache_of()) for _ in range(num_engines)]
        addresses = tuple(engine.address for engine in engines)
        yield stack.enter_context(cache_of(keeps=addresses, **settings)), engines


def test_a_second_engine_reads_what_the_first_computed_before_it_ended():
    with fleet() as (worker, (engine,)):
        store(engine.tree, PAGES)
        eventually(lambda: num_kept(worker) == 64)
        engine.close()
        with reader_of(worker.address) as second:
            fetched(second, worker.address, PAGES)


def test_a_prompt_that_grows_is_copied_from_where_it_ended():
    with fleet() as (worker, (engine,)):
        for num in (20, 40, 64):
            store(engine.tree, PAGES[:num])
            eventually(lambda num=num: num_kept(worker) == num)
        assert moved_bytes(worker) == 64 * PAGE_TOTAL
        with reader_of(worker.address) as second:
            fetched(second, worker.address, PAGES)


def test_pages_of_two_engines_are_copied_once():
    with fleet(2) as (worker, engines):
        for engine in engines:
            store(engine.tree, PAGES)
            store(engine.tree, OTHERS)
        eventually(lambda: num_kept(worker) == num_kept(worker, OTHERS) == 64)
        assert worker.tree.num_bytes == 128 * PAGE_TOTAL
        assert moved_bytes(worker) == 128 * PAGE_TOTAL


def test_each_entry_of_a_long_prompt_is_reserved_once(monkeypatch):
    reserve, reserved = CacheTree.reserve, []

    def count(*args: object) -> object:
        reserved.append(args)
        return reserve(*args)

    with cache_of() as engine:
        for num in range(1, 33):
            store(engine.tree, PAGES[:num])
        monkeypatch.setattr(CacheTree, "reserve", count)
        with keep(engine) as worker:
            eventually(lambda: num_kept(worker) == 32)
        assert len(reserved) == 2 * 32, "KV and E"


def test_a_worker_that_lost_the_beginning_gets_it_again_with_what_follows():
    with fleet() as (worker, (engine,)):
        store(engine.tree, PAGES[:40])
        eventually(lambda: num_kept(worker) == 40)
        worker.tree.evict()
        store(engine.tree, PAGES)
        eventually(lambda: num_kept(worker) == 64)


def test_pages_that_gain_e_gain_it_in_the_copy():
    with fleet() as (worker, (engine,)):
        reservation = engine.tree.reserve(MODEL, None, PAGES)
        reservation.commit()
        eventually(lambda: worker.tree.num_pages == 64)
        assert num_kept(worker) == 0
        before = moved_bytes(worker)
        store(engine.tree, PAGES)
        eventually(lambda: num_kept(worker) == 64)
        assert moved_bytes(worker) - before == 64 * PAGE_BYTES, "KV was copied again"


def test_a_full_worker_gives_up_what_was_used_least_recently():
    with fleet(host_bytes=100 * PAGE_TOTAL) as (worker, (engine,)):
        store(engine.tree, PAGES)
        eventually(lambda: num_kept(worker) == 64)
        store(engine.tree, OTHERS)
        eventually(lambda: num_kept(worker, OTHERS) == 64)
        assert worker.tree.num_bytes <= 100 * PAGE_TOTAL


def test_a_worker_without_room_keeps_nothing():
    with fleet(host_bytes=10 * PAGE_TOTAL) as (worker, (engine,)):
        store(engine.tree, PAGES[:20])
        eventually(lambda: "no room here for 20 pages" in worker.sources()[0].reason)
        store(engine.tree, OTHERS[:5])
        eventually(lambda: num_kept(worker, OTHERS) == 5)
        assert num_kept(worker) == 0
        eventually(lambda: worker.sources()[0].reason == "")


def test_copy_without_the_page_before_it_is_not_called_a_lack_of_room(monkeypatch):
    with cache_of() as engine, keep(engine) as worker:
        reserve = worker.tree.reserve

        def evict_and_reserve(*args: object) -> object:
            worker.tree.evict()
            return reserve(*args)

        engine.tree.reserve(MODEL, None, PAGES[:1]).commit()
        eventually(lambda: worker.tree.num_pages == 1)
        monkeypatch.setattr(worker.tree, "reserve", evict_and_reserve)
        engine.tree.reserve(MODEL, None, PAGES[:2]).commit()
        eventually(lambda: pulls(worker).num_failed)
        assert "the page before them has left memory" in pulls(worker).error


def test_a_worker_that_comes_later_gets_what_is_there():
    with cache_of() as engine:
        store(engine.tree, PAGES[:20])
        store(engine.tree, PAGES)
        store(engine.tree, OTHERS)
        with keep(engine) as worker:
            eventually(lambda: num_kept(worker) == num_kept(worker, OTHERS) == 64)
        with keep(engine) as second:
            eventually(lambda: num_kept(second) == num_kept(second, OTHERS) == 64)


def test_a_peer_that_is_only_read_is_not_copied():
    with cache_of() as engine:
        store(engine.tree, PAGES)
        with reader_of(engine.address) as reader:
            fetched(reader, engine.address, PAGES)
            assert (reader.tree.num_pages, reader.status().peers[0].pulls) == (0, None)


def test_pages_of_several_engines_are_copied_once_also_during_the_first_copy():
    slow = WorkerConfig(max_bytes_per_s=64 * PAGE_TOTAL / 0.2, shared_memory=False)
    with cache_of(worker=slow) as one, cache_of(worker=slow) as two:
        for engine in (one, two):
            store(engine.tree, PAGES)
        with cache_of(keeps=(one.address, two.address)) as worker:
            eventually(lambda: num_kept(worker) == 64)
            eventually(lambda: all(it.pulls.num_waiting == 0 for it in worker.status().peers))
            assert moved_bytes(worker) == 64 * PAGE_TOTAL


def test_pages_that_left_the_engines_memory_are_no_fault():
    with cache_of() as engine, keep(engine, max_pull_mb_s=0.001) as worker:
        store(engine.tree, pages_of(1, "first"))
        eventually(lambda: pulls(worker).num_fetched == 1)
        store(engine.tree, PAGES)
        eventually(lambda: worker.match(PAGES))
        engine.tree.evict()
        eventually(lambda: not worker.match(PAGES))
        assert pulls(worker).error == ""


def test_pages_only_on_the_engines_disk_are_not_copied(tmp_path):
    disk = {"disk_path": str(tmp_path), "disk_bytes": 64 << 20}
    with cache_of(**disk) as engine:
        store(engine.tree, PAGES)
        eventually(lambda: engine.status().disk.num_entries == 2)
        eventually(lambda: engine.tree.held_bytes == 0)
        engine.tree.evict()
        with keep(engine) as worker:
            eventually(lambda: pulls(worker).num_gone == 2)
            assert engine.tree.num_pages == worker.tree.num_pages == 0
            assert pulls(worker).error == ""


def test_a_copy_is_no_use_of_the_engines_pages():
    with cache_of(host_bytes=130 * PAGE_TOTAL) as engine:
        store(engine.tree, PAGES)
        store(engine.tree, OTHERS)
        with keep(engine) as worker:
            eventually(lambda: num_kept(worker) == num_kept(worker, OTHERS) == 64)
        store(engine.tree, pages_of(10, "new"))
        assert (num_kept(engine), num_kept(engine, OTHERS)) == (0, 64)


def test_pages_that_a_full_worker_evicted_return_only_after_another_use():
    budget = {"host_bytes": 100 * PAGE_TOTAL}
    with cache_of() as engine, cut_off(engine, **budget) as (worker, cut):
        store(engine.tree, PAGES)
        eventually(lambda: num_kept(worker) == 64)
        store(engine.tree, OTHERS)
        eventually(lambda: num_kept(worker, OTHERS) == 64)
        for _ in range(2):
            cut()
        assert moved_bytes(worker) == 128 * PAGE_TOTAL
        assert num_kept(worker, OTHERS) == 64
        engine.tree.evict()
        # An entry that goes and comes back between two adverts is not advertised again.
        eventually(lambda: all(it.location == LOCAL for it in worker.match(PAGES)))
        store(engine.tree, PAGES)
        eventually(lambda: num_kept(worker) == 64)


def test_pages_only_on_the_workers_disk_are_not_fetched_again(tmp_path):
    disk = {"disk_path": str(tmp_path), "disk_bytes": 64 << 20}
    with cache_of() as engine, cut_off(engine, **disk) as (worker, cut):
        store(engine.tree, PAGES)
        eventually(lambda: worker.status().disk.num_bytes >= 64 * PAGE_TOTAL)
        eventually(lambda: worker.tree.held_bytes == 0)
        worker.tree.evict()
        cut()
        assert moved_bytes(worker) == 64 * PAGE_TOTAL
        store(engine.tree, [*PAGES, *OTHERS[:6]])
        eventually(lambda: num_kept(worker, [*PAGES, *OTHERS[:6]]) == 70)


def test_a_worker_with_little_memory_copies_as_fast_as_its_disk_writes(tmp_path, monkeypatch):
    write_record = entry_file.write_record

    def write(*args: object) -> None:
        time.sleep(0.005)
        write_record(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(entry_file, "write_record", write)
    budgets = {"host_bytes": 10 * PAGE_TOTAL, "disk_path": str(tmp_path), "disk_bytes": 64 << 20}
    with cache_of() as engine:
        for page in PAGES:
            store(engine.tree, [page])
        with keep(engine, **budgets) as worker:
            eventually(lambda: worker.status().disk.num_entries == 2 * len(PAGES))
            assert worker.status().disk.num_late_entries == 0


def test_pages_evicted_before_they_are_written_are_copied_again(tmp_path):
    disk = {"disk_path": str(tmp_path), "disk_bytes": 64 << 20}
    with cache_of() as engine, cut_off(engine, **disk) as (worker, cut):
        with worker._disk._store._writing:
            store(engine.tree, PAGES)
            eventually(lambda: num_kept(worker) == 64)
            worker.tree.evict()
        cut()
        eventually(lambda: num_kept(worker) == 64)


def test_an_engine_that_comes_back_with_other_content_is_copied_anew():
    with cache_of() as engine:
        store(engine.tree, PAGES)
        with keep(engine) as worker:
            eventually(lambda: num_kept(worker) == 64)
            engine.close()
            with cache_of(worker=WorkerConfig(listen=engine.address)) as second:
                store(second.tree, OTHERS)
                eventually(lambda: num_kept(worker, OTHERS) == 64)
            assert num_kept(worker) == 64


def test_an_engine_that_dies_while_it_is_copied_leaves_nothing_and_is_named():
    slow = WorkerConfig(max_bytes_per_s=2e5, shared_memory=False)
    with cache_of(worker=slow) as engine, keep(engine) as worker:
        store(engine.tree, PAGES)
        eventually(lambda: moved_bytes(worker))
        assert worker.tree.num_bytes == 64 * (PAGE_TOTAL - PAGE_BYTES), "room for KV"
        engine.close()
        eventually(lambda: worker.tree.num_bytes == 0)
        eventually(lambda: health_of(worker.status()).degraded)
        (complaint,) = health_of(worker.status()).degraded
        assert complaint.startswith(f"worker {engine.address} is connecting: the peer is unreach")


def test_only_an_engine_that_lets_the_worker_read_is_copied(tmp_path):
    us, friend, stranger = (new_party(tmp_path, name) for name in ("us", "friend", "stranger"))
    with cache_of(worker=WorkerConfig(**us.serving(friend))) as engine:
        store(engine.tree, PAGES)

        def keeping(party: Party) -> contextlib.AbstractContextManager[Cache]:
            peer = msgspec.structs.replace(FAST, key_file=party.key_file)
            return keep(engine, peer=peer, peer_keys={engine.address: us.public_file})

        with keeping(stranger) as worker:
            eventually(lambda: "allowed_peers" in worker.sources()[0].reason)
            assert worker.tree.num_bytes == 0
        with keeping(friend) as worker:
            eventually(lambda: num_kept(worker) == 64)


def test_engines_that_a_name_stands_for_are_copied():
    with cache_of() as engine:
        store(engine.tree, PAGES)
        with cache_of(keeps=(engine.address.replace("tcp:", "dns:"),)) as worker:
            eventually(lambda: num_kept(worker) == 64)


def test_entries_outlive_the_engine_that_made_them_and_the_worker_too(tmp_path):
    engine = [sys.executable, __file__]
    with subprocess.Popen(engine, stdout=subprocess.PIPE, text=True) as first:
        cache = {
            "host_bytes": 64 << 20,
            "disk_path": str(tmp_path / "disk"),
            "disk_bytes": 128 << 20,
            "keeps": [first.stdout.readline().strip()],
        }
        with serving(tmp_path, cache=cache) as process:
            address = Location(process.stdout.readline().split()[-1])
            with reader_of(address) as second:
                eventually(lambda: [it.e_pages.get(E_LAYER) for it in second.match(PAGES)] == [64])
                first.kill()
                fetched(second, address, PAGES)
    with serving(tmp_path, cache=cache) as process, contextlib.suppress(BrokenPipeError):
        address = Location(process.stdout.readline().split()[-1])
        with reader_of(address) as third:
            fetched(third, address, PAGES)


def _engine() -> None:
    with cache_of() as cache:
        store(cache.tree, PAGES)
        print(cache.address, flush=True)
        signal.pause()


if __name__ == "__main__":
    _engine()
