"""Peers are let in or refused, and get the reason: CURVE over real sockets."""

from __future__ import annotations

import logging
import os
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq
from security_parts import Tap, credentials_for, dealer_to, send_garbage
from transport_parts import (
    FAMILY,
    FAST,
    ScriptedWorker,
    begun,
    eventually,
    fetch_all,
    new_tree,
    pages_of,
    peer_of,
    wait_all,
    worker_of,
)

from cachetree import (
    AuthenticationError,
    FetchError,
    Location,
    Peer,
    PeerConfig,
    PeerState,
    ProtocolError,
    Worker,
)
from cachetree.transport import keys, wire
from cachetree.transport.backoff import LogLimiter
from cachetree.transport.crowd import Connections, source_of
from cachetree.transport.handshake import AccessControl, Refusal

pytestmark = pytest.mark.usefixtures("no_secret_in_the_log")

PAGES = pages_of(256)


def refused(peer: Peer, worker: Worker | None = None) -> str:
    """Return the error of a peer that gets nothing, and that reports this at once."""
    assert not peer.wait_ready(5)
    assert peer.state is PeerState.UNTRUSTED
    assert isinstance(peer.error, AuthenticationError)
    staging = begun(peer, PAGES[:1])
    with pytest.raises(FetchError):
        wait_all(staging)
    if worker is not None:
        eventually(lambda: worker.status().num_failed_handshakes >= 2)  # It is tried again.
        assert worker.status().num_peers == 0
        assert worker.status().num_protocol_errors == 0
    return str(peer.error)


def test_a_known_key_fetches_the_same_bytes(us, friend):
    tree = new_tree()
    with (
        worker_of(new_tree(PAGES), **us.serving(friend)) as worker,
        peer_of(worker.address, tree, friend.asking(us)) as peer,
    ):
        assert tree.match(PAGES)[0].num_pages == 256
        for _ in range(3):
            fetch_all(peer, PAGES)
        assert worker.status().num_failed_handshakes == 0


@pytest.mark.parametrize("frame_bytes", [1 << 20, 4 << 20])
def test_frames_of_the_largest_size_come_through(us, friend, frame_bytes):
    """Encryption makes a message longer, and the limit on its size still lets it pass."""
    pages = pages_of(4096)
    config = PeerConfig(
        server_key=us.pair.public, key_file=friend.key_file, frame_bytes=frame_bytes
    )
    with (
        worker_of(new_tree(pages), **us.serving(friend)) as worker,
        peer_of(worker.address, new_tree(), config) as peer,
    ):
        staging = fetch_all(peer, pages)
        assert max(size for *_, size in staging.writes) == frame_bytes


ELSEWHERE = "127.0.0.2"
"""Host at which a listener in the middle has the worker's ports."""


def data_port(worker: Worker) -> Location:
    return Location(f"tcp://127.0.0.1:{worker._data_port._port}")


def test_nothing_readable_is_on_the_wire(us, friend):
    """A listener in the middle sees no message; without keys it sees all."""
    seen: dict[str, bytes] = {}
    for name, serving, config in (
        ("plain", {}, FAST),
        ("curve", us.serving(friend), friend.asking(us)),
    ):
        with (
            worker_of(new_tree(PAGES), **serving) as worker,
            Tap(worker.address, ELSEWHERE) as tap,
            Tap(data_port(worker), ELSEWHERE) as data_tap,
            peer_of(tap.address, new_tree(), config) as peer,
        ):
            fetch_all(peer, PAGES)
        seen[name] = bytes(tap.seen + data_tap.seen)
    for telling in (b"LlamaForCausalLM", PAGES[3], b"first_byte"):
        assert telling in seen["plain"]
        assert telling not in seen["curve"]


@pytest.mark.parametrize("case", ["unknown key", "no key", "no worker's key", "another key"])
def test_a_peer_that_gets_nothing_is_told_why(us, friend, stranger, caplog, case):
    serving, config, says = {
        "unknown key": (us.serving(friend), stranger.asking(us), [stranger.pair.public]),
        "no key": (us.serving(friend), FAST, ["set key_file"]),
        "no worker's key": ({}, friend.asking(us), ["has another one or none"]),
        "another key": (stranger.serving(friend), friend.asking(us), [us.pair.public]),
    }[case]
    tree = new_tree()
    with (
        worker_of(new_tree(PAGES), **serving) as worker,
        peer_of(worker.address, tree, config, is_ready=False) as peer,
    ):
        error = refused(peer, worker)
        assert all(it in error for it in says) and not tree.match(PAGES)
        assert ("allowed_peers" in error) == (case == "unknown key")
        eventually(lambda: worker.status().num_failed_handshakes > 2)
    if serving == us.serving(friend):
        (line,) = [line for line in caplog.messages if ": not let in:" in line]
        assert says[0] in line or case == "no key"


def test_a_peer_recovers_when_the_worker_comes_back_with_its_key(us, friend, stranger):
    with worker_of(new_tree(PAGES), **us.serving(stranger)) as worker:
        address = worker.address
        peer = Peer(new_tree(), address, friend.asking(us))
        refused(peer)
    with worker_of(new_tree(PAGES), listen=address, **us.serving(friend)):
        eventually(lambda: peer.state is PeerState.READY)
        fetch_all(peer, PAGES)
    peer.close()


def raw_plain(address: Location) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])))


ZMTP_1 = b"\x01\x00"
"""Greeting of a peer of protocol 1.0, which knows no security: an empty identity."""
ZMTP_2 = b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00"
ZMTP_3_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)


@pytest.mark.parametrize("greeting", [ZMTP_1, ZMTP_2, ZMTP_3_NULL, b"GET / HTTP/1.1\r\n\r\n"])
def test_nothing_is_decoded_before_a_peer_has_proved_itself(us, friend, greeting):
    """Garbage from an unknown sender is never decoded. The same bytes from a friend are counted."""
    with worker_of(new_tree(PAGES), **us.serving(friend)) as worker:
        for _ in range(5):
            with raw_plain(worker.address) as raw:
                raw.sendall(greeting + b"\x00\x07garbage" + b"\x07\x00garbage" * 50)
                raw.settimeout(5)
                try:
                    while raw.recv(4096):
                        pass
                except ConnectionError:
                    pass
        assert worker.status().num_protocol_errors == 0
        send_garbage(worker.address, friend.asking(us))
        eventually(lambda: worker.status().num_protocol_errors == 1)


def test_garbage_of_an_unknown_key_is_not_decoded(us, friend, stranger):
    with worker_of(new_tree(PAGES), **us.serving(friend)) as worker:
        send_garbage(worker.address, stranger.asking(us))
        eventually(lambda: worker.status().num_failed_handshakes)
        assert worker.status().num_protocol_errors == 0


def test_a_header_may_be_as_long_as_the_cap_and_no_longer(us, friend):
    with worker_of(new_tree(), **us.serving(friend)) as worker:
        send_garbage(worker.address, friend.asking(us), bytes(wire.MAX_MESSAGE_BYTES + 1))
        assert worker.status().num_protocol_errors == 0, "it was received"
        send_garbage(worker.address, friend.asking(us), bytes(wire.MAX_MESSAGE_BYTES))
        eventually(lambda: worker.status().num_protocol_errors == 1)


def test_a_worker_whose_thread_does_not_answer_lets_nobody_in(us, friend):
    """The socket is bound before the thread runs. No peer gets in between."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    AccessControl(us.pair, frozenset([friend.pair.public])).guard(
        context, router, zmq.Poller(), 1 << 20
    )
    router.bind("tcp://127.0.0.1:0")
    address = Location(router.get_string(zmq.LAST_ENDPOINT))
    try:
        send_garbage(address, friend.asking(us))
        assert not router.poll(100)
    finally:
        context.destroy(linger=0)


def test_two_workers_in_a_process_have_lists_of_their_own(us, friend, stranger):
    with (
        worker_of(new_tree(PAGES), **us.serving(friend)) as first,
        worker_of(new_tree(PAGES), **stranger.serving(us)) as second,
        worker_of(new_tree(PAGES)) as plain,
        peer_of(first.address, new_tree(), friend.asking(us)) as allowed,
        peer_of(second.address, new_tree(), us.asking(stranger)) as other,
        peer_of(plain.address, new_tree()) as clear,
        peer_of(second.address, new_tree(), friend.asking(stranger), is_ready=False) as denied,
    ):
        for peer in (allowed, other, clear):
            fetch_all(peer, PAGES)
        assert friend.pair.public in refused(denied)
        assert second.status().num_failed_handshakes
        assert first.status().num_failed_handshakes == 0


def test_a_crowd_of_unknown_keys_does_not_keep_a_friend_out(us, friend):
    with worker_of(new_tree(PAGES), **us.serving(friend)) as worker:
        context = zmq.Context()
        for _ in range(100):
            dealer = context.socket(zmq.DEALER)
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RECONNECT_IVL, 1)
            public, secret = zmq.curve_keypair()
            dealer.set(zmq.CURVE_SERVERKEY, keys.to_bytes(us.pair.public))
            dealer.set(zmq.CURVE_PUBLICKEY, public)
            dealer.set(zmq.CURVE_SECRETKEY, secret)
            dealer.connect(worker.address)
        try:
            with peer_of(worker.address, new_tree(), friend.asking(us)) as peer:
                fetch_all(peer, PAGES)
            eventually(lambda: worker.status().num_failed_handshakes >= 100)
        finally:
            context.destroy(linger=0)


def silent(worker, num, stack, host="127.0.0.1"):
    """Open connections from `host` that send nothing."""
    at = ("127.0.0.1", int(worker.address.rsplit(":", 1)[1]))
    return [
        stack.enter_context(socket.create_connection(at, source_address=(host, 0)))
        for _ in range(num)
    ]


def num_open(connections: list[socket.socket]) -> int:
    """Return how many connections the other side has not ended. At most it sends a greeting."""

    def is_open(connection: socket.socket) -> bool:
        try:
            return any(iter(lambda: not connection.recv(1 << 10, socket.MSG_DONTWAIT), True))
        except BlockingIOError:
            return True
        except OSError:
            return False

    return sum(map(is_open, connections))


@pytest.mark.parametrize("has_key", [True, False])
def test_silent_strangers_hold_few_connections(us, friend, has_key):
    settings = us.serving(friend) if has_key else {}
    config = friend.asking(us) if has_key else FAST
    with worker_of(new_tree(PAGES), **settings) as worker, ExitStack() as stack:
        first = silent(worker, 1, stack, "127.0.0.3")
        crowd = silent(worker, 400, stack, "127.0.0.2")
        eventually(lambda: num_open(crowd) < 256, 4)  # libzmq itself ends them after 5 s.
        assert num_open(first) == 1, "of another source"
        with peer_of(worker.address, new_tree(), config) as peer:
            fetch_all(peer, PAGES)
        assert num_open(crowd) > 200, "more than the crowd were ended"
        assert 100 < worker.status().num_failed_handshakes < 200
        assert num_open(first) == 1


def test_end_of_a_connection_that_could_speak_hides_no_failed_handshake(us, friend, monkeypatch):
    monkeypatch.setattr("cachetree.transport.handshake._MAX_CONNECTIONS", 4)
    with worker_of(new_tree(), **us.serving(friend)) as worker, ExitStack() as stack:
        for _ in range(8):  # Each ends its handshake and says nothing.
            credentials = credentials_for(friend.asking(us))
            dealer = stack.enter_context(dealer_to(worker.address, credentials))
            assert dealer.poll(20_000, zmq.POLLOUT)
        eventually(lambda: worker.status().num_failed_handshakes == 4)
        silent(worker, 1, stack)[0].close()
        eventually(lambda: worker.status().num_failed_handshakes == 5)


def test_worker_that_closes_ends_silent_connections():
    with ExitStack() as stack:
        with worker_of(new_tree()) as worker:
            (connection,) = silent(worker, 1, stack)
            time.sleep(0.2)  # Its thread learns of the connection.
        eventually(lambda: num_open([connection]) == 0, 2)
        assert worker.address, "nothing depends on when the worker is collected"


def test_peer_holds_few_connections_over_which_it_spoke(us, friend, monkeypatch):
    monkeypatch.setattr("cachetree.transport.handshake._MAX_CONNECTIONS", 4, raising=False)
    hello = wire.encode(wire.hello(FAMILY, "", 0))
    with worker_of(new_tree(), **us.serving(friend)) as worker, ExitStack() as stack:
        dealers = []
        for _ in range(8):
            credentials = credentials_for(friend.asking(us))
            dealers.append(stack.enter_context(dealer_to(worker.address, credentials)))
            dealers[-1].send(hello)
            assert dealers[-1].poll(20_000), "the newest is answered"
        eventually(lambda: sum(bool(it.poll(0, zmq.POLLOUT)) for it in dealers) == 4)


def test_source_is_what_its_owner_cannot_choose():
    assert source_of("192.0.2.1") == source_of("::ffff:192.0.2.1") != source_of("192.0.2.2")
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1") != source_of("2001:db9::1")


def test_worker_raises_a_low_limit_of_descriptors(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with worker_of(new_tree()), caplog.at_level(logging.INFO):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(65_536, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_old_worker_status_without_the_count_is_read():
    status = ask_plain_fields()
    del status["num_failed_handshakes"]
    header = wire.with_checksum(msgspec.msgpack.encode(status))
    assert wire.decode_to_peer(memoryview(header)) is not None


def ask_plain_fields() -> dict[str, object]:
    with worker_of(new_tree()) as worker:
        blob = msgspec.msgpack.encode(worker.status())
    fields: dict[str, object] = msgspec.msgpack.decode(blob)
    return fields


def test_lines_are_few_whoever_comes():
    now_s = [0.0]
    limiter = LogLimiter(lambda: now_s[0])
    assert [limiter.may("a"), limiter.may("a"), limiter.may("b")] == [True, False, True]
    now_s[0] = 59.9
    assert not limiter.may("a")
    now_s[0] = 60.0
    assert limiter.may("a")
    assert sum(limiter.may(f"{i}") for i in range(10_000)) == LogLimiter.MAX_NAMES - 1
    now_s[0] = 200.0
    assert limiter.may("a")


def test_strangers_who_make_up_names_hide_no_other_line(caplog):
    with worker_of(new_tree()) as worker:
        for number in range(LogLimiter.MAX_NAMES):
            worker._note_refusal(Refusal(f"key {number}", f"key {number}"))
            family = msgspec.structs.replace(FAMILY, tokenizer=f"{number}")
            worker._greeting(wire.hello(family, "", epoch=1), "stranger", "192.0.2.1")
        worker._cut_off(ProtocolError("nonsense"), "a peer at 192.0.2.2", "cut off 192.0.2.2")
    assert "not let in: key 0" in caplog.text
    assert "a peer at 192.0.2.2 was cut off: nonsense" in caplog.text


def test_the_scripted_worker_is_no_worker_with_keys(us, friend):
    """A plain ROUTER that speaks the protocol gets no message, not even a hello."""
    with (
        ScriptedWorker(lambda *_: None) as impostor,
        peer_of(impostor.address, new_tree(), friend.asking(us), is_ready=False) as peer,
    ):
        assert "has another one or none" in refused(peer)
        assert impostor.received == []


def test_a_descriptor_that_is_no_socket_by_now_leaves_none_open():
    """libzmq reuses the number of a connection that ended before its event was read."""
    another, connections = os.eventfd(0), Connections(4)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for port in range(8):
        connections.came(another, port)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    os.close(another)
