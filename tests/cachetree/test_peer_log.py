"""A reader's log lines about peers that are not ready: every cause has a line, and no line comes
too often."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import msgspec
import pytest
from kept_parts import cache_of
from security_parts import new_party
from transport_parts import (
    FAMILY,
    FAST,
    MODEL,
    ScriptedWorker,
    eventually,
    new_staging,
    new_tree,
    pages_of,
    peer_of,
    worker_of,
)

from cachetree import CacheConfig, ConfigError, Location, PeerState, WorkerConfig
from cachetree.transport import wire

HERE = Location("tcp://127.0.0.1:7")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Lines of the logger that a server gives a prefix."""
    caplog.set_level(logging.INFO, "cachetree.peer")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cachetree.peer").addHandler(handler)
    yield lines
    logging.getLogger("cachetree.peer").removeHandler(handler)


def test_a_worker_that_is_not_there_yet_and_leaves(logged):
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        address = Location(f"tcp://127.0.0.1:{place.getsockname()[1]}")
        with peer_of(address, new_tree(), is_ready=False) as peer:
            eventually(lambda: logged)
            assert logged == [
                f"peer {address} is not reached: worker {address} closed the connection or cannot "
                "be reached"
            ]
            place.close()
            with worker_of(new_tree(), listen=address):
                eventually(lambda: len(logged) > 1)
                assert logged[1:] == [f"peer {address} is ready"]
            eventually(lambda: len(logged) > 2)
            assert logged[2].startswith(f"peer {address} is lost: worker {address} ")
            eventually(lambda: peer.status.num_losses == 1)
    assert len(logged) == 3


def test_a_worker_of_another_family(logged, caplog):
    """Both sides log the refusal. The worker logs one line for all connections from one place."""
    other = msgspec.structs.replace(FAMILY, rope="r" * 100_000)
    with (
        worker_of(new_tree(family=other)) as worker,
        peer_of(worker.address, new_tree(), is_ready=False) as peer,
    ):
        eventually(lambda: peer.state is PeerState.REFUSED)
        with peer_of(worker.address, new_tree(), is_ready=False):
            eventually(lambda: worker.status().num_refused_peers == 2)
    for line in logged:
        assert line.startswith(f"peer {worker.address} is refused: ")
        assert "rope" in line and len(line) < 1000
    (line,) = (it for it in caplog.messages if it.startswith(f"worker {worker.address}: refused: "))
    assert "the peer at 127.0.0.1 cannot exchange caches" in line
    assert "rope" in line and len(line) < 1000


def test_text_from_a_worker_is_logged_on_one_line_without_colours(logged):
    rude = "a reason\nWARNING forged\x1b[31m"

    def end(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        worker.send(identity, wire.Ended(id=fetch.id, error="failed", reason=rude))
        worker.send(identity, wire.Bye(reason=rude))

    staging = new_staging(1)
    with ScriptedWorker(end) as worker, peer_of(worker.address, new_tree()) as peer:
        peer.fetch(MODEL, pages_of(1), staging)
        eventually(lambda: logged and staging.error and peer.status.error)
        said = [logged[0], str(staging.error), peer.status.error]
    for line in said:
        assert "a reason WARNING forged" in line and line.isprintable()


def test_a_worker_that_does_not_trust_us(logged, tmp_path):
    us, them, friend = (new_party(tmp_path, name) for name in ("us", "them", "friend"))
    with (
        worker_of(new_tree(), **them.serving(friend)) as worker,
        peer_of(worker.address, new_tree(), us.asking(them), is_ready=False),
    ):
        eventually(lambda: worker.status().num_failed_handshakes >= 3)
    (line,) = logged
    assert line.startswith(f"peer {worker.address} is untrusted: ")
    assert us.pair.public in line


def test_a_worker_that_fails_too_often(logged):
    def leave(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        worker.send(identity, b"what is no message")

    config = msgspec.structs.replace(FAST, breaker_errors=1)
    with ScriptedWorker(leave) as worker, peer_of(worker.address, new_tree(), config) as peer:
        peer.fetch(MODEL, pages_of(1), new_staging(1))
        eventually(lambda: peer.state is PeerState.RESTING)
        source = peer.status.source
        assert source.state == "resting"
        assert "it is tried again in " in source.reason
    assert [line.partition(": ")[0] for line in logged] == [f"peer {worker.address} is resting"]


def test_a_server_that_is_its_own_peer_is_told_before_it_starts():
    for peer in (HERE, "tcp://localhost:7"):
        with pytest.raises(
            ConfigError, match=f"peers has {peer}, where this server itself listens"
        ):
            CacheConfig(worker=WorkerConfig(listen=HERE), peers=(peer,))
    CacheConfig(worker=WorkerConfig(listen=HERE), peers=(HERE,), serves=False)


def test_two_addresses_of_one_worker_are_reported_when_they_shake_hands(logged):
    """The worker has the same identity at each of its addresses."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    worker = WorkerConfig(listen=f"tcp://0.0.0.0:{port}", insecure=True)
    with cache_of(worker=worker, peers=(address,)) as cache:
        eventually(lambda: cache.status().peers[0].state == "refused")
    assert logged == [
        f"peer {address} is refused: worker {address} is this server's own; remove it from peers "
        "or keeps"
    ]
