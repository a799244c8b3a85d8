"""Data connections between servers with keys: which bytes are readable, who is let in, and what
damage costs."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fault_proxy import Fault, FaultProxy, Strike, Towards, Via
from security_parts import Tap, TicketUser, greeted, ticket_of
from transport_parts import (
    E_LAYER,
    FAMILY,
    MODEL,
    SILENCE_S,
    content,
    eventually,
    fetch_all,
    flushed,
    new_keeper,
    new_tree,
    nobody,
    pages_of,
    peer_of,
    store,
    worker_of,
)

from cachetree import (
    ConfigError,
    Deadline,
    Kind,
    Location,
    Part,
    PeerState,
    ProtocolError,
    Step,
    Worker,
    WorkerConfig,
)
from cachetree.ids import KV, steps_of
from cachetree.memory.arena import Arena
from cachetree.memory.copying import checksum
from cachetree.transport import frames, wire
from cachetree.transport.frames import Frame, Seals

PAGES = pages_of(256)
ELSEWHERE = "127.0.0.2"
"""Host at which a proxy has the worker's ports."""
SEED = 11


@pytest.fixture(autouse=True)
def nothing_fails_inside(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    yield
    assert "internal error" not in caplog.text


@contextlib.contextmanager
def behind_proxies(tree, us, friend, **settings):
    """Return an address that leads to a worker through a proxy, and the proxy."""
    with worker_of(tree, **us.serving(friend, **settings)) as worker:
        port = ticket_of(worker.address, friend.asking(us)).port
        with FaultProxy(worker.address, seed=SEED, sealed_port=port) as proxy:
            yield proxy.address, proxy


def test_nothing_is_readable_on_the_wire(us, friend):
    with worker_of(new_tree(PAGES), **us.serving(friend)) as worker:
        port = ticket_of(worker.address, friend.asking(us)).port
        with (
            Tap(worker.address, ELSEWHERE) as control,
            Tap(Location(f"tcp://127.0.0.1:{port}"), ELSEWHERE) as tap,
        ):
            with peer_of(control.address, new_tree(), friend.asking(us)) as peer:
                fetch_all(peer, PAGES)
            seen = bytes(tap.seen)
    assert len(seen) > 256 * 1024
    for telling in (b"LlamaForCausalLM", PAGES[3], content(PAGES[3], Step(Kind.KV, 0))[:64]):
        assert telling not in seen + bytes(control.seen)


def test_entries_are_copied_and_read_from_the_copy(us, friend):
    copies = new_tree()
    with (
        worker_of(new_tree(PAGES), **us.serving(friend)) as engine,
        worker_of(copies, **us.serving(friend)) as worker,
    ):
        with peer_of(engine.address, copies, friend.asking(us), keeper=new_keeper(copies)):
            eventually(lambda: copies.has(MODEL, PAGES[-1], Part(E_LAYER)))
        with peer_of(worker.address, new_tree(), friend.asking(us)) as peer:
            fetch_all(peer, PAGES)
        assert engine.status().num_protocol_errors == 0


def test_a_peer_on_the_same_host_still_copies_from_memory(us, friend):
    tree = new_tree(PAGES, memory=Arena(256 << 20))
    with (
        worker_of(tree, **us.serving(friend)) as worker,
        peer_of(worker.address, new_tree(), friend.asking(us)) as peer,
    ):
        assert peer.status.shares_memory
        fetch_all(peer, PAGES)


FAULTS = [
    Fault.FLIP_BODY,
    Fault.DROP,
    Fault.DUPLICATE,
    Fault.REORDER,
    Fault.TRUNCATE,
    Fault.RESET,
    Fault.STALL,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fetch_that_is_struck_brings_the_right_bytes(us, friend, fault):
    """The reader asks again for the missing bytes."""
    with behind_proxies(new_tree(PAGES), us, friend) as (address, proxy):
        for index in (3, 40):
            patience = {"silence_s": SILENCE_S} if fault is Fault.STALL else {}
            with peer_of(address, new_tree(), friend.asking(us, **patience)) as peer:
                proxy.arm(Strike(fault, Towards.PEER, index, Via.SEALED))
                fetch_all(peer, PAGES)
                eventually(lambda: proxy.has_struck)
                eventually(lambda peer=peer: peer.state is PeerState.READY)
                if fault is Fault.FLIP_BODY:
                    assert peer.status.num_protocol_errors == peer.status.num_retries == 1


@pytest.mark.parametrize("index", [2, 4, 30])
@pytest.mark.parametrize("fault", [Fault.FLIP_BODY, Fault.DROP, Fault.RESET])
def test_a_copy_that_is_struck_is_made_again(us, friend, index, fault):
    copies, source = new_tree(), new_tree()
    with behind_proxies(source, us, friend) as (address, proxy):
        keeper = new_keeper(copies)
        with peer_of(address, copies, friend.asking(us), keeper=keeper) as peer:
            proxy.arm(Strike(fault, Towards.PEER, index, Via.SEALED))
            store(source, PAGES)
            eventually(lambda: proxy.has_struck)
            eventually(lambda: copies.num_pages == 256)
            assert peer.status.pulls.error == ""
    lease = copies.lease(MODEL, PAGES, "a test", Deadline.after(5))
    with lease:
        for step in steps_of(KV, FAMILY.num_layers):
            assert b"".join(lease.views(step)) == b"".join(content(page, step) for page in PAGES)


PING = wire.encode(wire.Ping())
FRAME = Frame(id=frames.MESSAGE, offset=0, size=len(PING), checksum=checksum(PING))


def test_a_session_has_one_connection_and_ends_with_the_first_wrong_frame(us, friend):
    with worker_of(new_tree(PAGES), **us.serving(friend)) as worker:
        with greeted(worker.address, friend.asking(us)) as ticket, TicketUser(ticket) as peer:
            assert peer.is_let_in()
            with TicketUser(ticket) as thief:  # Who read the token on the way.
                assert not thief.is_let_in()
            eventually(lambda: worker.status().num_failed_handshakes == 1)
            peer.channel.put_message(PING)
            flushed(peer.channel)
            assert worker.status().num_protocol_errors == 0
            seals = Seals(ticket.key, is_worker=False)  # As it began.
            again = [seals.seal(frames.pack(FRAME)), *seals.seal_payload([memoryview(PING)])]
            peer.channel.send_queue.put_raw(b"".join(again))  # Replayed.
            flushed(peer.channel)
            eventually(lambda: worker.status().num_protocol_errors == 1)
            eventually(lambda: worker.status().num_peers == 0)
            eventually(lambda: list(peer.channel.receive(nobody)) or peer.channel.error)
        with greeted(worker.address, friend.asking(us)) as ticket:
            keyless = msgspec.structs.replace(ticket, key=bytes(32))
            with TicketUser(keyless) as thief:  # Before the peer itself.
                with pytest.raises(ProtocolError, match="changed, lost or repeated"):
                    thief.is_let_in()
                thief.channel.put_message(PING)
                flushed(thief.channel)
                eventually(lambda: worker.status().num_protocol_errors == 2)
        with peer_of(worker.address, new_tree(), friend.asking(us)) as honest:
            fetch_all(honest, PAGES)


def test_a_ticket_is_worth_nothing_after_a_while(us, friend):
    with worker_of(new_tree(PAGES), silence_s=0.3, **us.serving(friend)) as worker:
        ticket = ticket_of(worker.address, friend.asking(us))
        assert worker.status().num_peers == 0
        time.sleep(0.4)
        with TicketUser(ticket) as late:
            assert not late.is_let_in()
        assert worker.status().num_failed_handshakes == 1


def num_descriptors() -> int:
    gc.collect()  # What earlier tests left is not counted.
    return len(list(Path("/proc/self/fd").iterdir()))


ZMTP_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)


@pytest.mark.long
def test_strangers_at_the_bulk_port_get_nothing_and_hold_nothing(us, friend):
    with worker_of(new_tree(PAGES), **us.serving(friend)) as worker:
        port = ticket_of(worker.address, friend.asking(us)).port
        before = num_descriptors()
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        for index, raw in enumerate(silent):
            raw.sendall((b"", ZMTP_NULL, bytes(1 << 16), b"GET / HTTP/1.1\r\n\r\n")[index % 4])
        ticket = ticket_of(worker.address, friend.asking(us))
        for index in range(20):
            with TicketUser(msgspec.structs.replace(ticket, token=bytes([index]) * 32)) as stranger:
                assert not stranger.is_let_in()
        eventually(lambda: worker.status().num_failed_handshakes >= 20)
        with peer_of(worker.address, new_tree(), friend.asking(us)) as peer:
            fetch_all(peer, PAGES)
        assert worker.status().num_protocol_errors == 0
        got = []
        for raw in silent:  # Each is closed by the worker, at the latest when its time is over.
            raw.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while part := raw.recv(4096):
                    got.append(part)
            raw.close()
        assert not got
        eventually(lambda: num_descriptors() <= before + 2)


def test_a_peer_that_cannot_reach_the_bulk_port_is_told_which(us, friend):
    with (
        worker_of(new_tree(PAGES), **us.serving(friend)) as worker,
        Tap(worker.address, ELSEWHERE) as control,
        peer_of(control.address, new_tree(), friend.asking(us), is_ready=False) as peer,
    ):
        eventually(lambda: peer.error is not None)
        port = ticket_of(worker.address, friend.asking(us)).port
        assert f"bulk_port {port}" in str(peer.error)
        assert not peer.wait_ready(0.1)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (WorkerConfig, {"bulk_port": 70000, "key_file": "k"}, ["bulk_port is 70000", "free one"]),
        (WorkerConfig, {"bulk_port": -1, "key_file": "k"}, ["bulk_port is -1"]),
    ],
)
def test_a_setting_without_effect_is_refused(kind, settings, words):
    more = {"allowed_peers": ("ctpub-" + "0" * 64,)} if "key_file" in settings else {}
    with pytest.raises(ConfigError) as caught:
        kind(**settings, **more)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_a_taken_bulk_port_stops_the_worker(us, friend):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"bulk_port is .*{port}.* cannot be bound"):
            Worker(new_tree(), WorkerConfig(**us.serving(friend, bulk_port=port)))  # type: ignore[arg-type]
    with (
        worker_of(new_tree(PAGES), **us.serving(friend, bulk_port=port)) as worker,
        peer_of(worker.address, new_tree(), friend.asking(us)) as peer,
    ):
        assert ticket_of(worker.address, friend.asking(us)).port == port
        begun_at_s = time.monotonic()
        fetch_all(peer, PAGES)
        assert time.monotonic() - begun_at_s < 5
