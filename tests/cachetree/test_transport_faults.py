"""Faults of a worker cost a peer one fetch, and never its thread."""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Callable

import msgspec
import pytest
from transport_parts import (
    FAMILY,
    FAST,
    MODEL,
    ONCE,
    PAGE_BYTES,
    SILENCE_S,
    STEPS,
    ScriptedWorker,
    begun,
    check_content,
    eventually,
    new_staging,
    new_tree,
    pages_of,
    peer_of,
    wait_all,
    worker_process,
)

from cachetree import Deadline, DeadlineExceeded, FetchError, PeerState, ProtocolError
from cachetree.memory import Arena, Blocks, staged
from cachetree.transport import frames, wire
from cachetree.transport.frames import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Frame, Unsealed

PAGES = pages_of(16)
SIZE = 16 * PAGE_BYTES
GOOD = bytes(SIZE)

Script = Callable[[ScriptedWorker, bytes, wire.Fetch], None]


def frame(fetch: wire.Fetch, payload: bytes = GOOD, **changed: int) -> Frame:
    sound = Frame(id=fetch.id, offset=0, size=len(payload), checksum=wire.checksum(payload))
    return msgspec.structs.replace(sound, **changed)


def flipped_bit(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch), b"\1" + GOOD[1:])


def wrong_offset(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, offset=1), GOOD)


def far_offset(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, offset=99 * SIZE), GOOD)


def beyond_the_step(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, GOOD + b"x"), GOOD + b"x")


def twice(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    for _ in range(2):
        worker.send(identity, frame(fetch), GOOD)


def no_payload(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, b""))


def too_large(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, size=MAX_FRAME_BYTES + 1), GOOD)


def damaged_header(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send_raw(identity, frames.pack(frame(fetch)) + bytes(8) + GOOD)


def repeated(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send_raw(identity, Unsealed().seal(frames.pack(frame(fetch))) + GOOD)


def large_message(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    message = bytes(MAX_MESSAGE_BYTES + 1)
    worker.send(identity, frame(fetch, message, id=frames.MESSAGE), message)


def strange_message(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    message = wire.encode(wire.hello(FAMILY, "", 7))
    worker.send(identity, frame(fetch, message, id=frames.MESSAGE), message)


def unknown_tag(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, wire.with_checksum(msgspec.msgpack.encode({"type": "teleport"})))


def unasked_fetch(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    worker.send(identity, frame(fetch, id=fetch.id + 1), GOOD)


def impossible_entries(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    entry = wire.Entry(added=True, model="m", parent=b"", pages=bytes(16), part=99)
    worker.send(identity, wire.Entries(entries=(entry,)))


WRONG_CONTENT = flipped_bit, wrong_offset, far_offset, beyond_the_step, twice
BROKEN_PROTOCOL = no_payload, too_large, damaged_header, repeated, large_message, strange_message
BROKEN_PROTOCOL += unknown_tag, unasked_fetch, impossible_entries


@pytest.mark.parametrize("script", [*WRONG_CONTENT, *BROKEN_PROTOCOL])
def test_wrong_content_costs_that_fetch_only_and_a_broken_protocol_the_connection(script):
    with ScriptedWorker(script) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        staging = begun(peer, PAGES)
        with pytest.raises(ProtocolError):
            wait_all(staging)
        assert peer.status.num_protocol_errors == 1
        assert peer.status.num_losses == (script in BROKEN_PROTOCOL)
        if script in WRONG_CONTENT:
            assert peer.state is PeerState.READY
            eventually(lambda: wire.Cancel(id=1) in worker.received)
        assert peer.wait_ready(20), "another connection is made"


@pytest.mark.parametrize("breaker_errors", [1, 9])
def test_error_of_a_fetch_keeps_none_of_its_memory(breaker_errors):
    """The peer remembers an error until the next one. The first error may also end the session."""
    config = msgspec.structs.replace(ONCE, breaker_errors=breaker_errors, cooldown_s=0.1)
    arena = Arena(len(STEPS) * SIZE)
    with ScriptedWorker(flipped_bit) as worker, peer_of(worker.address, new_tree(), config) as peer:
        parts = dict.fromkeys(STEPS, Blocks(16, PAGE_BYTES))
        staging = staged(arena, parts, Deadline.after(10))
        peer.fetch(MODEL, PAGES, staging)
        eventually(lambda: isinstance(staging.error, ProtocolError))
        staging.release()
        eventually(lambda: arena.lent_bytes == 0, 2)
        eventually(lambda: peer.status.num_losses == (breaker_errors == 1))
        eventually(lambda: peer.state is PeerState.READY)


def test_a_payload_cut_short_costs_its_fetch_and_what_follows_the_connection():
    """Later bytes fill the frame that was cut short, so the next header cannot be read."""

    def short(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        worker.send(identity, frame(fetch), GOOD[:-1])
        worker.send(identity, frame(fetch, offset=SIZE), GOOD)

    with ScriptedWorker(short) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        staging = begun(peer, PAGES)
        with pytest.raises(ProtocolError):
            wait_all(staging)
        eventually(lambda: peer.status.num_losses == 1)
        assert peer.status.num_landed_bytes == 0
        assert peer.wait_ready(20)


class RudeWorker(ScriptedWorker):
    """A worker that answers the first hello with another message."""

    def __init__(self, *answer: bytes) -> None:
        self._answer = answer
        super().__init__(lambda *_: None)

    def send(self, identity: bytes, message: wire.ToPeer | Frame | bytes, *payload: bytes) -> None:
        if self._answer and isinstance(message, wire.Hello):
            self.socket.send_multipart([identity, *self._answer])
            self._answer = ()
        else:
            super().send(identity, message, *payload)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ((wire.encode(wire.hello(FAMILY, "", 7)), b"more"), "more than one frame"),
        ((b"nothing that can be read",), "checksum"),
        ((wire.encode(wire.Pong()),), "did not say hello first"),
        ((wire.encode(wire.hello(FAMILY, "", 7)),), "gave no ticket"),
        ((bytes(wire.MAX_MESSAGE_BYTES + 1),), "closed the connection"),
    ],
)
def test_another_answer_than_a_hello_ends_the_attempt(answer, named):
    patient = msgspec.structs.replace(FAST, connect_s=20.0)
    with RudeWorker(*answer) as worker, peer_of(worker.address, new_tree(), patient) as peer:
        assert named in str(peer.error)


def test_a_silent_worker_is_lost():
    def silent(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        worker.answers_pings = False

    config = msgspec.structs.replace(ONCE, silence_s=SILENCE_S)
    with ScriptedWorker(silent) as worker, peer_of(worker.address, new_tree(), config) as peer:
        staging = begun(peer, PAGES, seconds=60)
        with pytest.raises(FetchError, match=f"silent for {SILENCE_S} s"):
            wait_all(staging)


def test_a_killed_worker_comes_back_and_its_fetches_go_on_where_they_stopped():
    """A fetch with less time ends at its deadline. A fetch that is requested meanwhile fails at
    once."""
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
        epoch = peer.status.epoch
        hurried = begun(peer, pages, seconds=0.3)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(DeadlineExceeded):
            wait_all(hurried)
        eventually(lambda: peer.state is PeerState.CONNECTING)
        assert not tree.match(pages)
        num_landed = [staging.num_landed_bytes for staging in stagings]
        assert all(0 < num < 4 * 256 * PAGE_BYTES for num in num_landed)

        late = begun(peer, pages)
        with pytest.raises(FetchError, match="connecting"):
            wait_all(late)

        process.wait()
        with worker_process(256, 1e9, listen=address):
            for staging in stagings:
                check_content(staging, pages)
            assert peer.status.epoch != epoch
            assert peer.status.probe_in_s is None, "one kill is no storm of errors"
            assert peer.status.num_retries == 2
            assert tree.match(pages)[0].num_pages == 256


def test_a_stopped_worker_is_lost_and_found():
    """SIGSTOP keeps the connection open, so only the heartbeat shows the loss."""
    pages = pages_of(64)
    tree, config = new_tree(), msgspec.structs.replace(FAST, silence_s=SILENCE_S)
    with worker_process(64, 1e9) as (process, address), peer_of(address, tree, config) as peer:
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: peer.state is PeerState.CONNECTING)
        assert not tree.match(pages)
        process.send_signal(signal.SIGCONT)
        eventually(lambda: peer.state is PeerState.READY)
        assert tree.match(pages)


def test_a_peer_keeps_the_deadline_although_nobody_waits():
    def silent(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        pass

    with ScriptedWorker(silent) as worker, peer_of(worker.address, new_tree()) as peer:
        staging = begun(peer, PAGES, seconds=0.1)
        eventually(lambda: isinstance(staging.error, DeadlineExceeded))
        eventually(lambda: wire.Cancel(id=1) in worker.received)


def test_rest_of_a_cancelled_fetch_counts_as_ahead_of_the_next():
    """The rest counts until its bytes have arrived, or until the worker says that no more will
    come."""
    part, orders = FAST.frame_bytes, queue.SimpleQueue[Frame | wire.Ended | None]()
    pages = pages_of(256)
    sizes = [256 * PAGE_BYTES] * len(STEPS)

    def script(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        """Send the first fetch whole. Of the second fetch, send what the test orders."""
        for offset in range(0, sum(sizes) if fetch.id == 1 else 0, part):
            payload = bytes(part)
            worker.send(identity, frame(fetch, payload, offset=offset), payload)
        while fetch.id == 2 and (order := orders.get()) is not None:
            worker.send(identity, order, *([bytes(part)] if isinstance(order, Frame) else ()))

    quiet = msgspec.structs.replace(FAST, heartbeat_s=10.0)
    with (
        ScriptedWorker(script) as worker,
        peer_of(worker.address, new_tree(), quiet) as peer,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(orders.put, None)  # The script waits for it, whatever happens here.

        def ahead() -> int:
            return peer.link.ahead

        def order_frame(number: int) -> None:
            checksum = wire.checksum(bytes(part))
            orders.put(Frame(id=2, offset=number * part, size=part, checksum=checksum))

        whole, cancelled = new_staging(256, 60.0), new_staging(256, 60.0)
        peer.fetch(MODEL, pages, whole)
        wait_all(whole)
        eventually(lambda: peer.link)
        assert ahead() == 0
        peer.fetch(MODEL, pages, cancelled)
        order_frame(0)
        eventually(lambda: cancelled.num_landed_bytes == part)
        assert ahead() == 0, "a fetch that goes on is no burden, but has its share"

        cancelled.cancel()
        rest = cancelled.num_bytes - part
        assert ahead() == rest
        eventually(lambda: not peer._fetches.is_under_way)
        assert ahead() == rest
        for number in (1, 2, 3):
            order_frame(number)
            eventually(lambda it=number: ahead() == rest - it * part)
        orders.put(wire.Ended(id=2, error="cancelled"))
        eventually(lambda: ahead() == 0)
        orders.put(None)
        eventually(lambda: wire.Cancel(id=2) in worker.received)
        assert peer.state is PeerState.READY


def test_part_of_a_frame_is_measured_if_its_reader_left_before_the_rest():
    """A user may stop two requests in a row. Still, the link must not look slow."""
    quiet = msgspec.structs.replace(FAST, heartbeat_s=10.0)
    now, pages, half = [1000.0], pages_of(1024), bytes(512 * PAGE_BYTES)

    def script(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        """Send half of a frame. If a frame was sent before, send its other half first."""
        worker.send_raw(identity, half if fetch.id > 1 else b"")
        worker.send(identity, frame(fetch, 2 * half), half)

    with (
        ScriptedWorker(script) as worker,
        peer_of(worker.address, new_tree(), quiet, clock=lambda: now[0]) as peer,
    ):
        channel = peer._fetches.connection.channel
        for number in (1, 2):
            came_bytes, staging = channel.received_bytes, new_staging(1024)
            peer.fetch(MODEL, pages, staging)
            eventually(lambda: channel.received_bytes >= came_bytes + number * len(half))  # noqa: B023
            now[0] += 0.1 * number
            staging.cancel()
            eventually(lambda: not peer._fetches.is_under_way)
            assert peer.status.bytes_per_s == pytest.approx(10 * len(half), rel=0.01)
