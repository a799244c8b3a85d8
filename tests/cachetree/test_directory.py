"""Workers that are found: by a name in DNS, and in Redis; by fakes of both, in this process."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from push_parts import cache_of, fetched
from redis_parts import FakeRedis, fake_redis
from security_parts import new_party
from transport_parts import (
    FAMILY,
    FAST,
    MODEL,
    eventually,
    new_staging,
    new_tree,
    pages_of,
    store,
    worker_of,
)

from cachetree import (
    Cache,
    CacheConfig,
    ConfigError,
    Deadline,
    Location,
    PeerConfig,
    WorkerConfig,
)
from cachetree.transport import Peers, Worker
from cachetree.transport import peers as peers_module
from cachetree.transport.address import Address
from cachetree.transport.directory import (
    LEASE_S,
    MAX_FOUND,
    Found,
    RedisLeases,
    announced,
    resolved,
)
from cachetree.transport.peers import GONE_S
from cachetree.transport.status import PeerState

PAGES = pages_of(4)
NAME = "dns://cachetree:7001"


@pytest.fixture
def redis() -> Iterator[FakeRedis]:
    with fake_redis() as fake:
        yield fake


class Clock:
    """The real one, and how far a test has put it forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@contextlib.contextmanager
def peers_of(own: Worker | None = None) -> Iterator[tuple[Peers, Clock]]:
    clock = Clock()
    peers = Peers(new_tree(), own, clock)
    try:
        yield peers, clock
    finally:
        peers.close()


def look(peers: Peers, *found: Location | Found, allowed: tuple[str, ...] = ()) -> None:
    named = [it if isinstance(it, Found) else Found(it) for it in found]
    peers.look(NAME, lambda: named, FAST, allowed)


def states(peers: Peers) -> list[str]:
    return [it.state for it in peers.sources()]


def test_every_address_of_a_name_is_a_worker() -> None:
    def resolve(host: str, port: int, type: int) -> list[tuple[object, ...]]:
        assert (host, port, type) == ("cachetree", 7001, socket.SOCK_STREAM)
        hosts = ("10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2")
        return [(0, type, 6, "", (it, port)) for it in hosts]

    assert resolved(Address("cachetree", 7001), resolve) == [
        Found(Location("tcp://10.0.0.1:7001")),
        Found(Location("tcp://10.0.0.2:7001")),
        Found(Location("tcp://[fd00::1]:7001")),
    ]


def test_a_name_with_too_many_addresses_gives_some() -> None:
    answers = [(0, 0, 0, "", (f"10.0.{it >> 8}.{it & 255}", 1)) for it in range(2 * MAX_FOUND)]
    assert len(resolved(Address("x", 1), lambda *_, **__: answers)) == MAX_FOUND


def test_a_worker_that_is_found_is_read() -> None:
    """By the resolver of this machine."""
    with cache_of() as worker:
        store(worker.tree, PAGES)
        port = worker.address.rpartition(":")[2]
        with cache_of(peers=(f"dns://127.0.0.1:{port}",), serves=False) as cache:
            assert cache.wait_ready(20)
            fetched(cache, worker.address, PAGES)
            assert [(it.address, it.state) for it in cache.sources()] == [
                (worker.address, "ready"),
                (f"dns://127.0.0.1:{port}", "ready"),
            ]


def test_what_was_found_stays_while_it_answers_or_the_directory_does_not() -> None:
    def fails() -> list[Found]:
        raise socket.gaierror("try again")

    with worker_of(new_tree(PAGES)) as worker, peers_of() as (peers, clock):
        look(peers, worker.address)
        eventually(lambda: states(peers) == ["ready"])
        for _ in range(2):
            clock.ahead_s += GONE_S
            with pytest.raises(OSError, match="try again"):
                peers.look(NAME, fails, FAST, ())
            look(peers)
            assert states(peers) == ["ready"]


def test_who_is_named_no_more_and_answers_no_more_is_forgotten() -> None:
    with peers_of() as (peers, clock):
        with worker_of(new_tree(PAGES)) as worker:
            look(peers, worker.address)
            eventually(lambda: states(peers) == ["ready"])
            tree = peers.now[worker.address]._tree
            assert tree.match(PAGES)
            remote = tree.remote
            known = remote._orders, remote._limits, remote.num_pages, remote.num_dropped
            remote.num_dropped[worker.address] += 1  # As if it had more than is noted.
            assert all(worker.address in it for it in known)
        eventually(lambda: states(peers) != ["ready"])
        look(peers, worker.address)
        clock.ahead_s += 2 * GONE_S
        look(peers)  # From now on it is gone.
        clock.ahead_s += GONE_S / 2
        look(peers)
        assert len(peers.now) == 1
        clock.ahead_s += GONE_S
        look(peers)
        assert not peers.now
        assert not tree.match(PAGES)
        assert not any(known)
        look(peers, worker.address)
        assert len(peers.now) == 1


def test_a_worker_that_was_refused_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Another release may run at its address, once it has; and a minute has one line of it."""
    other = msgspec.structs.replace(FAMILY, tokenizer="old")
    with peers_of() as (peers, clock):

        def later(seconds: float) -> None:
            clock.ahead_s += seconds
            for peer in peers.now.values():
                peer.fetch(MODEL, PAGES[:1], new_staging(1))  # Which wakes it.

        with worker_of(new_tree(family=other)) as old:
            peers.add(old.address, FAST)
            eventually(lambda: states(peers) == ["refused"])
            later(50.0)
            time.sleep(0.2)
            assert old.status().num_refused_peers == 1
            assert sum("is refused" in it for it in caplog.messages) == 1
        with worker_of(new_tree(PAGES), listen=old.address):
            later(10.0)
            eventually(lambda: states(peers) == ["ready"])


def test_all_peers_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be told to end who looks up a name."""
    is_known, looked_up = threading.Event(), []

    def look_up(name: str, *_: object) -> list[object]:
        looked_up.append(name)
        is_known.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(peers_module, "MAX_CLOSE_S", 0.5)
    with peers_of() as (peers, _):
        for number in range(4):
            peers.add(Location(f"tcp://worker-{number}.test:1"), FAST)
        eventually(lambda: len(looked_up) == 4)
        begun_s = time.monotonic()
        peers.close()
        assert time.monotonic() - begun_s < 1.5
        is_known.set()


def test_a_listed_worker_is_no_concern_of_a_directory() -> None:
    with peers_of() as (peers, clock):
        address = Location("tcp://127.0.0.1:9")
        peers.add(address, FAST)
        look(peers, address)
        clock.ahead_s += GONE_S
        look(peers)
        clock.ahead_s += GONE_S
        look(peers)
        assert list(peers.now) == [address]


def test_a_worker_that_is_listed_after_a_directory_that_names_it_stays() -> None:
    """One peer, to read and to store, also once both the worker and its name are gone."""
    clock = Clock()
    with worker_of(new_tree(PAGES)) as worker:
        at, url = worker.address, worker.address.replace("tcp:", "dns:")
        # Adding those takes longer than the answer of a resolver.
        others = [f"tcp://127.0.0.1:{port}" for port in (9, 10, 11)]
        config = CacheConfig(
            host_bytes=1 << 20, peer=FAST, serves=False, peers=(url, *others, at), stores=(at,)
        )
        with Cache(FAMILY, config, clock=clock) as cache:
            peers = cache._peers
            assert peers._rounds[0].has_gone_well.wait(20)
            assert [it.name for it in threading.enumerate()].count(f"cachetree-peer {at}") == 1
            peer = peers.now[at]
            worker.close()
            eventually(lambda: peer.state is not PeerState.READY)
            for _ in range(3):
                peers.look(url, list, FAST, ())
                clock.ahead_s += GONE_S
            assert peers.now[at] is peer
            assert cache.status().stores == (peer.push_status,)
    assert f"cachetree-peer {at}" not in [it.name for it in threading.enumerate()]


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "tcp://0.0.0.0:0"])
def test_the_own_worker_is_nobodys_peer(listen: str) -> None:
    with worker_of(new_tree(), listen=listen, insecure=True) as own, peers_of(own) as (peers, _):
        port = own.address.rpartition(":")[2]
        look(peers, Location(f"tcp://127.0.0.1:{port}"), Location(f"tcp://192.0.2.1:{port}"))
        assert list(peers.now) == [f"tcp://192.0.2.1:{port}"]


@pytest.mark.parametrize("address", ["", "tcp://*:1", "tcp://h:0", "ipc:///tmp/x", "tcp://h:99999"])
def test_what_is_no_address_is_skipped(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with peers_of() as (peers, _):
        look(peers, Location(address), Location("tcp://192.0.2.1:1"))
        assert list(peers.now) == ["tcp://192.0.2.1:1"]
    assert sum("is skipped: a directory is" in it for it in caplog.messages) == 1


def test_a_directory_that_writes_one_worker_in_many_ways_takes_one_of_its_sessions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with worker_of(new_tree(PAGES)) as worker, peers_of() as (peers, _):
        port = worker.address.rpartition(":")[2]
        ways = [f"tcp://u{it}@127.0.0.1:{port}" for it in range(4)]
        ways += [f"tcp://127.0.0.1:0{port}", f"TCP://127.0.0.1:{port}", f"{worker.address}#x"]
        ways += [f"{worker.address}\n", f"tcp://localhost:{port}", f"tcp://0127.0.0.1:{port}"]
        ways += [f"tcp://127.1:{port}", f"tcp://[::ffff:7f00:1%1]:{port}"]
        look(peers, *map(Location, ways), worker.address)
        assert list(peers.now) == [worker.address]
        eventually(lambda: states(peers) == ["ready"])
        assert worker.status().num_peers == 1
    assert sum("is skipped: a directory is" in it for it in caplog.messages) == len(ways)


def test_a_directory_forges_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    address = Location("tcp://192.0.2.1:1\x1b[2J\nERROR forged")
    with peers_of() as (peers, _):
        look(peers, address)
    with peers_of() as (peers, _):
        look(peers, Found(address, "ctpub-1"), allowed=("ctpub-2",))
    assert sum("is skipped" in it for it in caplog.messages) == 2
    assert all(it.isprintable() for it in caplog.messages)


def test_who_is_found_proves_a_key_that_the_settings_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    us, worker_key, stranger = (new_party(tmp_path, it) for it in ("us", "worker", "stranger"))
    config = msgspec.structs.replace(FAST, key_file=us.key_file)
    allowed = (worker_key.pair.public,)
    with (
        worker_of(new_tree(PAGES), **worker_key.serving(us)) as worker,
        worker_of(new_tree(PAGES), **stranger.serving(us)) as other,
        peers_of() as (peers, _),
    ):
        # The second has another key, and says so; the third says that it has the first one's.
        found = [
            Found(worker.address, worker_key.pair.public),
            Found(other.address, stranger.pair.public),
        ]
        peers.look(NAME, lambda: found, config, allowed)
        eventually(lambda: states(peers) == ["ready"])
        assert list(peers.now) == [worker.address]
        assert f"{other.address} has a key that is not in peer_keys" in caplog.text
        found[1] = Found(other.address, worker_key.pair.public)
        peers.look(NAME, lambda: found, config, allowed)
        eventually(lambda: states(peers) == ["ready", "untrusted"])


def test_a_worker_that_shows_another_key_is_met_anew(tmp_path: Path) -> None:
    us, old, new = (new_party(tmp_path, it) for it in ("us", "old", "new"))
    config = msgspec.structs.replace(FAST, key_file=us.key_file)
    allowed = (old.pair.public, new.pair.public)
    with worker_of(new_tree(PAGES), **new.serving(us)) as worker, peers_of() as (peers, _):
        for key in (old, new, new):
            found = [Found(worker.address, key.pair.public)]
            peers.look(NAME, lambda found=found: found, config, allowed)
        eventually(lambda: states(peers) == ["ready"])


def test_no_request_waits_for_a_directory() -> None:
    """Nor does anything else of a cache, while the resolver says nothing at all."""
    silent = threading.Event()
    with worker_of(new_tree(PAGES)) as worker, peers_of() as (peers, _):
        look(peers, worker.address)
        eventually(lambda: states(peers) == ["ready"])
        other = f"{NAME}0"
        asking = threading.Thread(
            target=peers.look, args=(other, lambda: [*[], silent.wait()][:0], FAST, ())
        )
        asking.start()
        try:
            assert states(peers) == ["ready"]
            assert peers.now[worker.address].state == "ready"
            assert peers.wait_ready(Deadline.after(5))
            look(peers, worker.address)
        finally:
            silent.set()
            asking.join()


def test_a_worker_in_redis_is_found_and_read(redis: FakeRedis) -> None:
    with cache_of(worker=WorkerConfig(announce=redis.url)) as worker:
        assert worker.address
        store(worker.tree, PAGES)
        eventually(lambda: redis.keys)
        (key,) = redis.keys
        assert key.startswith(f"cachetree:{FAMILY.digest}:".encode())
        assert msgspec.json.decode(redis.keys[key][0]) == {
            "address": worker.address,
            "public_key": "",
        }
        with cache_of(peers=(redis.url,), serves=False) as cache:
            assert cache.wait_ready(20)
            fetched(cache, worker.address, PAGES)
    assert not redis.keys


def test_redis_names_workers_of_the_family_but_not_the_own_one(redis: FakeRedis) -> None:
    other = msgspec.structs.replace(FAMILY, tokenizer="other")
    told = [(FAMILY, 1, "tcp://h:1"), (FAMILY, 2, "tcp://h:2"), (other, 3, "tcp://h:3")]
    kept = [announced(redis.url, it, epoch, Found(Location(at))) for it, epoch, at in told]
    eventually(lambda: len(redis.keys) == 3)
    leases = RedisLeases(redis.url, FAMILY, own_epoch=1)
    assert leases.look() == [Found(Location("tcp://h:2"))]
    redis.ahead_s = LEASE_S
    assert leases.look() == []
    for it in kept:
        it.close()


NONSENSE = (
    b"\xff",
    b"[]",
    b"{}",
    b'{"address": []}',
    b'{"address": 7}',
    b'{"address": "%s"}' % (257 * b"x"),
    b'{"address": "tcp://h:1", "public_key": "%s"}' % (129 * b"x"),
    b'{"address": "tcp://h:1", "more": "%s"}' % (5000 * b"x"),
    100_000 * b"[",
    7,
)


@pytest.mark.parametrize("value", NONSENSE, ids=lambda it: repr(it)[:40])
def test_nonsense_in_redis_is_skipped(
    redis: FakeRedis, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    leases = RedisLeases(redis.url, FAMILY, own_epoch=1)
    good = msgspec.json.encode({"address": "tcp://h:2", "new": 1})
    for epoch, it in ((2, value), (3, good)):
        redis.keys[f"cachetree:{FAMILY.digest}:{epoch:016x}".encode()] = it, float("inf")
    for _ in range(2):
        assert leases.look() == [Found(Location("tcp://h:2"))]
    (line,) = caplog.messages
    assert "is skipped" in line
    assert len(line) < 400


def test_a_redis_that_does_not_answer_is_told_of(
    redis: FakeRedis, caplog: pytest.LogCaptureFixture
) -> None:
    redis.is_broken = True
    url = redis.url.replace("//", "//me:secret@")
    with cache_of(peers=(url,), serves=False) as cache:
        eventually(lambda: cache.sources()[0].reason)
        (source,) = cache.sources()
        assert (source.address, source.state) == (redis.url, "connecting")
        assert "not now" in source.reason
        assert not cache.wait_ready(0)
    (line,) = [it for it in caplog.messages if it.startswith("directory")]
    assert line.startswith(f"directory {redis.url} does not answer: ")
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peers": ("dns://x",)}, "peers names no directory at x; write dns://NAME:PORT"),
        ({"peers": ("dns://x:7/y",)}, "no directory"),
        ({"peers": ("redis://x:7/y",)}, "no directory"),
        ({"peers": ("redis://x:7/0?a=b",)}, "no directory"),
        ({"peers": ("redis://me:secret@x:99999",)}, "no directory"),
        ({"peers": ("redis://:secret#y@x:7",)}, "no directory; .* a password as %23"),
        ({"peers": ("redis://:secret/y@x:7",)}, "no directory"),
        ({"peers": ("Redis://:secret@x:7",)}, "is 'Redis://x:7', which is not an address"),
        ({"peers": ("redis:/:secret@x:7",)}, "is 'redis:/x:7', which is not an address"),
        ({"peers": ("reids://:secret#y@x:7",)}, "is 'reids://x:7', which is not an address"),
        ({"stores": ("Redis://:secret@x:7",)}, "stores has Redis://x:7, which is not in peers"),
        ({"worker": WorkerConfig(announce="redis://:secret#y@x:7")}, "announce names no directory"),
        ({"peers": 2 * ("redis://:secret@x:7",)}, "peers has redis://x:7 twice"),
        (
            {"peers": ("redis://x:7",), "peer_keys": {"redis://:secret@x:7": "k"}},
            "peer_keys has redis://x:7, which is not in peers",
        ),
        (
            {"peers": ("redis://:secret@x:7",), "stores": ("redis://:secret@x:7",)},
            "stores has redis://x:7, which names no single worker",
        ),
        ({"worker": WorkerConfig(announce="dns://x:7")}, "cannot be written"),
        ({"worker": WorkerConfig(announce="x")}, "announce names no directory"),
        (
            {
                "worker": WorkerConfig(
                    announce="redis://x:7", listen="tcp://0.0.0.0:0", insecure=True
                )
            },
            "nobody finds this server",
        ),
        ({"peers": ("dns://x:7",), "stores": ("dns://x:7",)}, "names no single worker"),
    ],
)
def test_what_cannot_be_a_directory_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught, cache_of(**settings):
        pass
    assert "secret" not in str(caught.value)


def test_dns_has_one_key_for_all(tmp_path: Path) -> None:
    us = new_party(tmp_path, "us")
    new_party(tmp_path, "worker")
    config = {
        "peers": (NAME,),
        "peer": PeerConfig(key_file=us.key_file),
        "peer_keys": {NAME: str(tmp_path)},
        "serves": False,
    }
    with pytest.raises(ConfigError, match="names 2 keys, and DNS does not say"), cache_of(**config):
        pass


def test_without_the_package_a_server_with_redis_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match="package redis is not installed"):
        cache_of(peers=("redis://127.0.0.1:1",), serves=False).__enter__()
    with pytest.raises(ConfigError, match="package redis is not installed"):
        cache_of(worker=WorkerConfig(announce="redis://127.0.0.1:1")).__enter__()
