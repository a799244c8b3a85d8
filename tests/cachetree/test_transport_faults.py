"""What a worker or a peer may do wrong, and what it costs: one fetch, never a thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from transport_parts import (
    FAST,
    MODEL,
    ONCE,
    PAGE_BYTES,
    STEPS,
    Nowhere,
    RecordingStaging,
    ScriptedWorker,
    check_content,
    data_connection,
    eventually,
    new_staging,
    new_tree,
    pages_of,
    peer_of,
    wait_all,
    worker_of,
    worker_process,
)

from cachetree import (
    Deadline,
    DeadlineExceeded,
    FetchError,
    Location,
    Peer,
    PeerState,
    ProtocolError,
    Step,
)
from cachetree.transport import frames, wire
from cachetree.transport.channel import MAX_MESSAGE_BYTES, Channel
from cachetree.transport.frames import Frame

PAGES = pages_of(16)
SIZE = 16 * PAGE_BYTES
GOOD = bytes(SIZE)

Script = Callable[[ScriptedWorker, bytes, wire.Fetch], None]


def frame(fetch: wire.Fetch, payload: bytes = GOOD, **changed: int) -> Frame:
    sound = Frame(id=fetch.id, step=0, offset=0, size=len(payload), checksum=wire.checksum(payload))
    return msgspec.structs.replace(sound, **changed)


def flipped_bit(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch), b"\1" + GOOD[1:])


def wrong_offset(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, offset=1), GOOD)


def wrong_step(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, step=99), GOOD)


def beyond_the_step(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, GOOD + b"x"), GOOD + b"x")


def twice(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    for _ in range(2):
        worker.send(identity, frame(fetch), GOOD)


def no_payload(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, b""))


def too_large(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, size=FAST.frame_bytes + 1), GOOD)


def damaged_header(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send_raw(identity, frames.pack(frame(fetch))[:-1] + b"\0" + GOOD)


def large_message(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    message = bytes(MAX_MESSAGE_BYTES + 1)
    worker.send(identity, frame(fetch, message, id=frames.MESSAGE), message)


def strange_message(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    message = wire.encode(wire.Synced(seq=0))
    worker.send(identity, frame(fetch, message, id=frames.MESSAGE), message)


def two_frames(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, wire.Pong(epoch=7), GOOD)


def unknown_tag(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, wire.seal(msgspec.msgpack.encode({"type": "teleport"})))


def unasked_fetch(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, id=fetch.id + 1), GOOD)


def impossible_entries(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    entry = wire.Entry(added=True, model="m", parent=b"", pages=bytes(16), e_layers=(99,))
    worker.send(identity, wire.Entries(seq=1, entries=(entry,)))


@pytest.mark.parametrize("script", [flipped_bit, wrong_offset, wrong_step, beyond_the_step, twice])
def test_wrong_content_costs_that_fetch_only(script: Script) -> None:
    with ScriptedWorker(script) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        staging = new_staging(16)
        peer.fetch(MODEL, PAGES, staging)
        with pytest.raises(ProtocolError):
            wait_all(staging)
        assert peer.status.num_protocol_errors == 1
        assert peer.status.num_losses == 0
        assert peer.state is PeerState.READY
        eventually(lambda: wire.Cancel(id=1) in worker.received)


@pytest.mark.parametrize(
    "script",
    [
        no_payload,
        too_large,
        damaged_header,
        large_message,
        strange_message,
        two_frames,
        unknown_tag,
        unasked_fetch,
        impossible_entries,
    ],
)
def test_a_broken_protocol_ends_the_connection_and_another_is_made(script: Script) -> None:
    with ScriptedWorker(script) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        staging = new_staging(16)
        peer.fetch(MODEL, PAGES, staging)
        with pytest.raises(ProtocolError):
            wait_all(staging)
        assert peer.status.num_protocol_errors == 1
        assert peer.status.num_losses == 1
        assert peer.wait_ready(5)


def test_a_payload_cut_short_costs_its_fetch_and_what_follows_the_connection() -> None:
    """Its frame is filled with what comes next, and then no header can be read."""

    def short(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        worker.send(identity, frame(fetch), GOOD[:-1])
        worker.send(identity, frame(fetch, offset=SIZE), GOOD)

    with ScriptedWorker(short) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        staging = new_staging(16)
        peer.fetch(MODEL, PAGES, staging)
        with pytest.raises(ProtocolError):
            wait_all(staging)
        eventually(lambda: peer.status.num_losses == 1)
        assert peer.status.num_landed_bytes == 0
        assert peer.wait_ready(5)


def test_a_message_above_the_limit_is_dropped_by_the_socket() -> None:
    def oversize(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        worker.send(identity, bytes(wire.MAX_HEADER_BYTES + 1))

    config = msgspec.structs.replace(FAST, frame_bytes=4 << 20, window_bytes=8 << 20)
    with ScriptedWorker(oversize) as worker, peer_of(worker.address, new_tree(), config) as peer:
        staging = new_staging(16, seconds=5)
        peer.fetch(MODEL, PAGES, staging)
        with pytest.raises(FetchError, match="closed the connection"):
            wait_all(staging)


def test_a_gap_in_the_adverts_begins_a_new_snapshot() -> None:
    def gap(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        entry = wire.Entry(added=True, model="m", parent=b"", pages=PAGES[0], e_layers=())
        worker.send(identity, wire.Entries(seq=1, entries=(entry,)))
        worker.send(identity, wire.Entries(seq=3, entries=()))

    tree = new_tree()
    with ScriptedWorker(gap) as worker, peer_of(worker.address, tree) as peer:
        peer.fetch(MODEL, PAGES, new_staging(16))
        eventually(lambda: peer.status.num_resyncs == 2)
        assert worker.received.count(wire.Subscribe()) == 2
        assert not tree.match(PAGES)
        assert peer.status.num_losses == 0


def test_a_silent_worker_is_lost() -> None:
    def silent(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        worker.answers_pings = False

    with ScriptedWorker(silent) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        staging = new_staging(16)
        begun_at_s = time.monotonic()
        peer.fetch(MODEL, PAGES, staging)
        with pytest.raises(FetchError, match="silent"):
            wait_all(staging)
        assert time.monotonic() - begun_at_s < 1.5


def test_another_epoch_is_a_restart() -> None:
    def reborn(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        worker.send(identity, wire.Pong(epoch=8))

    with ScriptedWorker(reborn) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        staging = new_staging(16)
        peer.fetch(MODEL, PAGES, staging)
        with pytest.raises(FetchError, match="restarted"):
            wait_all(staging)
        assert peer.status.num_losses == 1


def test_a_killed_worker_comes_back_and_its_fetches_go_on_where_they_stopped() -> None:
    """One with less time ends at its deadline; what is asked for meanwhile fails at once."""
    pages = pages_of(256)
    tree = new_tree()
    with (
        worker_process(256, 1e6) as (process, address),
        peer_of(address, tree, msgspec.structs.replace(FAST, resume_s=5.0)) as peer,
    ):
        assert tree.match(pages)
        stagings = [new_staging(256, seconds=30) for _ in range(2)]
        for staging in stagings:
            peer.fetch(MODEL, pages, staging)
        eventually(lambda: all(staging.writes for staging in stagings))
        epoch = peer.epoch
        hurried = new_staging(256, seconds=0.3)
        peer.fetch(MODEL, pages, hurried)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(DeadlineExceeded):
            wait_all(hurried)
        assert not tree.match(pages)
        assert peer.state is PeerState.CONNECTING
        num_landed = [staging.num_landed_bytes for staging in stagings]
        assert all(0 < num < 4 * 256 * PAGE_BYTES for num in num_landed)

        late = new_staging(256)
        peer.fetch(MODEL, pages, late)
        with pytest.raises(FetchError, match="connecting"):
            wait_all(late)

        process.wait()
        with worker_process(256, 1e9, listen=address):
            for staging in stagings:
                wait_all(staging)
                check_content(staging, pages)
            assert peer.epoch != epoch
            assert peer.status.probe_in_s is None, "one kill is no storm of errors"
            assert peer.status.num_retries == 2
            assert tree.match(pages)[0].num_pages == 256


def test_a_stopped_worker_is_lost_and_found() -> None:
    """SIGSTOP keeps the connection open: only the heartbeat can tell."""
    pages = pages_of(64)
    tree = new_tree()
    with worker_process(64, 1e9) as (process, address), peer_of(address, tree) as peer:
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: peer.state is PeerState.CONNECTING)
        assert not tree.match(pages)
        process.send_signal(signal.SIGCONT)
        eventually(lambda: peer.state is PeerState.READY)
        assert tree.match(pages)


@pytest.fixture
def raw() -> Iterator[Callable[[Location], zmq.Socket[bytes]]]:
    """Plain DEALER sockets, for peers that misbehave."""
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def connect(address: Location) -> zmq.Socket[bytes]:
        sockets.append(context.socket(zmq.DEALER))
        sockets[-1].connect(address)
        return sockets[-1]

    yield connect
    context.destroy(linger=0)


def ask(socket: zmq.Socket[bytes], message: wire.ToWorker | bytes) -> wire.ToPeer:
    socket.send(message if isinstance(message, bytes) else wire.encode(message))
    assert socket.poll(5000), f"no answer to {message!r}"
    return wire.decode_to_peer(memoryview(socket.recv()))


def greet(socket: zmq.Socket[bytes]) -> Channel:
    """The data connection; keep it as long as the session is to last."""
    return data_connection(ask(socket, wire.hello(new_tree().family, "", 0)))


def a_fetch(**changed: object) -> wire.Fetch:
    sound = wire.Fetch(
        id=1,
        model=MODEL,
        pages=wire.join_pages(PAGES),
        steps=tuple((step.kind.value, step.layer) for step in STEPS),
        frame_bytes=1 << 20,
        window_bytes=4 << 20,
        timeout_ms=5000,
    )
    return msgspec.structs.replace(sound, **changed)


def test_a_worker_survives_noise_and_keeps_serving(
    raw: Callable[[Location], zmq.Socket[bytes]],
) -> None:
    with worker_of(new_tree(PAGES)) as worker, peer_of(worker.address, new_tree()) as peer:
        stranger = raw(worker.address)
        for noise in (b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "teleport"})):
            assert isinstance(ask(stranger, wire.seal(noise)), wire.Bye)
        assert isinstance(ask(stranger, b"noise without a checksum"), wire.Bye)
        stranger.send_multipart([wire.encode(wire.Ping()), b"more"])
        assert stranger.poll(5000)
        assert "more than one frame" in stranger.recv().decode(errors="replace")
        assert isinstance(ask(stranger, wire.Ping()), wire.Bye), "no session, no service"
        oversize = raw(worker.address)
        oversize.send(bytes(wire.MAX_HEADER_BYTES + 1))
        assert not oversize.poll(200), "it was read, although the socket should have dropped it"
        assert worker.status().num_protocol_errors == 6
        staging = new_staging(16)
        peer.fetch(MODEL, PAGES, staging)
        wait_all(staging)
        check_content(staging, PAGES)
        assert peer.status.num_losses == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"pages": b"short"},
        {"pages": b""},
        {"steps": ()},
        {"steps": (("kv", 99),)},
        {"steps": (("kv", 1), ("kv", 1))},
        {"frame_bytes": 1},
        {"window_bytes": -1},
        {"first_step": 4},
        {"first_step": -1},
        {"first_offset": SIZE},
        {"first_offset": -1},
        {"id": 0},
    ],
)
def test_a_fetch_that_makes_no_sense_is_answered(
    changed: dict[str, object], raw: Callable[[Location], zmq.Socket[bytes]]
) -> None:
    source = new_tree(PAGES)
    with worker_of(source) as worker:
        socket = raw(worker.address)
        _channel = greet(socket)
        answer = ask(socket, a_fetch(**changed))
        assert isinstance(answer, wire.FetchFailed)
        assert answer.error == "protocol"
        source.clear()
        assert source.num_pages == 0, "the refused fetch kept its lease"


def test_credit_for_what_was_not_sent_ends_the_stream(
    raw: Callable[[Location], zmq.Socket[bytes]],
) -> None:
    with worker_of(new_tree(PAGES), max_bytes_per_s=1e5) as worker:
        socket = raw(worker.address)
        _channel = greet(socket)
        socket.send(wire.encode(a_fetch()))
        socket.send(wire.encode(wire.Credit(id=1, num_bytes=1 << 30)))
        eventually(lambda: worker.status().num_protocol_errors == 1)
        eventually(lambda: worker.status().num_streams == 0)


def test_a_fetch_that_comes_twice_holds_nothing(
    raw: Callable[[Location], zmq.Socket[bytes]],
) -> None:
    source = new_tree(PAGES)
    with worker_of(source, max_bytes_per_s=1e5) as worker:
        socket = raw(worker.address)
        _channel = greet(socket)
        for _ in range(2):
            socket.send(wire.encode(a_fetch(timeout_ms=60_000)))
        eventually(lambda: worker.status().num_protocol_errors == 1)
        eventually(lambda: worker.status().num_streams == 0)


def test_a_credit_that_is_late_or_comes_twice_does_no_harm(
    raw: Callable[[Location], zmq.Socket[bytes]],
) -> None:
    with worker_of(new_tree(PAGES), frame_bytes=4096, window_bytes=8192) as worker:
        socket = raw(worker.address)
        _channel = greet(socket)
        socket.send(wire.encode(a_fetch()))
        eventually(lambda: worker.in_flight_bytes() == [8192])
        for num_bytes in (4096, 4096, 1, 8192, 4096):
            socket.send(wire.encode(wire.Credit(id=1, num_bytes=num_bytes)))
        eventually(lambda: worker.status().num_sent_bytes == 2 * 8192)
        assert isinstance(ask(socket, wire.Ping(last_id=1)), wire.Pong)
        assert worker.in_flight_bytes() == [8192]
        assert worker.status().num_protocol_errors == 0


def test_a_worker_keeps_the_deadline_by_itself(
    raw: Callable[[Location], zmq.Socket[bytes]],
) -> None:
    """This peer neither cancels nor credits."""
    with worker_of(new_tree(PAGES), frame_bytes=4096, window_bytes=8192) as worker:
        socket = raw(worker.address)
        channel = greet(socket)
        socket.send(wire.encode(a_fetch(timeout_ms=100)))
        assert socket.poll(5000)
        failure = wire.decode_to_peer(memoryview(socket.recv()))
        assert isinstance(failure, wire.FetchFailed)
        assert failure.error == "deadline"
        came = Nowhere()
        eventually(lambda: list(channel.receive(came)) or len(came.frames) == 2)


def test_a_peer_keeps_the_deadline_although_nobody_waits() -> None:
    def silent(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        pass

    with ScriptedWorker(silent) as worker, peer_of(worker.address, new_tree()) as peer:
        staging = new_staging(16, seconds=0.1)
        peer.fetch(MODEL, PAGES, staging)
        eventually(lambda: isinstance(staging.error, DeadlineExceeded))
        eventually(lambda: wire.Cancel(id=1) in worker.received)


def test_too_many_fetches_and_peers_are_turned_away(
    raw: Callable[[Location], zmq.Socket[bytes]],
) -> None:
    with worker_of(new_tree(PAGES), max_bytes_per_s=1e5, max_streams=1, max_peers=1) as worker:
        with peer_of(worker.address, new_tree()) as peer:
            first, second = new_staging(16), new_staging(16)
            peer.fetch(MODEL, PAGES, first)
            peer.fetch(MODEL, PAGES, second)
            with pytest.raises(FetchError, match="already serves 1 fetches"):
                wait_all(second)
            bye = ask(raw(worker.address), wire.hello(new_tree().family, "", 0))
            assert isinstance(bye, wire.Bye)
            assert "already serves 1 peers" in bye.reason
        eventually(lambda: worker.status().num_peers == 0)


def test_a_receiver_that_vanishes_or_stalls_frees_its_lease(
    raw: Callable[[Location], zmq.Socket[bytes]],
) -> None:
    source = new_tree(PAGES)
    with worker_of(source, frame_bytes=4096, window_bytes=8192, silence_s=1.0) as worker:
        vanishing, stalling = raw(worker.address), raw(worker.address)
        _channels = [greet(socket) for socket in (vanishing, stalling)]
        for socket in (vanishing, stalling):
            socket.send(wire.encode(a_fetch()))
        eventually(lambda: worker.status().num_streams == 2)
        vanishing.close(linger=0)
        eventually(lambda: worker.status().num_streams == 1, 0.8)
        eventually(lambda: worker.status().num_streams == 0)

        def is_free() -> bool:
            source.clear()
            return source.num_pages == 0

        eventually(is_free)


def test_a_worker_that_closes_in_mid_stream_frees_its_leases() -> None:
    source = new_tree(PAGES)
    with worker_of(source, max_bytes_per_s=1e4) as worker:
        peer = Peer(new_tree(), worker.address, ONCE)
        assert peer.wait_ready(5)
        staging = new_staging(16)
        peer.fetch(MODEL, PAGES, staging)
        eventually(lambda: worker.status().num_streams == 1)
        worker.close()
        with pytest.raises(FetchError, match="clos"):
            wait_all(staging)
        peer.close()
    source.clear()
    assert source.num_pages == 0


def credited(worker: ScriptedWorker) -> int:
    return max((it.num_bytes for it in worker.received if isinstance(it, wire.Credit)), default=0)


def test_half_a_window_is_credited_while_the_rest_is_placed() -> None:
    """So that a worker never waits for a receiver that is busy with all it has sent."""
    chunk = bytes(FAST.frame_bytes)

    def a_window(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        for number in range(4):
            offset = number * len(chunk)
            worker.send(identity, frame(fetch, chunk, offset=offset), chunk)

    class BusyStaging(RecordingStaging):
        """Its writer stops at the last frame of the window."""

        go_on = threading.Event()

        def room(self, step: Step, offset: int, size: int) -> memoryview:
            if offset == 3 * len(chunk):
                self.go_on.wait()
            return super().room(step, offset, size)

    with ScriptedWorker(a_window) as worker, peer_of(worker.address, new_tree()) as peer:
        staging = BusyStaging({STEPS[0]: 256 * PAGE_BYTES}, Deadline.after(10))
        peer.fetch(MODEL, pages_of(256), staging)
        eventually(lambda: credited(worker) >= 2 * len(chunk))
        assert not staging.go_on.is_set()
        staging.go_on.set()
        eventually(lambda: credited(worker) == 4 * len(chunk))
        staging.cancel()
