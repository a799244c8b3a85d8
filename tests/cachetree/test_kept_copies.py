"""A worker keeps copies of the entries that engines compute. The copies outlive the engines, and
other servers read them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from fault_proxy import FaultProxy
from kept_parts import PAGE_TOTAL, PAGES, cache_of, fetched, reader_of
from security_parts import Party, new_party
from serve_parts import serving
from transport_parts import (
    E_LAYER,
    FAMILY,
    FAST,
    MODEL,
    PAGE_BYTES,
    ScriptedWorker,
    eventually,
    new_keeper,
    new_tree,
    pages_of,
    store,
)

from cachetree import KV, LOCAL, Cache, CacheTree, Location, PageHash, WorkerConfig
from cachetree.disk import entry_file
from cachetree.metrics import health_of
from cachetree.transport import PullStatus, wire

OTHERS = pages_of(64, "other")


@contextlib.contextmanager
def fleet(num_engines: int = 1, **settings: object) -> Iterator[tuple[Cache, list[Cache]]]:
    """Make a worker that keeps copies, and its engines."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(cache_of()) for _ in range(num_engines)]
        addresses = tuple(engine.address for engine in engines)
        yield stack.enter_context(cache_of(keeps=addresses, **settings)), engines


def num_kept(worker: Cache, pages: Sequence[PageHash] = PAGES) -> int:
    """Return how many of the first pages the worker has in memory, with E."""
    return next(
        (it.e_pages.get(E_LAYER, 0) for it in worker.match(pages) if it.location == LOCAL), 0
    )


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


def test_copy_without_the_page_before_it_is_not_called_a_lack_of_room():
    page_s = 1.0
    rate_mb_s = FAMILY.num_layers * PAGE_BYTES / page_s / 1e6
    with cache_of() as engine, keep(engine, max_pull_mb_s=rate_mb_s) as worker:
        engine.tree.reserve(MODEL, None, PAGES[:1]).commit()
        eventually(lambda: worker.tree.num_pages == 1)
        engine.tree.reserve(MODEL, None, PAGES[:2]).commit()
        eventually(lambda: pulls(worker).num_waiting)
        worker.tree.evict()  # The copy of the second page waits for the rate limit.
        eventually(lambda: pulls(worker).num_failed)
        assert "the page before them has left memory" in pulls(worker).error


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
    slow = WorkerConfig(max_bytes_per_s=1e6, shared_memory=False)
    with cache_of(worker=slow) as engine, keep(engine) as worker:
        store(engine.tree, PAGES)
        eventually(lambda: moved_bytes(worker))
        assert worker.tree.num_bytes == 64 * (PAGE_TOTAL - PAGE_BYTES), "room for KV"
        engine.close()
        eventually(lambda: worker.tree.num_bytes == 0)
        eventually(lambda: health_of(worker.status()).degraded)
        (complaint,) = health_of(worker.status()).degraded
        assert complaint.startswith(f"worker {engine.address} is connecting: the peer is unreach")


Script = Callable[[ScriptedWorker, bytes, wire.Fetch], None]


class Engine(ScriptedWorker):
    """An engine that advertises entries which it does not have."""

    def __init__(
        self, num_entries: int, script: Script, model: str = MODEL, part: int = KV
    ) -> None:
        self._entries = [
            wire.Entry(added=True, model=model, parent=b"", pages=page, part=part)
            for page in pages_of(num_entries)
        ]
        super().__init__(script)

    def turn(self) -> None:
        for identity in self.channels if self._entries else ():
            for entry in self._entries:
                self.send(identity, wire.Entries(entries=(entry,)))
            self._entries = []


def refused(engine: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    engine.send(identity, wire.Ended(id=fetch.id, error="failed", reason="too busy"))


def test_entries_that_cannot_be_fetched_are_left_out_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr("cachetree.transport.pulls._PAUSE_S", 0.01)
    with Engine(2, refused) as engine, keep(engine) as worker:
        eventually(lambda: pulls(worker).num_failed == 2)
        eventually(lambda: settled(worker))
        assert "too busy" in worker.sources()[0].reason
        assert worker.tree.num_bytes == 0
    assert sum("not all of peer" in it for it in caplog.messages) == 1


def test_model_id_of_a_peer_forges_no_line_in_the_log(caplog):
    with (
        Engine(1, refused, "m\nWARNING forged\x1b[31m") as engine,
        keep(engine, host_bytes=0) as worker,
    ):
        eventually(lambda: pulls(worker).num_failed)
        assert "m WARNING forged" in worker.sources()[0].reason
    (line,) = (it for it in caplog.messages if "not all of peer" in it)
    assert line.isprintable() and worker.sources()[0].reason.isprintable()


def test_e_without_its_kv_counts_as_not_copied():
    with Engine(1, refused, part=E_LAYER) as engine, keep(engine) as worker:
        eventually(lambda: pulls(worker).num_failed)
        assert "KV of some of them is missing" in pulls(worker).error


def test_a_fetch_that_hangs_is_given_up_alone(monkeypatch):
    monkeypatch.setattr("cachetree.transport.pulls._FETCH_S", 0.05)
    with Engine(1, lambda *_: None) as engine, keep(engine) as worker:
        eventually(lambda: pulls(worker).num_failed)
        assert "in time" in pulls(worker).error
        assert worker.tree.num_bytes == 0


def test_a_peer_that_advertises_endlessly_costs_a_bounded_list(monkeypatch, caplog):
    monkeypatch.setattr("cachetree.transport.pulls._MAX_WAITING", 4)
    with Engine(50, lambda *_: None) as engine, keep(engine) as worker:
        eventually(lambda: pulls(worker).num_failed >= 45)
        assert pulls(worker).num_waiting == 1 + 4
        assert "wait to be copied" in worker.sources()[0].reason
    assert sum("not all of peer" in it for it in caplog.messages) == 1


def test_entries_given_up_are_remembered_up_to_a_number(monkeypatch):
    monkeypatch.setattr("cachetree.transport.pulls._MAX_GIVEN_UP", 2 * 3)
    tree = new_tree()
    keeper = new_keeper(tree)

    def given_up() -> list[bool]:
        return [keeper.has_given_up((MODEL, page, KV)) for page in PAGES[:5]]

    for page in PAGES[:5]:
        store(tree, [page])
        tree.evict()
    assert given_up() == [False, False, True, True, True]
    for page in PAGES[:5]:
        store(tree, [page])
    assert given_up() == 5 * [False]


def test_a_cap_holds_over_all_fetches_together():
    rate_mb_s = 64 * PAGE_TOTAL / 0.15 / 1e6
    with cache_of() as engine:
        for name in "abc":
            store(engine.tree, pages_of(64, name))
        begun_at_s = time.monotonic()
        with keep(engine, max_pull_mb_s=rate_mb_s) as worker:
            eventually(lambda: worker.tree.num_pages == 3 * 64)
        assert time.monotonic() - begun_at_s > 2 * 0.15 - 0.05


def test_a_long_entry_comes_in_several_fetches(monkeypatch):
    monkeypatch.setattr("cachetree.transport.pulls._PART_BYTES", 10 * PAGE_TOTAL)
    with cache_of() as engine, keep(engine) as worker:
        store(engine.tree, PAGES)
        eventually(lambda: num_kept(worker) == 64)
        assert pulls(worker).num_fetched == 6 + 6, "the nodes of the first six"


def test_a_slow_source_is_copied_in_parts_that_end_in_time(monkeypatch):
    """The whole entry would take twice as long as one fetch may take."""
    pages = pages_of(512, "long")
    kv_bytes = len(pages) * FAMILY.num_layers * PAGE_BYTES
    monkeypatch.setattr("cachetree.transport.pulls._FETCH_S", 1.0)
    monkeypatch.setattr("cachetree.transport.pulls._PLANNED_S", 0.2)
    monkeypatch.setattr("cachetree.transport.pulls._FIRST_PART_BYTES", kv_bytes // 10)
    slow = WorkerConfig(max_bytes_per_s=kv_bytes / 2, shared_memory=False)
    with cache_of(worker=slow) as engine:
        engine.tree.reserve(MODEL, None, pages).commit()
        with keep(engine) as worker:
            eventually(lambda: worker.tree.num_pages == 512 or pulls(worker).error)
            assert pulls(worker).error == ""
            assert pulls(worker).num_fetched <= 12


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
