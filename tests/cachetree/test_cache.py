"""The public interface: pages that are stored here or on a peer are matched and fetched in the same
way."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from serve_parts import serving
from tier_parts import plan_of
from transport_parts import (
    E_LAYER,
    FAMILY,
    FAST,
    MODEL,
    PAGE_BYTES,
    PARTS,
    check_content,
    content,
    eventually,
    pages_of,
    wait_all,
)

from cachetree import (
    LOCAL,
    Cache,
    CacheConfig,
    Cancelled,
    ConfigError,
    Deadline,
    DeadlineExceeded,
    FetchError,
    Kind,
    Location,
    PageHash,
    PeerConfig,
    Plan,
    Span,
    Staging,
    StaleEntry,
    Step,
    WorkerConfig,
)
from cachetree.cli import main
from cachetree.memory.arena import Register, address, unregistered

PAGES = pages_of(64)
FETCH_BYTES = 64 * 4 * PAGE_BYTES
"""Bytes of a fetch of E at layer 2, and KV of layers 0, 1 and 3."""


@contextlib.contextmanager
def cache_of(register: Register = unregistered, **settings: object) -> Iterator[Cache]:
    config = CacheConfig(**{"host_bytes": 64 << 20, "peer": FAST, **settings})
    with Cache(FAMILY, config, register=register) as cache:
        yield cache


def fill(cache: Cache, pages: list[PageHash]) -> bool:
    def buffer(kind: Kind, layer: int) -> memoryview:
        return memoryview(b"".join(content(page, Step(kind, layer)) for page in pages))

    kv = [buffer(Kind.KV, layer) for layer in range(FAMILY.num_layers)]
    return cache.store(MODEL, None, pages, kv, {E_LAYER: buffer(Kind.E, E_LAYER)})


@contextlib.contextmanager
def pair_of(**settings: object) -> Iterator[tuple[Cache, Cache]]:
    """A cache that has all pages, with these settings, and one that reads from it."""
    with cache_of(**settings) as sender:
        assert sender.address and fill(sender, PAGES)
        with cache_of(peers=(sender.address,), serves=False) as receiver:
            assert receiver.wait_ready(20)
            yield sender, receiver


ALL = Span(0, 64)


def plan_at(location: Location, pages: Span = ALL) -> Plan:
    return plan_of(location, pages)


def test_entries_stored_by_one_cache_are_matched_and_fetched_by_another():
    with pair_of() as (sender, receiver):
        (match,) = receiver.match(PAGES)
        assert (match.model, match.location, match.num_pages) == (MODEL, sender.address, 64)
        for span in (ALL, Span(10, 30)):
            plan = plan_at(match.location, span)
            with receiver.fetch(plan, PAGES, Deadline.after(5)) as staging:
                check_content(staging, PAGES[span.start : span.stop])
        assert receiver.status().peers[0].state == "ready"
        assert receiver.address is None
        eventually(lambda: receiver.link(match.location))


def test_local_entries_are_fetched_the_same_way():
    with cache_of(serves=False) as cache:
        fill(cache, PAGES)
        assert cache.link(LOCAL) is None
        staging = cache.fetch(plan_at(LOCAL), PAGES, Deadline.after(5))
        check_content(staging, PAGES)
        staging.release()
        assert cache.link(LOCAL) is None, "nothing moved"
        cache.tree.evict()
        assert cache.tree.num_bytes == 0, "the fetch kept its lease"


def test_store_skips_what_is_there_and_says_when_there_is_no_room():
    with cache_of(serves=False) as cache:
        assert fill(cache, PAGES[:16])
        held = cache.tree.num_bytes
        assert fill(cache, PAGES[:16])
        assert cache.tree.num_bytes == held
        assert fill(cache, PAGES)
        assert cache.match(PAGES)[0].num_pages == 64
        staging = cache.fetch(plan_at(LOCAL), PAGES, Deadline.after(5))
        assert staging is not None
        check_content(staging, PAGES)
        with pytest.raises(ValueError, match="kv of layer 0 has 5 bytes for 1 pages"):
            cache.store(MODEL, None, PAGES[:1], [memoryview(b"small")] * 4, {})
        with pytest.raises(ValueError, match="3 layers"):
            cache.store(MODEL, None, PAGES[:1], [memoryview(b"small")] * 3, {})
    with Cache(FAMILY, CacheConfig(host_bytes=1000, serves=False)) as tiny:
        assert not fill(tiny, PAGES)


def test_stored_buffers_may_be_of_any_format():
    with cache_of(serves=False) as cache:
        layers = np.arange(FAMILY.num_layers * PAGE_BYTES // 2, dtype=np.uint16)
        kv = [part.data for part in np.split(layers, FAMILY.num_layers)]
        assert cache.store(MODEL, None, PAGES[:1], kv, {})
        lease = cache.tree.lease(MODEL, PAGES[:1], "test", Deadline.after(5))
        with lease:
            assert b"".join(lease.views(Step(Kind.KV, 3))) == kv[3].tobytes()


def test_fetches_stay_within_the_staging_budget():
    with cache_of(serves=False, staging_bytes=2 * FETCH_BYTES) as cache:
        fill(cache, PAGES)

        def fetch() -> object:
            return cache.fetch(plan_at(Location("tcp://127.0.0.1:1")), PAGES, Deadline.after(5))

        first, second = fetch(), fetch()
        assert second is not None
        assert fetch() is None, "over the budget"
        assert cache.status().staging_bytes_in_use == 2 * FETCH_BYTES

        first.release()  # type: ignore[attr-defined]
        first.release()  # type: ignore[attr-defined]
        assert cache.status().staging_bytes_in_use == FETCH_BYTES

        del second

        def is_collected() -> bool:
            gc.collect()
            return cache.status().staging_bytes_in_use == 0

        eventually(is_collected)
        assert fetch() is not None


def test_a_writer_that_is_late_keeps_no_other_fetch_from_its_memory():
    with cache_of(serves=False, staging_bytes=FETCH_BYTES) as cache:

        def fetch() -> Staging | None:
            return cache.fetch(plan_at(Location("tcp://127.0.0.1:1")), PAGES, Deadline.after(5))

        staging = fetch()
        assert fetch() is None
        (late,) = staging.views(Step(Kind.KV, 0))
        staging.release()
        again = fetch()
        (view,) = again.views(Step(Kind.KV, 0))
        np.frombuffer(late, np.uint8)[:] = 1
        np.frombuffer(view, np.uint8)[:] = 2
        assert bytes(late[:1]) == b"\1", "they share memory"
        assert fetch() is None, "what lies elsewhere is in no budget"
        assert cache.status().staging_bytes_in_use == FETCH_BYTES
        del late
        assert fetch() is None, "there is room, which the budget does not have"
        again.release()
        assert cache.status().staging_bytes_in_use == 0
        assert fetch() is not None


def test_question_about_peers_is_answered_while_serving_ends():
    class Ending(Cache):
        """A cache that stops serving as soon as the caller has read its worker's address."""

        is_ending = False

        def __getattribute__(self, name: str) -> object:
            value = super().__getattribute__(name)
            if name == "_worker" and self.is_ending:
                self.is_ending = False
                self.stop_serving()
            return value

    with Ending(FAMILY, CacheConfig(host_bytes=1 << 20)) as cache:
        cache.is_ending = True
        assert cache.knowing()()
        assert cache.address is None


class Device:
    """A device that remembers the registered memory."""

    def __init__(self) -> None:
        self.registered: list[memoryview] = []

    def register(self, memory: memoryview) -> Callable[[], None]:
        self.registered.append(memory)
        return lambda: self.registered.remove(memory)

    def knows(self, view: memoryview) -> bool:
        at = address(np.frombuffer(view, np.uint8))
        arrays = [np.frombuffer(it, np.uint8) for it in self.registered]
        return any(0 <= at - address(it) < it.nbytes for it in arrays)


def test_a_device_knows_all_memory_from_the_start_to_the_end():
    device = Device()
    far = plan_at(Location("tcp://127.0.0.1:1"))
    with cache_of(serves=False, peers=(far.location,), register=device.register) as cache:
        registered = list(device.registered)
        assert len(registered) == 2
        fill(cache, PAGES)
        fetches = [cache.fetch(plan, PAGES, Deadline.after(5)) for plan in (plan_at(LOCAL), far)]
        for staging in fetches:
            assert all(device.knows(view) for it in staging.steps for view in staging.views(it))
            staging.release()
        assert device.registered == registered, "registered while serving"
    assert device.registered == []


def test_memory_that_cannot_be_had_or_registered_is_one_error_at_start():
    def refuse(memory: memoryview) -> Callable[[], None]:
        raise ConfigError(f"{memory.nbytes} bytes cannot be registered")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match="cannot be registered"):
        Cache(FAMILY, CacheConfig(serves=False), register=refuse)
    with pytest.raises(ConfigError, match="bytes of memory cannot be allocated"):
        Cache(FAMILY, CacheConfig(serves=False, host_bytes=1 << 62))
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_pages_that_are_here_are_read_where_they_lie():
    with cache_of(serves=False, staging_bytes=0) as cache:
        fill(cache, PAGES)
        staging = cache.fetch(plan_at(LOCAL), PAGES, Deadline.after(5))
        assert staging is not None and staging.is_complete
        lease = cache.tree.lease(MODEL, PAGES, "test", Deadline.after(5), PARTS)
        for step in staging.steps:
            theirs, ours = staging.views(step), lease.views(step)
            assert list(map(place, theirs)) == list(map(place, ours)), "a copy"
        lease.release()
        cache.tree.evict()
        assert cache.tree.num_pages == len(PAGES), "the fetch keeps them"
        staging.release()
        cache.tree.evict()
        assert cache.tree.num_pages == 0
        (counts,) = cache.status().fetches
        assert (counts.location, counts.outcomes) == (LOCAL, {"ok": 1})


def place(view: memoryview) -> tuple[int, int]:
    return address(np.frombuffer(view, np.uint8)), view.nbytes


def fails(cache: Cache, plan: Plan, seconds: float = 5.0) -> FetchError:
    staging = cache.fetch(plan, PAGES, Deadline.after(seconds))
    with staging, pytest.raises(FetchError) as caught:
        wait_all(staging)
    return caught.value


def test_error_of_a_fetch_fails_only_its_staging():
    with cache_of(serves=False, peers=("tcp://127.0.0.1:1",)) as cache:
        assert isinstance(fails(cache, plan_at(LOCAL)), StaleEntry)
        assert "is not a peer" in str(fails(cache, plan_at(Location("tcp://127.0.0.1:2"))))
        assert "connecting" in str(fails(cache, plan_at(Location("tcp://127.0.0.1:1"))))
        fill(cache, PAGES)
        assert "Span" in str(fails(cache, plan_at(LOCAL, Span(60, 70))))
        assert isinstance(fails(cache, plan_at(LOCAL), seconds=0), DeadlineExceeded)
        assert cache.status().staging_bytes_in_use == 0
        gc.collect()
        assert not cache._under_way  # However many addresses there have been.


def test_release_cancels_a_fetch_under_way():
    with pair_of(worker=WorkerConfig(max_bytes_per_s=1e5)) as (sender, receiver):
        staging = receiver.fetch(plan_at(sender.address), PAGES, Deadline.after(30))
        eventually(lambda: sender.status().worker.num_streams == 1)
        staging.release()
        eventually(lambda: sender.status().worker.num_streams == 0)
        assert isinstance(staging.error, Cancelled)


def test_a_link_is_told_from_what_was_given_up_with_what_is_under_way():
    with pair_of(worker=WorkerConfig(max_bytes_per_s=1e5)) as (sender, receiver):
        plan = plan_at(sender.address)

        def fetch() -> Staging:
            staging = receiver.fetch(plan, PAGES, Deadline.after(30))
            assert staging is not None
            return staging

        def backlog() -> Sequence[int]:
            link = receiver.link(plan.location)
            return () if link is None else link.backlog

        with fetch():
            assert receiver.link(plan.location) is None
            time.sleep(0.02)
        eventually(lambda: receiver.link(plan.location))
        first, second = fetch(), fetch()
        assert len(backlog()) == 2
        assert all(0 < it <= FETCH_BYTES for it in backlog())
        first.release()
        assert len(backlog()) == 1
        for step in second.steps:
            second.land(step, second.sizes[step])
        assert not backlog(), "all of it has come"


def test_a_closed_cache_leaves_no_thread_and_fails_fetches():
    before = set(threading.enumerate())
    with cache_of() as sender:
        fill(sender, PAGES)
        assert sender.address
        with cache_of(peers=(sender.address,)) as cache:
            assert cache.wait_ready(20)
            fill(cache, PAGES)
        cache.close()
        for location in (LOCAL, sender.address):
            assert "closed" in str(fails(cache, plan_at(location)))

    def ours() -> set[threading.Thread]:
        after = set(threading.enumerate()) - before
        return {thread for thread in after if thread.name.startswith("cachetree")}

    eventually(lambda: not ours())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peers": ["nonsense"]}, "peers is 'nonsense'"),
        ({"worker": {"listen": "tcp://0.0.0.0:0"}}, "insecure"),
        ({"host_bytes": -1}, "host_bytes is -1"),
        ({"peers": ["tcp://127.0.0.1:1", "tcp://127.0.0.1:1"]}, "once"),
        ({"peers": ["tcp://127.0.0.1:1", "tcp://127.0.0.1"]}, "tcp://HOST:PORT"),
    ],
)
def test_bad_settings_stop_the_start(config, named):
    with pytest.raises(ConfigError, match=named):
        Cache(FAMILY, msgspec.convert(config, CacheConfig))


def test_a_cache_that_could_not_start_frees_its_address():
    with cache_of() as cache:
        address = cache.address
    assert address
    keyless = PeerConfig(key_file="nowhere.key", server_key="nowhere.pub")
    config = CacheConfig(
        worker=WorkerConfig(listen=address), peers=("tcp://127.0.0.1:1",), peer=keyless
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match="nowhere"):
            Cache(FAMILY, config)


def test_the_command_line_serves_and_asks(tmp_path, capsys):
    with serving(tmp_path) as process:
        address = process.stdout.readline().split()[-1]
        assert main(["status", address, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["host_bytes"] == 1 << 20
        assert main(["status", address]) == 0
        assert "failed handshakes" in capsys.readouterr().out
        assert main(["ping", address, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["answer_ms"] > 0
    assert main(["ping", address, "--timeout", "0.1"]) == 1
    assert "no worker answered" in capsys.readouterr().err


SLOW_TO_CLOSE = """
import sys, threading, time
from cachetree import Cache
from cachetree.cli import main

threading.Thread(target=threading.Event().wait, daemon=True).start()
close = Cache.close

def slowly(cache):
    print("closing", flush=True)
    time.sleep(1)
    close(cache)
    print("closed", flush=True)

Cache.close = slowly
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_told_twice_to_end_closes_what_it_serves(tmp_path, number):
    """Any of the command's threads may get the signal."""
    with serving(tmp_path, ("-c", SLOW_TO_CLOSE)) as process:
        for line in ("serving at", "closing"):
            assert line in process.stdout.readline()
            process.send_signal(number)
        assert process.communicate(timeout=60)[0] == "closed\n"


FAMILY_YAML = f"family: {json.dumps(msgspec.to_builtins(FAMILY))}"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("family: 3", "family"),
        ("nonsense: 1", "nonsense"),
        ("family: {model: m, kv_type: float16, page_size: 16}", "did you mean kv_dtype?"),
        (f"{FAMILY_YAML}\ncache: {{worker: {{lisen: x}}}}", "did you mean cache.worker.listen?"),
        (f"{FAMILY_YAML}\ncache: {{host_bytes: -1}}", "host_bytes is -1"),
        ("{", "cache.yaml"),
    ],
)
def test_a_bad_file_is_one_clear_line(text, named, tmp_path, capsys):
    config = tmp_path / "cache.yaml"
    config.write_text(text)
    assert main(["serve", "--config", str(config)]) == 1
    error = capsys.readouterr().err
    assert named in error
    assert str(config) in error
