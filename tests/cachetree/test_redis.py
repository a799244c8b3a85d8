"""Workers found in the real redis-server: killed, stopped, with another clock, and full."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from push_parts import cache_of, fetched
from redis_parts import RealRedis, needs_redis
from transport_parts import FAMILY, eventually, pages_of, store

from cachetree import Cache, Location, WorkerConfig
from cachetree.transport.directory import (
    LEASE_S,
    RENEW_S,
    Found,
    RedisLeases,
    announced,
    lease_key,
)

PAGES = pages_of(4)
pytestmark = needs_redis
CLOCK = """
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* What Redis takes for the time of day, with as many seconds added as the file $JUMP says. */
int gettimeofday(struct timeval *now, void *zone) {
    char text[16] = {0};
    struct timespec real;
    int file = open(getenv("JUMP"), O_RDONLY);
    if (file < 0 || read(file, text, sizeof text - 1) < 0) abort();
    close(file);
    clock_gettime(CLOCK_REALTIME, &real);
    now->tv_sec = real.tv_sec + atol(text);
    now->tv_usec = real.tv_nsec / 1000;
    return 0;
}
"""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RealRedis]:
    server = RealRedis(tmp_path)
    yield server
    server.close()


@pytest.fixture
def pair(redis: RealRedis) -> Iterator[tuple[Cache, Cache]]:
    """A worker that is announced, and a cache that has found it."""
    with cache_of(worker=WorkerConfig(announce=redis.url)) as worker:
        store(worker.tree, PAGES)
        eventually(redis.client.dbsize)
        with cache_of(peers=(redis.url,), serves=False) as cache:
            assert cache.wait_ready(20)
            yield worker, cache


def check_served(worker: Cache, cache: Cache) -> None:
    """At once, as no request waits for the directory."""
    begun_s = time.monotonic()
    assert worker.address
    fetched(cache, worker.address, PAGES)
    assert cache.sources()[0].state == "ready"
    assert time.monotonic() - begun_s < 5


def test_a_lease_is_kept_and_taken_back(redis: RealRedis) -> None:
    with cache_of(worker=WorkerConfig(announce=redis.url)) as worker:
        eventually(redis.client.dbsize)
        (key,) = redis.client.keys()
        assert 0 < redis.client.ttl(key) <= LEASE_S
        leases = RedisLeases(redis.url, FAMILY, own_epoch=1)
        assert leases.look() == [Found(Location(str(worker.address)))]
    assert not redis.client.dbsize()


@pytest.mark.slow
def test_redis_is_killed_and_comes_back_empty(redis: RealRedis, pair: tuple[Cache, Cache]) -> None:
    redis.kill()
    eventually(lambda: pair[1].sources()[-1].reason)
    check_served(*pair)
    redis.start()
    eventually(lambda: redis.client.dbsize() == 1)
    eventually(lambda: pair[1].sources()[-1].state == "ready")
    check_served(*pair)


@pytest.mark.slow
def test_redis_stops_answering(redis: RealRedis, pair: tuple[Cache, Cache]) -> None:
    """As behind a partition: connections stay, and nothing comes."""
    os.kill(redis.process.pid, signal.SIGSTOP)
    try:
        eventually(lambda: "imeout" in pair[1].sources()[-1].reason)
        check_served(*pair)
        time.sleep(LEASE_S + 1)
    finally:
        os.kill(redis.process.pid, signal.SIGCONT)
    eventually(lambda: pair[1].sources()[-1].state == "ready")
    eventually(lambda: redis.client.dbsize() == 1)
    check_served(*pair)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, for a clock that jumps")
@pytest.mark.parametrize("jump_s", [7200, -7200])
def test_the_clock_of_redis_jumps(tmp_path: Path, jump_s: int) -> None:
    """Forwards all leases end at once, backwards none does; workers are read all the same."""
    source, library, jump = (tmp_path / it for it in ("clock.c", "clock.so", "jump"))
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    jump.write_text("0")
    redis = RealRedis(tmp_path, {"LD_PRELOAD": str(library), "JUMP": str(jump)})
    try:
        with cache_of(worker=WorkerConfig(announce=redis.url)) as worker:
            store(worker.tree, PAGES)
            eventually(redis.client.dbsize)
            with cache_of(peers=(redis.url,), serves=False) as cache:
                assert cache.wait_ready(20)
                before_s = redis.client.time()[0]
                jump.write_text(str(jump_s))
                eventually(lambda: abs(redis.client.time()[0] - before_s) > 3600)
                check_served(worker, cache)
                time.sleep(2 * RENEW_S)  # Renewed, and looked for again.
                eventually(lambda: redis.client.keys())
                (key,) = redis.client.keys()
                assert 0 < redis.client.ttl(key) <= LEASE_S
                check_served(worker, cache)
    finally:
        redis.close()


def test_two_hundred_workers_are_found(redis: RealRedis) -> None:
    """Among keys of others."""
    for it in range(1000):
        redis.client.set(f"other:{it}", "x")
    one = announced(redis.url, FAMILY, 1, Found(Location("tcp://10.0.0.0:1")))
    eventually(lambda: redis.client.dbsize() == 1001)
    for it in range(2, 201):
        value = f'{{"address": "tcp://10.0.0.{it}:1"}}'
        redis.client.set(lease_key(FAMILY, it), value, ex=LEASE_S)
    found = RedisLeases(redis.url, FAMILY, own_epoch=1).look()
    assert len(found) == 199
    assert len({it.address for it in found}) == 199
    one.close()
