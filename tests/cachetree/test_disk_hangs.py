"""A disk that hangs: no thread waits for it twice, memory is given up, and monitors show it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from disk_parts import data_files
from tier_parts import PROMPT_BYTES, fetch, num_at, plan_of, prompt, store_and_wait
from transport_parts import FAMILY, MODEL, PARTS, eventually, store

from cachetree import DISK, STALL_S, Cache, CacheConfig, Deadline, FetchError, Span, StaleEntry
from cachetree.disk import DiskStore
from cachetree.metrics import METRICS, health_of

WHOLE = plan_of(DISK, Span(0, 8))


class SkewedClock:
    """The system's clock, plus seconds that a test has added."""

    def __init__(self) -> None:
        self.skew_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skew_s


@contextlib.contextmanager
def with_disk(path: Path) -> Iterator[tuple[Cache, SkewedClock]]:
    """Store prompts 0 to 2 on disk, each in its own file, and not in memory."""
    clock = SkewedClock()
    config = CacheConfig(
        disk_path=str(path), disk_bytes=64 << 20, host_bytes=8 * PROMPT_BYTES, serves=False
    )
    with Cache(FAMILY, config, clock=clock) as cache:
        for number in range(3):
            store_and_wait(cache, prompt(number))
        cache.tree.evict()
        yield cache, clock


@contextlib.contextmanager
def hanging(files: Sequence[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Let reads of these files hang until the end of the `with` statement. Yield those that have
    begun."""
    read, begun = DiskStore.read, []

    def begin(*args: object) -> None:
        begun.append(args)
        read(*args)  # type: ignore[arg-type]

    for file in files:
        file.unlink()
        os.mkfifo(file)  # Opening it waits for a writer.
    monkeypatch.setattr(DiskStore, "read", begin)
    try:
        yield begun
    finally:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                writer = os.open(file, os.O_RDWR)
                file.unlink()  # Before the writer goes: no later read may wait for another one.
                os.close(writer)


def metric(cache: Cache, name: str) -> dict[tuple[str, ...], float]:
    (samples,) = (it for it in METRICS if it.name == name)
    return samples.samples(cache.status())


def evicted(cache: Cache) -> tuple[int, int]:
    """Bytes that an order to evict everything freed, in memory and on disk."""
    freed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    cache._disk.evict(None, (), lambda *num_bytes: freed.put(num_bytes))
    return freed.get(timeout=5)


def until_left_alone(cache: Cache, clock: SkewedClock) -> None:
    def is_left_alone() -> bool:
        clock.skew_s += STALL_S
        return num_at(cache, prompt(2)) == 0

    eventually(is_left_alone)


def test_disk_whose_reads_hang_is_left_alone_until_they_return(tmp_path, monkeypatch):
    with with_disk(tmp_path) as (cache, clock):
        store_and_wait(cache, prompt(3))
        assert health_of(cache.status()).degraded == ()
        with hanging(data_files(tmp_path)[:4], monkeypatch) as begun:
            hung = [cache.fetch(WHOLE, prompt(it), Deadline.after(60)) for it in range(2)]
            eventually(lambda: len(begun) == 2)
            assert num_at(cache, prompt(2)) == 8, "left alone at once"
            until_left_alone(cache, clock)
            with pytest.raises(FetchError, match="does not answer"):
                fetch(cache, DISK, prompt(2), Span(0, 8))
            promoted: queue.SimpleQueue[object] = queue.SimpleQueue()
            cache._disk.promote(
                MODEL, prompt(2)[-1], PARTS, Deadline.after(60), lambda: True, promoted.put
            )
            promoted.get(timeout=5)
            (complaint,) = health_of(cache.status()).degraded
            assert "disk" in complaint
            assert metric(cache, "cachetree:tier_paused") == {(DISK,): 1}
            assert evicted(cache) == (PROMPT_BYTES, 0)
        for staging in hung:
            with pytest.raises(StaleEntry):
                staging.wait(staging.steps[0])
        eventually(lambda: num_at(cache, prompt(2)) == 8)
        fetch(cache, DISK, prompt(2), Span(0, 8))
        assert health_of(cache.status()).degraded == ()
        assert metric(cache, "cachetree:tier_paused") == {(DISK,): 0}
        assert evicted(cache)[1] > PROMPT_BYTES


def test_disk_is_left_alone_while_a_read_for_a_peer_hangs(tmp_path, monkeypatch):
    with with_disk(tmp_path) as (cache, clock):
        with hanging(data_files(tmp_path)[:1], monkeypatch) as begun:
            promoted: queue.SimpleQueue[object] = queue.SimpleQueue()
            cache._disk.promote(
                MODEL, prompt(0)[-1], PARTS, Deadline.after(60), lambda: True, promoted.put
            )
            eventually(lambda: begun)
            until_left_alone(cache, clock)
        promoted.get(timeout=5)
        assert num_at(cache, prompt(2)) == 8


def test_order_to_evict_gives_up_memory_while_files_cannot_be_deleted(tmp_path, monkeypatch):
    may_return: queue.SimpleQueue[None] = queue.SimpleQueue()
    with with_disk(tmp_path) as (cache, clock):
        freed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        with monkeypatch.context() as patch:
            begun = threading.Event()
            patch.setattr(
                DiskStore, "evict", lambda *_: begun.set() or may_return.get(timeout=20) or 0
            )
            cache._disk.evict(None, (), lambda *num_bytes: freed.put(num_bytes))
            assert begun.wait(20)
            store(cache.tree, prompt(3))
            until_left_alone(cache, clock)
            assert evicted(cache) == (PROMPT_BYTES, 0)
            may_return.put(None)
            assert freed.get(timeout=5) == (0, 0)


def test_write_that_hangs_is_told_to_monitors(tmp_path):
    with with_disk(tmp_path) as (cache, clock):
        with cache._disk._store._writing:
            store(cache.tree, prompt(3))
            eventually(lambda: cache.tree.held_bytes)
            assert health_of(cache.status()).degraded == ()

            def is_told() -> bool:
                clock.skew_s += 5.0
                return health_of(cache.status()).degraded == ("the disk cannot be written",)

            eventually(is_told)
            assert num_at(cache, prompt(2)) == 8, "reads do not hang"
        eventually(lambda: health_of(cache.status()).degraded == ())
