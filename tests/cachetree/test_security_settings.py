"""Keys and addresses in settings, files and commands: which are accepted, and which are refused."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time

import msgspec
import pytest
from transport_parts import (
    FAMILY,
    FAST,
    ask_status,
    fetch_all,
    new_tree,
    pages_of,
    peer_of,
    worker_of,
)

from cachetree import (
    Cache,
    CacheConfig,
    ConfigError,
    FetchError,
    Location,
    Peer,
    PeerConfig,
    Worker,
    WorkerConfig,
)
from cachetree.cli import main
from cachetree.transport import bind_ports, credentials_of

pytestmark = pytest.mark.usefixtures("no_secret_in_the_log")

PAGES = pages_of(256)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"listen": "tcp://0.0.0.0:0"}, ["listen", "key_file", "allowed_peers", "insecure: true"]),
        ({"listen": "tcp://[::]:0"}, ["key_file", "insecure: true"]),
        ({"listen": "tcp://*:0", "allowed_peers": ["ctpub-" + "0" * 64]}, ["set key_file"]),
        ({"listen": "tcp://*:0", "key_file": "us.key"}, ["allowed_peers is empty"]),
        ({"key_file": "us.key"}, ["allowed_peers is empty"]),
        ({"listen": "tcp://*:0", "key_file": "us.key", "allowed_peers": ["none"]}, ["no public"]),
        ({"key_file": "missing", "allowed_peers": ["us.pub"]}, ["missing", "cannot be read"]),
        ({"key_file": "us.pub", "allowed_peers": ["us.pub"]}, ["us.pub", "others can read"]),
        ({"key_file": "us.key", "allowed_peers": ["us.key"]}, ["us.key", "secret key where"]),
    ],
)
def test_a_worker_that_would_be_open_or_closed_to_all_does_not_start(
    us, tmp_path, monkeypatch, config, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError) as caught:
        Worker(new_tree(), msgspec.convert(config, WorkerConfig))
    (line,) = str(caught.value).splitlines()
    for word in words:
        assert word in line


def test_a_wide_address_is_bound_with_keys_or_when_asked_for(us, friend):
    with worker_of(new_tree(PAGES), listen="tcp://0.0.0.0:0", **us.serving(friend)) as worker:
        address = Location(worker.address.replace("0.0.0.0", "127.0.0.1"))
        with peer_of(address, new_tree(), friend.asking(us)) as peer:
            fetch_all(peer, PAGES)
    with worker_of(new_tree(), listen="tcp://0.0.0.0:0", insecure=True):
        pass


def has_ipv6() -> bool:
    with contextlib.suppress(OSError):
        socket.create_server(("::", 0), family=socket.AF_INET6).close()
        return socket.has_dualstack_ipv6()
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_of_a_machine_are_those_of_both_kinds():
    with worker_of(new_tree(PAGES), listen="tcp://[::]:0", insecure=True) as worker:
        for host in ("127.0.0.1", "[::1]"):
            with peer_of(Location(worker.address.replace("[::]", host)), new_tree()) as peer:
                fetch_all(peer, PAGES)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://[::]:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot be bound"):
            bind_ports(WorkerConfig(listen=listen, insecure=True), contextlib.ExitStack())


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_operator_finds_a_worker_by_its_name_as_a_server_does(monkeypatch):
    def look_up(name: str, port: int, *_: object) -> list[tuple[object, ...]]:
        if name != "six.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port))]

    with worker_of(new_tree(), listen="tcp://[::1]:0") as worker:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        assert ask_status(worker.address.replace("[::1]", "six.test"), timeout_s=5)
        for name in ("ho$t", "nowhere.test"):
            with pytest.raises(FetchError, match="cannot be reached: Name or service not known"):
                ask_status(f"tcp://{name}:7788", timeout_s=5)


def test_a_peer_on_another_machine_without_a_key_is_remarked_on(caplog):
    for host, num in (("127.0.0.1", 0), ("192.0.2.1", 1)):
        Peer(new_tree(), Location(f"tcp://{host}:1"), FAST).close()
        assert len([line for line in caplog.messages if "another machine" in line]) == num


def test_a_cache_speaks_to_each_peer_with_its_own_key(us, friend, stranger):
    with (
        worker_of(new_tree(PAGES), **us.serving(friend)) as first,
        worker_of(new_tree(PAGES), **stranger.serving(friend)) as second,
        worker_of(new_tree(PAGES)) as plain,
    ):
        config = CacheConfig(
            serves=False,
            peers=(first.address, second.address, plain.address),
            peer=PeerConfig(key_file=friend.key_file),
            peer_keys={first.address: us.pair.public, second.address: stranger.public_file},
        )
        with Cache(FAMILY, config) as cache:
            assert cache.wait_ready(20), cache.status()
            assert {match.location for match in cache.match(PAGES)} == set(config.peers)
        shown = f"{config} {cache.status()} {msgspec.json.encode(first.status())!r}"
        assert friend.pair.secret.hex() not in shown


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"peer_keys": {"tcp://127.0.0.1:1": "ctpub-" + "0" * 64}}, "not in peers"),
        (
            {
                "peers": ["tcp://127.0.0.1:1"],
                "peer_keys": {"tcp://127.0.0.1:1": "ctpub-" + "0" * 64},
            },
            "set key_file",
        ),
    ],
)
def test_keys_of_peers_are_checked(config, word):
    with pytest.raises(ConfigError, match=word):
        Cache(FAMILY, msgspec.convert(config, CacheConfig))


def test_status_and_ping_prove_themselves(us, friend, stranger, capsys):
    flags = ["--key-file", friend.key_file, "--server-key", us.public_file]
    with worker_of(new_tree(PAGES), **us.serving(friend)) as worker:
        assert main(["status", worker.address, "--json", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["num_pages"] == 256
        assert main(["ping", worker.address, *flags]) == 0
        for wrong, word in (
            ([], "set key_file"),
            (["--key-file", stranger.key_file, "--server-key", us.public_file], "allowed_peers"),
            (["--key-file", friend.key_file, "--server-key", friend.public_file], "another one"),
            (["--key-file", friend.key_file], "together"),
            (["--server-key", us.public_file], "together"),
        ):
            begun_at_s = time.monotonic()
            assert main(["ping", worker.address, "--timeout", "30", *wrong]) == 1
            assert word in capsys.readouterr().err
            assert time.monotonic() - begun_at_s < 5
    with worker_of(new_tree()) as worker:
        assert main(["ping", worker.address, *flags]) == 1
        assert "has another one or none" in capsys.readouterr().err


def test_a_served_cache_is_read_with_a_key(us, friend, tmp_path):
    """The test takes the whole way: keys from files, settings from YAML, and a fetch between two
    caches."""
    settings = {
        "worker": {
            "listen": "tcp://127.0.0.1:0",
            "key_file": us.key_file,
            "allowed_peers": [friend.public_file],
        }
    }
    with Cache(FAMILY, msgspec.convert(settings, CacheConfig)) as sender:
        reading = {
            "serves": False,
            "peers": [sender.address],
            "peer_keys": {sender.address: us.public_file},
            "peer": {"key_file": friend.key_file},
        }
        with Cache(FAMILY, msgspec.convert(reading, CacheConfig)) as receiver:
            assert receiver.wait_ready(20)
        credentials = credentials_of(friend.key_file, us.pair.public)
        status = ask_status(sender.address, timeout_s=5, credentials=credentials)
        assert status == sender.status().worker


def test_a_worker_alone_serves_a_wide_address_with_keys(us, friend, tmp_path, capsys):
    config = tmp_path / "cache.yaml"
    worker = {
        "listen": "tcp://0.0.0.0:0",
        "key_file": us.key_file,
        "allowed_peers": [friend.public_file],
    }
    cache = {"host_bytes": 1 << 20, "worker": worker}
    config.write_text(json.dumps({"family": msgspec.to_builtins(FAMILY), "cache": cache}))
    command = [sys.executable, "-m", "cachetree.cli", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            address = process.stdout.readline().decode().split()[-1].replace("0.0.0.0", "localhost")
            flags = ["--key-file", friend.key_file, "--server-key", us.public_file, "--json"]
            assert main(["status", address, *flags]) == 0
            assert json.loads(capsys.readouterr().out)["host_bytes"] == 1 << 20
            assert main(["status", address]) == 1
            process.terminate()
            said = b"".join(process.communicate(timeout=10))
        finally:
            process.kill()
    assert us.pair.secret.hex().encode() not in said
    cache["worker"] = {"listen": "tcp://0.0.0.0:0"}
    config.write_text(json.dumps({"family": msgspec.to_builtins(FAMILY), "cache": cache}))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert main(["serve", "--config", str(config)]) == 1
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert "set key_file and allowed_peers" in capsys.readouterr().err
