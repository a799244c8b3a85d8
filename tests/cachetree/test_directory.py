"""Workers that are found by a name in DNS, with a fake of the resolver."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from kept_parts import cache_of, fetched
from security_parts import Party, new_party
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

from cachetree import Cache, CacheConfig, ConfigError, Deadline, Location, PeerConfig
from cachetree.transport import Peers, Worker
from cachetree.transport import peers as peers_module
from cachetree.transport.address import Address
from cachetree.transport.directory import MAX_FOUND, addresses_of
from cachetree.transport.peers import GONE_S
from cachetree.transport.status import PeerState

PAGES = pages_of(4)
NAME = "dns://cachetree:7001"


class Clock:
    """The real clock, and by how much a test has set it forward."""

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


def look(peers: Peers, *addresses: Location) -> None:
    peers.look(NAME, lambda: addresses, FAST)


def states(peers: Peers) -> list[str]:
    return [it.state for it in peers.sources()]


def test_every_address_of_a_name_is_a_worker():
    def resolve(host: str, port: int, type: int) -> list[tuple[object, ...]]:
        assert (host, port, type) == ("cachetree", 7001, socket.SOCK_STREAM)
        hosts = ("10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2")
        return [(0, type, 6, "", (it, port)) for it in hosts]

    assert addresses_of(Address("cachetree", 7001), resolve) == [
        Location("tcp://10.0.0.1:7001"),
        Location("tcp://10.0.0.2:7001"),
        Location("tcp://[fd00::1]:7001"),
    ]


def test_a_name_with_too_many_addresses_gives_some():
    answers = [(0, 0, 0, "", (f"10.0.{it >> 8}.{it & 255}", 1)) for it in range(2 * MAX_FOUND)]
    assert len(addresses_of(Address("x", 1), lambda *_, **__: answers)) == MAX_FOUND


def test_a_worker_that_is_found_is_read():
    """The resolver of this machine finds the worker."""
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


def test_found_peer_stays_while_it_answers_or_the_directory_is_silent():
    def fails() -> list[Location]:
        raise socket.gaierror("try again")

    with worker_of(new_tree(PAGES)) as worker, peers_of() as (peers, clock):
        look(peers, worker.address)
        eventually(lambda: states(peers) == ["ready"])
        for _ in range(2):
            clock.ahead_s += GONE_S
            with pytest.raises(OSError, match="try again"):
                peers.look(NAME, fails, FAST)
            look(peers)
            assert states(peers) == ["ready"]


def test_peer_no_longer_named_and_silent_is_forgotten():
    with peers_of() as (peers, clock):
        with worker_of(new_tree(PAGES)) as worker:
            look(peers, worker.address)
            eventually(lambda: states(peers) == ["ready"])
            tree = peers.now[worker.address]._tree
            assert tree.match(PAGES)
            remote = tree.remote
            known = remote._orders, remote._max_pages, remote.num_pages, remote.num_dropped
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


def test_a_worker_that_was_refused_is_tried_again(caplog):
    """Another release may run at the worker's address by then. The log has one line about the
    refusal per minute."""
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


def test_all_peers_are_waited_for_at_once(monkeypatch):
    """The lookup of a name cannot be stopped."""
    is_known, looked_up = threading.Event(), []

    def look_up(name: str, *_: object) -> list[object]:
        looked_up.append(name)
        is_known.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(peers_module, "CLOSE_S", 0.5)
    with peers_of() as (peers, _):
        for number in range(4):
            peers.add(Location(f"tcp://worker-{number}.test:1"), FAST)
        eventually(lambda: len(looked_up) == 4)
        begun_s = time.monotonic()
        peers.close()
        assert time.monotonic() - begun_s < 1.5
        is_known.set()


def test_a_listed_worker_is_no_concern_of_a_directory():
    with peers_of() as (peers, clock):
        address = Location("tcp://127.0.0.1:9")
        peers.add(address, FAST)
        look(peers, address)
        clock.ahead_s += GONE_S
        look(peers)
        clock.ahead_s += GONE_S
        look(peers)
        assert list(peers.now) == [address]


def test_a_worker_that_is_listed_after_a_directory_that_names_it_stays():
    """The list and the directory mean one peer. The peer stays after the worker and its name are
    gone."""
    clock = Clock()
    with worker_of(new_tree(PAGES)) as worker:
        at, url = worker.address, worker.address.replace("tcp:", "dns:")
        # Adding those takes longer than the answer of a resolver.
        others = [f"tcp://127.0.0.1:{port}" for port in (9, 10, 11)]
        config = CacheConfig(host_bytes=1 << 20, peer=FAST, serves=False, peers=(url, *others, at))
        with Cache(FAMILY, config, clock=clock) as cache:
            peers = cache._peers
            assert peers._tasks[0].has_gone_well.wait(20)
            assert [it.name for it in threading.enumerate()].count(f"cachetree-peer {at}") == 1
            peer = peers.now[at]
            worker.close()
            eventually(lambda: peer.state is not PeerState.READY)
            for _ in range(3):
                peers.look(url, list, FAST)
                clock.ahead_s += GONE_S
            assert peers.now[at] is peer
    assert f"cachetree-peer {at}" not in [it.name for it in threading.enumerate()]


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "tcp://0.0.0.0:0"])
def test_the_own_worker_is_nobodys_peer(listen):
    with worker_of(new_tree(), listen=listen, insecure=True) as own, peers_of(own) as (peers, _):
        port = own.address.rpartition(":")[2]
        look(peers, Location(f"tcp://127.0.0.1:{port}"), Location(f"tcp://192.0.2.1:{port}"))
        assert list(peers.now) == [f"tcp://192.0.2.1:{port}"]


@pytest.mark.parametrize("address", ["", "tcp://*:1", "tcp://h:0", "ipc:///tmp/x", "tcp://h:99999"])
def test_invalid_address_of_a_directory_is_skipped(address, caplog):
    with peers_of() as (peers, _):
        look(peers, Location(address), Location("tcp://192.0.2.1:1"))
        assert list(peers.now) == ["tcp://192.0.2.1:1"]
    assert sum("is skipped: an address of a directory is" in it for it in caplog.messages) == 1


def test_a_directory_that_writes_one_worker_in_many_ways_takes_one_of_its_sessions(caplog):
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
    assert sum("is skipped: an address of a directory is" in it for it in caplog.messages) == len(
        ways
    )


def test_a_directory_forges_no_lines(caplog):
    address = Location("tcp://192.0.2.1:1\x1b[2J\nERROR forged")
    with peers_of() as (peers, _):
        look(peers, address)
    with peers_of() as (peers, _):
        look(peers, address)
    assert sum("is skipped" in it for it in caplog.messages) == 2
    assert all(it.isprintable() for it in caplog.messages)


def test_found_peer_must_prove_the_key_in_the_settings(tmp_path):
    us, worker_key, stranger = (new_party(tmp_path, it) for it in ("us", "worker", "stranger"))
    config = keyed(us, worker_key)
    with (
        worker_of(new_tree(PAGES), **worker_key.serving(us)) as worker,
        worker_of(new_tree(PAGES), **stranger.serving(us)) as other,
        peers_of() as (peers, _),
    ):
        peers.look(NAME, lambda: [worker.address, other.address], config)
        eventually(lambda: sorted(states(peers)) == ["ready", "untrusted"])
        assert peers.now[worker.address].state == "ready"


def test_a_worker_that_shows_another_key_is_met_anew(tmp_path):
    us, old, new = (new_party(tmp_path, it) for it in ("us", "old", "new"))
    with worker_of(new_tree(PAGES), **new.serving(us)) as worker, peers_of() as (peers, _):
        for key in (old, new, new):
            peers.look(NAME, lambda: [worker.address], keyed(us, key))
        eventually(lambda: states(peers) == ["ready"])


def keyed(us: Party, worker: Party) -> PeerConfig:
    return msgspec.structs.replace(FAST, key_file=us.key_file, server_key=worker.pair.public)


def test_no_request_waits_for_a_directory():
    """While the resolver does not answer, no other part of a cache waits for it either."""
    silent = threading.Event()
    with worker_of(new_tree(PAGES)) as worker, peers_of() as (peers, _):
        look(peers, worker.address)
        eventually(lambda: states(peers) == ["ready"])
        other = f"{NAME}0"
        asking = threading.Thread(
            target=peers.look, args=(other, lambda: [*[], silent.wait()][:0], FAST)
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


def test_a_name_that_does_not_resolve_is_told_of(monkeypatch, caplog):
    def fails(*_: object, **__: object) -> list[object]:
        raise socket.gaierror("not now")

    monkeypatch.setattr(peers_module, "addresses_of", fails)
    with cache_of(peers=("dns://me:secret@x:7",), serves=False) as cache:
        eventually(lambda: cache.sources()[0].reason)
        (source,) = cache.sources()
        assert (source.address, source.state) == ("dns://x:7", "connecting")
        assert "not now" in source.reason
        assert not cache.wait_ready(0)
    (line,) = [it for it in caplog.messages if it.startswith("directory")]
    assert line.startswith("directory dns://x:7 does not answer: ")
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"peers": ("dns://x",)},
            "peers is 'dns://x', which names no directory; write dns://NAME:PORT",
        ),
        ({"keeps": ("dns://engines",)}, "keeps is 'dns://engines', which names no directory"),
        ({"keeps": ("tcp://engines",)}, "keeps is 'tcp://engines', which is not an address"),
        ({"peers": ("dns://x:7/y",)}, "no directory"),
        ({"peers": ("dns://x:7?a=b",)}, "no directory"),
        ({"peers": ("dns://me:secret@x:99999",)}, "no directory"),
        ({"peers": ("dns://:secret#y@x:7",)}, "no directory"),
        ({"peers": ("redis://:secret@x:7",)}, "is 'redis://x:7', which is not an address"),
        ({"peers": ("Redis://:secret@x:7",)}, "is 'Redis://x:7', which is not an address"),
        ({"peers": ("redis:/:secret@x:7",)}, "is 'redis:/x:7', which is not an address"),
        ({"peers": ("reids://:secret#y@x:7",)}, "is 'reids://x:7', which is not an address"),
        ({"keeps": ("Redis://:secret@x:7",)}, "is 'Redis://x:7', which is not an address"),
        ({"peers": 2 * ("dns://:secret@x:7",)}, "peers has dns://x:7 twice"),
        (
            {"peers": ("dns://x:7",), "peer_keys": {"dns://:secret@x:7": "k"}},
            "peer_keys has dns://x:7, which is not in peers",
        ),
        ({"keeps": 2 * ("dns://:secret@x:7",)}, "keeps has dns://x:7 twice"),
        ({"keeps": ("dns://x:7",), "peers": ("tcp://x:7",)}, "peers and keeps are both set"),
    ],
)
def test_invalid_directory_url_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words) as caught, cache_of(**settings):
        pass
    assert "secret" not in str(caught.value)


def test_dns_has_one_key_for_all(tmp_path):
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
