"""A cache with a directory: what leaves memory, or the process, is still matched and fetched."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import tier_parts
from disk_parts import data_files, place_of
from tier_parts import PROMPT_BYTES, fetch_too_late, num_at, num_e_at, prompt, store_and_wait
from transport_parts import (
    E_LAYER,
    FAMILY,
    FAST,
    MODEL,
    PAGE_BYTES,
    PARTS,
    content,
    eventually,
    pages_of,
    store,
    wait_all,
)

from cachetree import (
    DISK,
    KV,
    LOCAL,
    Cache,
    CacheConfig,
    ConfigError,
    Deadline,
    DeadlineExceeded,
    Family,
    Kind,
    Location,
    PageHash,
    Span,
    StaleEntry,
    Step,
)
from cachetree.disk import DiskStore, entry_file

WHOLE = tier_parts.plan_of(DISK, Span(0, 8))


def open_cache(path: Path, family: Family = FAMILY, **config: object) -> Cache:
    """Open a cache with memory for four prompts, unless the config says otherwise."""
    default = {"host_bytes": 4 * PROMPT_BYTES, "disk_bytes": 64 << 20, "serves": False}
    return Cache(family, CacheConfig(disk_path=str(path), **(default | config)))


def fetch(cache: Cache, pages: Sequence[PageHash], span: Span, location: Location = DISK) -> None:
    tier_parts.fetch(cache, location, pages, span)


def test_pages_that_left_memory_are_fetched_from_disk(tmp_path):
    with open_cache(tmp_path) as cache:
        for number in range(12):
            store_and_wait(cache, prompt(number))
        assert num_at(cache, prompt(0), LOCAL) == 0
        assert num_at(cache, prompt(11), LOCAL) == 8
        (match,) = cache.match(prompt(0))
        assert (match.model, match.location, match.num_pages) == (MODEL, DISK, 8)
        assert match.e_pages == {E_LAYER: 8}
        assert cache.link(DISK) is None
        for span in (Span(0, 8), Span(2, 5), Span(7, 8)):
            fetch(cache, prompt(0), span)
        status = cache.status()
        assert status.disk.num_entries == 24
        assert status.disk.num_late_entries == 0


def test_a_fetch_joins_entries_of_a_long_prompt(tmp_path):
    pages = pages_of(64)
    with open_cache(tmp_path, host_bytes=64 << 20) as cache:
        for start in range(0, 64, 16):
            parent = pages[start - 1] if start else None
            store(cache.tree, pages[start : start + 16], parent)
        eventually(lambda: num_e_at(cache, pages, DISK) == 64)
        eventually(lambda: not cache.tree.held_bytes)
        cache.tree.evict()
        assert num_at(cache, pages, LOCAL) == 0
        fetch(cache, pages, Span(0, 64))
        fetch(cache, pages, Span(10, 40))
        eventually(lambda: cache.link(DISK))


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_disk_that_never_ends_in_time_is_known_to_be_slow(tmp_path, monkeypatch, is_given_up):
    read = DiskStore.read

    def slow(*args: object) -> None:
        time.sleep(0.15)
        read(*args)  # type: ignore[arg-type]

    with open_cache(tmp_path) as cache:
        store_and_wait(cache, prompt(0))
        monkeypatch.setattr(DiskStore, "read", slow)
        fetch_too_late(cache, WHOLE, prompt(0), is_given_up=is_given_up)


def test_e_that_pages_gain_is_all_that_is_written(tmp_path):
    """The sizes are like an 8B model's: E of one layer takes 1/16 of the KV's bytes."""
    family = msgspec.structs.replace(FAMILY, num_layers=32, page_size=64)
    pages = prompt(0)
    kv = [memoryview(bytes(8 * family.kv_page_bytes))] * family.num_layers
    e = memoryview(bytes(8 * family.e_page_bytes))
    with open_cache(tmp_path, family, host_bytes=64 << 20) as cache:
        assert cache.store(MODEL, None, pages, kv, {})
        eventually(lambda: num_at(cache, pages, DISK) == 8)
        before = cache.status().disk.counts.num_written_bytes
        assert cache.store(MODEL, None, pages, kv, {1: e})
        eventually(lambda: cache.status().disk.counts.num_written_bytes > before)
        written = cache.status().disk.counts.num_written_bytes - before
    assert e.nbytes <= written < 1.05 * e.nbytes


def test_a_restart_finds_the_cache_again(tmp_path):
    with open_cache(tmp_path) as cache:
        for number in range(8):
            store_and_wait(cache, prompt(number))
        store(cache.tree, prompt(99))
    with open_cache(tmp_path) as cache:
        for number in [*range(8), 99]:
            assert num_at(cache, prompt(number), DISK) == 8, "closing did not write it"
            fetch(cache, prompt(number), Span(0, 8))
        eventually(lambda: num_e_at(cache, prompt(99), LOCAL) == 8)
        eventually(lambda: cache.tree.num_bytes == 4 * PROMPT_BYTES)
        fetch(cache, prompt(99), Span(0, 8), LOCAL)
        assert num_at(cache, prompt(0), LOCAL) == 0, "not the latest were read into memory"


def test_pages_partly_in_memory_are_completed_from_disk(tmp_path):
    with open_cache(tmp_path) as cache:
        store_and_wait(cache, prompt(0))
        store_and_wait(cache, prompt(1))
        cache.tree.evict()
        store(cache.tree, prompt(1)[:3])
        cache._disk._warm_up()
        for number in range(2):
            assert num_at(cache, prompt(number), LOCAL) == 8
        fetch(cache, prompt(0), Span(0, 8), LOCAL)


def test_a_worker_that_restarts_serves_its_peers_again(tmp_path):
    with open_cache(tmp_path, serves=True) as first:
        store_and_wait(first, prompt(1))
    with open_cache(tmp_path, serves=True) as again:
        config = CacheConfig(peers=(again.address,), serves=False, peer=FAST)
        with Cache(FAMILY, config) as receiver:
            address = again.address
            assert receiver.wait_ready(20)
            eventually(lambda: num_e_at(receiver, prompt(1), address) == 8)
            fetch(receiver, prompt(1), Span(0, 8), address)


def test_a_killed_process_leaves_what_it_had_written(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        numbers = [int(process.stdout.readline()) for _ in range(20)]
        process.kill()
        numbers += [int(it) for it in process.stdout.read().split("\n")[:-1]]
    with open_cache(tmp_path) as cache:
        for number in numbers:
            assert num_at(cache, prompt(number), DISK) == 8
            fetch(cache, prompt(number), Span(0, 8))


def test_damage_is_a_stale_entry_and_no_longer_matches(tmp_path, caplog):
    with open_cache(tmp_path, host_bytes=PROMPT_BYTES) as cache:
        for number in range(3):
            store_and_wait(cache, prompt(number))
        needle = content(prompt(0)[0], Step(Kind.KV, 1))
        file, at = place_of(tmp_path, needle)
        with file.open("r+b") as raw:
            raw.seek(at)
            raw.write(bytes([needle[0] ^ 1]))
        caplog.set_level(logging.ERROR)  # pytest keeps records, and with them what was logged.
        with pytest.raises(StaleEntry):
            fetch(cache, prompt(0), Span(0, 8))
        assert cache.match(prompt(0)) == []
        eventually(lambda: cache._arriving.lent_bytes == 0, 2)
        fetch(cache, prompt(1), Span(0, 8))
        assert cache.status().staging_bytes_in_use == 0
        store_and_wait(cache, prompt(0))
        fetch(cache, prompt(0), Span(0, 8))


def test_a_reader_of_the_disk_keeps_no_fetch_that_is_over(tmp_path):
    with open_cache(tmp_path) as cache:
        store_and_wait(cache, prompt(0))
        staging = cache.fetch(WHOLE, prompt(0), Deadline.after(10))
        wait_all(staging)
        del staging
        eventually(lambda: cache.status().staging_bytes_in_use == 0, 2)


def test_a_fetch_of_what_went_or_came_too_late_fails(tmp_path):
    with open_cache(tmp_path) as cache:
        with pytest.raises(StaleEntry, match="no longer on disk"):
            fetch(cache, prompt(0), Span(0, 8))
        store_and_wait(cache, prompt(0))
        late = cache.fetch(WHOLE, prompt(0), Deadline.after(0))
        eventually(lambda: isinstance(late.error, DeadlineExceeded))
        assert late.num_landed_bytes == 0, "read for nobody"
        fetch(cache, prompt(0), Span(0, 8))
    with Cache(FAMILY, CacheConfig(serves=False)) as diskless:
        staging = diskless.fetch(WHOLE, prompt(0), Deadline.after(5))
        eventually(lambda: "disk is not a peer" in str(staging.error))


def test_use_in_memory_keeps_an_entry_on_disk(tmp_path):
    disk_bytes = 24 * PROMPT_BYTES
    with open_cache(tmp_path, disk_bytes=disk_bytes) as cache:
        store_and_wait(cache, prompt(0))
        for number in range(1, 60):
            store_and_wait(cache, prompt(number))
            assert num_at(cache, prompt(0), LOCAL) == 8
            fetch(cache, prompt(0), Span(0, 8), LOCAL)
            assert sum(it.stat().st_size for it in tmp_path.iterdir()) <= disk_bytes
        assert num_at(cache, prompt(0), DISK) == 8
        assert num_at(cache, prompt(1), DISK) == 0
        status = cache.status().disk
        assert status.counts.num_evicted_entries > 0


def test_failed_write_is_repeated_with_the_next_pages(tmp_path, monkeypatch):
    """Without the repeat, no prompt that begins with this entry would reach the disk while the
    entry is in memory."""

    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    pages = pages_of(32)
    with open_cache(tmp_path) as cache:
        monkeypatch.setattr(Path, "rename", fail)
        for start in (0, 8):
            store(cache.tree, pages[start : start + 8], pages[start - 1] if start else None)
            time.sleep(0.05)
        eventually(lambda: cache.status().disk.counts.num_failed_writes > 0)  # type: ignore[union-attr]
        monkeypatch.undo()
        store(cache.tree, pages[16:24], pages[15])
        eventually(lambda: num_e_at(cache, pages, DISK) == 24)
        fetch(cache, pages[:24], Span(0, 24))


def test_a_fetch_that_brings_a_prompt_into_memory_lets_nothing_go_for_it(tmp_path):
    pages = pages_of(24)
    with open_cache(tmp_path) as cache:
        for start in range(0, 24, 8):
            store(cache.tree, pages[start : start + 8], pages[start - 1] if start else None)
        eventually(lambda: num_e_at(cache, pages, DISK) == 24)
        cache.tree.evict()
        for number in range(2):
            store_and_wait(cache, prompt(number))
        num_evictions = cache.tree.num_evictions
        fetch(cache, pages, Span(16, 24))
        eventually(lambda: num_at(cache, pages, LOCAL) == 16)
        cache._disk.close()  # Once what was begun has ended.
        assert cache.tree.num_evictions == num_evictions
        assert num_at(cache, pages, LOCAL) == 16


def test_entries_evicted_before_they_are_written_are_counted(tmp_path):
    # The one that is being written stays in memory until it is.
    with open_cache(tmp_path, host_bytes=2 * PROMPT_BYTES) as cache:
        with cache._disk._store._writing:
            for number in range(6):
                store(cache.tree, prompt(number))
                time.sleep(0.02)
        status = cache._disk.status
        eventually(lambda: status().num_entries + status().num_late_entries == 12)
        assert status().num_late_entries > 0


def test_entries_read_into_memory_are_not_written_again(tmp_path):
    with open_cache(tmp_path) as cache:
        for number in range(8):
            store_and_wait(cache, prompt(number))
        with cache._disk._store._writing:
            store(cache.tree, prompt(8))
            eventually(lambda: cache.status().held_bytes)
            for number in range(8):
                promote(cache, prompt(number)).wait(20)
        store_and_wait(cache, prompt(9))
        assert cache._disk.status().num_late_entries <= 1, "E of what waited had no lease"
    with open_cache(tmp_path, host_bytes=64 << 20) as cache:
        eventually(lambda: num_at(cache, prompt(0), LOCAL) == 8)
        store_and_wait(cache, prompt(10))
        records = [it.record for it in cache._disk._store.files.coldest_first()]
        order = [it.pages[-1] for it in records if it.part == KV]
        assert order == [prompt(number)[-1] for number in range(11)]


def promote(cache: Cache, pages: Sequence[PageHash]) -> threading.Event:
    """Return an event that is set once the promotion has been tried."""
    done = threading.Event()
    cache._disk.promote(
        MODEL,
        pages[-1],
        PARTS,
        Deadline.after(20),
        lambda: True,
        lambda let_go: (let_go(), done.set()),
    )
    return done


def evict(cache: Cache, pages: Sequence[PageHash] = ()) -> queue.SimpleQueue[tuple[int, int]]:
    """Evict everything, or one prompt. Return the freed bytes."""
    freed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    cache._disk.evict(None, pages, lambda *num_bytes: freed.put(num_bytes))
    return freed


def test_eviction_from_disk_during_a_read_leaves_nothing_in_memory(tmp_path):
    pages = pages_of(16)
    with open_cache(tmp_path) as cache:
        store_and_wait(cache, pages[:8])
        store_and_wait(cache, pages)
        cache.tree.evict()
        file = data_files(tmp_path)[-2]  # KV of the second half.
        file.unlink()
        os.mkfifo(file)  # Whoever opens it waits for somebody to write.
        done = promote(cache, pages)
        # The first half is leased, and the second reserved.
        eventually(lambda: cache.status().held_bytes == 16 * 4 * PAGE_BYTES)
        assert num_at(cache, pages, LOCAL) == 8
        freed = evict(cache)
        with pytest.raises(queue.Empty):
            freed.get(timeout=0.2)
        handle = os.open(file, os.O_RDWR)
        num_bytes = freed.get(timeout=20)[0]
        os.close(handle)
        assert done.wait(20)
        num_bytes += evict(cache).get(timeout=20)[0]  # The lease may have ended after the first.
        assert num_bytes == 8 * 4 * PAGE_BYTES, "KV of the first half"
        assert not cache.match(pages)
        assert cache.tree.num_bytes == 0


def test_eviction_during_a_write_leaves_nothing_in_memory_or_on_disk(tmp_path):
    with open_cache(tmp_path) as cache:
        with cache._disk._store._writing:
            store(cache.tree, prompt(0))
            eventually(lambda: cache.status().held_bytes)
            freed = evict(cache)
            with pytest.raises(queue.Empty):
                freed.get(timeout=0.2)
        num_bytes, num_disk_bytes = freed.get(timeout=20)
        assert num_bytes == PROMPT_BYTES
        assert num_disk_bytes > 8 * 4 * PAGE_BYTES, "of KV"
        assert not cache.match(prompt(0))


def test_an_order_to_evict_waits_for_one_file_of_what_is_written(tmp_path, monkeypatch):
    begun, may_write = threading.Event(), threading.Semaphore(0)
    write_record = entry_file.write_record

    def slow(*args: object) -> None:
        begun.set()
        assert may_write.acquire(timeout=20)
        write_record(*args)  # type: ignore[arg-type]

    with open_cache(tmp_path) as cache:
        store_and_wait(cache, prompt(0))
        monkeypatch.setattr(cache._disk._store, "_max_file_bytes", 1)  # A page in each.
        monkeypatch.setattr(entry_file, "write_record", slow)
        store(cache.tree, prompt(1))
        assert begun.wait(20)
        freed = evict(cache, prompt(0))
        with pytest.raises(queue.Empty):
            freed.get(timeout=0.2)
        may_write.release()
        num_bytes, num_disk_bytes = freed.get(timeout=20)
        assert num_bytes == PROMPT_BYTES < num_disk_bytes
        assert not cache.match(prompt(0))
        assert num_at(cache, prompt(1), DISK) == 1
        may_write.release(7)
        eventually(lambda: num_at(cache, prompt(1), DISK) == 8)
        may_write.release(64)  # Its E.
        eventually(lambda: not cache.status().held_bytes)
        assert cache._disk.status().num_late_entries == 0


def test_an_order_to_evict_waits_for_no_disk_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("cachetree.disk.tier._MAX_STOP_S", 0.1)
    with open_cache(tmp_path) as cache:
        store_and_wait(cache, prompt(0))
        with cache._disk._store._writing:
            store(cache.tree, prompt(1))
            eventually(lambda: cache.status().held_bytes)
            e_bytes = 8 * PAGE_BYTES  # Of what waits to be written.
            assert evict(cache).get(timeout=20) == (PROMPT_BYTES + e_bytes, 0)
            fetch(cache, prompt(0), Span(0, 8))
            eventually(lambda: num_at(cache, prompt(0), LOCAL) == 8)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"disk_bytes": 0}, "disk_bytes 0; give both"),
        ({"disk_bytes": -1}, "disk_bytes -1; give both"),
        ({"disk_path": ""}, "give both"),
        ({"disk_bytes": 1000}, "disk_bytes is 1000; a page of this family takes"),
    ],
)
def test_bad_settings_stop_the_start(tmp_path, config, named):
    settings = {"disk_path": str(tmp_path), "disk_bytes": 1 << 20, "serves": False} | config
    with pytest.raises(ConfigError, match=named):
        Cache(FAMILY, msgspec.convert(settings, CacheConfig))


def test_a_directory_of_another_family_or_process_stops_the_start(tmp_path):
    other = msgspec.structs.replace(FAMILY, tokenizer="other")
    with open_cache(tmp_path) as cache:
        store_and_wait(cache, prompt(0))
        with pytest.raises(ConfigError, match="is using"):
            open_cache(tmp_path)
    with pytest.raises(ConfigError, match="of another family or release"):
        open_cache(tmp_path, other)
    with pytest.raises(ConfigError, match="nonsense"):
        open_cache(tmp_path, peers=("nonsense",))
    open_cache(tmp_path).close()


def test_each_rank_has_a_directory_of_its_own(tmp_path):
    ranks = [msgspec.structs.replace(FAMILY, tp_size=2, tp_rank=rank) for rank in range(2)]
    with open_cache(tmp_path, ranks[0]), open_cache(tmp_path, ranks[1]):
        assert sorted(it.name for it in tmp_path.iterdir()) == ["rank0", "rank1"]


def test_a_closed_cache_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    with open_cache(tmp_path) as cache:
        store_and_wait(cache, prompt(0))
    cache.close()
    staging = cache.fetch(WHOLE, prompt(0), Deadline.after(5))
    assert "closed" in str(staging.error)
    names = {it.name for it in set(threading.enumerate()) - before}
    assert not {name for name in names if name.startswith("cachetree")}


def test_a_disk_that_hangs_hinders_no_close(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("cachetree.disk.tier._MAX_CLOSE_S", 0.1)
    monkeypatch.setattr("cachetree.tier.GRACE_S", 0.1)
    cache = open_cache(tmp_path)
    store_and_wait(cache, prompt(0))
    cache.tree.evict()
    files = data_files(tmp_path)
    for file in files:
        file.unlink()
        os.mkfifo(file)  # Whoever opens it waits for somebody to write.
    staging = cache.fetch(WHOLE, prompt(0), Deadline.after(60))
    closing = threading.Thread(target=cache.close, daemon=True)
    closing.start()
    closing.join(20)
    is_hanging = closing.is_alive()
    handles = [os.open(file, os.O_RDWR) for file in files]  # The disk answers at last.
    assert not is_hanging
    assert "does not answer" in caplog.text
    with pytest.raises(StaleEntry):
        wait_all(staging)
    for handle in handles:
        os.close(handle)


def test_many_threads_get_right_bytes_or_a_miss(tmp_path):
    failures: list[Exception] = []
    num_fetched = [0] * 4
    disk_bytes = 32 * PROMPT_BYTES
    deadline = Deadline.after(30)

    def work(number: int, cache: Cache) -> None:
        rng = random.Random(number)
        try:
            for turn in itertools.count():
                # On a busy machine little has come to the disk after so many turns.
                if turn >= 120 and (num_fetched[number] > 5 or deadline.has_passed):
                    return
                pages = prompt(rng.randrange(40))
                matches = cache.match(pages)
                if not matches:
                    store(cache.tree, pages)
                    continue
                match = rng.choice(matches)
                start = rng.randrange(match.num_pages)
                try:
                    fetch(cache, pages, Span(start, match.num_pages), match.location)
                    num_fetched[number] += match.location == DISK
                except StaleEntry:
                    continue
        except Exception as exc:  # noqa: BLE001
            failures.append(exc)

    with open_cache(tmp_path, host_bytes=8 * PROMPT_BYTES, disk_bytes=disk_bytes) as cache:
        workers = [threading.Thread(target=work, args=(it, cache)) for it in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not failures
        assert sum(num_fetched) > 20
        status = cache.status()
        assert status.disk.num_bytes <= disk_bytes
        assert status.disk.counts.num_damaged_entries == 0


def _store_for_ever(path: Path) -> None:
    with open_cache(path) as cache:
        number = 0
        while True:
            pages = prompt(number)
            store_and_wait(cache, pages)
            print(number, flush=True)
            number += 1


if __name__ == "__main__":
    _store_for_ever(Path(sys.argv[1]))
