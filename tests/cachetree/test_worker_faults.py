"""Faults of a peer cost a worker one fetch, and never its thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import pytest
import zmq
from kept_parts import PAGE_TOTAL
from transport_parts import (
    HOST_BYTES,
    MODEL,
    ONCE,
    PAGE_BYTES,
    STEPS,
    RawPeer,
    ask_status,
    begun,
    eventually,
    eventually_free,
    fetch_all,
    new_staging,
    new_tree,
    pages_of,
    peer_of,
    store,
    wait_all,
    worker_of,
)

from cachetree import FetchError, Location, ModelId, OrderDenied, Peer, PeerState, ProtocolError
from cachetree.memory.arena import Arena
from cachetree.transport import ask as ask_worker
from cachetree.transport import verbs, wire
from cachetree.transport.frames import Frame
from cachetree.transport.sender import SendScheduler
from cachetree.tree import join_hashes

PAGES = pages_of(16)
SIZE = 16 * PAGE_BYTES


@pytest.fixture
def raw() -> Iterator[Callable[[Location], zmq.Socket[bytes]]]:
    """Make plain DEALER sockets, for peers that misbehave."""
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
    assert socket.poll(20_000), f"no answer to {message!r}"
    return wire.decode_to_peer(memoryview(socket.recv()))


def a_fetch(**changed: object) -> wire.Fetch:
    sound = wire.Fetch(
        id=1,
        model=MODEL,
        pages=join_hashes(PAGES),
        steps=tuple((step.kind.value, step.layer) for step in STEPS),
        frame_bytes=1 << 20,
        timeout_ms=5000,
    )
    return msgspec.structs.replace(sound, **changed)


def test_a_worker_survives_noise_and_keeps_serving(raw):
    with worker_of(new_tree(PAGES)) as worker, peer_of(worker.address, new_tree()) as peer:
        stranger = raw(worker.address)
        for noise in (b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "teleport"})):
            assert isinstance(ask(stranger, wire.with_checksum(noise)), wire.Bye)
        assert isinstance(ask(stranger, b"noise without a checksum"), wire.Bye)
        stranger.send_multipart([wire.encode(wire.Ping()), b"more"])
        assert stranger.poll(20_000)
        assert "more than one frame" in stranger.recv().decode(errors="replace")
        assert isinstance(ask(stranger, wire.Ping()), wire.Bye), "no session, no service"
        oversize = raw(worker.address)
        oversize.send(bytes(wire.MAX_MESSAGE_BYTES + 1))
        assert not oversize.poll(200), "it was read, although the socket should have dropped it"
        assert worker.status().num_protocol_errors == 6
        fetch_all(peer, PAGES)
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
        {"frame_bytes": 1 << 30},
        {"first_byte": len(STEPS) * SIZE},
        {"first_byte": -1},
        {"id": 0},
    ],
)
def test_a_fetch_that_makes_no_sense_is_answered(changed):
    source = new_tree(PAGES)
    with worker_of(source) as worker, RawPeer(worker.address) as peer:
        answer = peer.ask(a_fetch(**changed))
        assert isinstance(answer, wire.Ended)
        assert answer.error == "protocol"
        source.evict()
        assert source.num_pages == 0, "the refused fetch kept its lease"


def test_cancelling_an_unknown_or_finished_fetch_is_harmless_and_not_counted():
    num_bytes = len(STEPS) * len(PAGES) * PAGE_BYTES
    with worker_of(new_tree(PAGES)) as worker, RawPeer(worker.address) as peer:
        assert peer.ask(wire.Cancel(id=9)) == wire.Ended(id=9, error="cancelled")
        peer.send(a_fetch())
        assert len(peer.fetched(num_bytes)) == num_bytes
        assert peer.ask(wire.Cancel(id=1)) == wire.Ended(id=1, error="cancelled")
        assert worker.status().fetches_by_outcome == {"ok": 1}
        assert worker.status().num_protocol_errors == 0


def test_a_peer_that_sends_a_payload_is_cut_off():
    with worker_of(new_tree()) as worker, RawPeer(worker.address) as rude:
        rude.send_frame(Frame(id=1, offset=0, size=4, checksum=0), b"1234")
        bye = rude.receive()
        assert isinstance(bye, wire.Bye) and "sent a frame of 4 bytes" in bye.reason
        assert worker.status().num_protocol_errors == 1


def test_an_answer_that_is_too_long_for_a_message_ends_no_session():
    with worker_of(new_tree()) as worker, peer_of(worker.address, new_tree()) as peer:
        many = {f"{number:032x}": 1 for number in range(40_000)}
        status = msgspec.structs.replace(worker.status(), pages_by_model=many)
        worker._admin._status = lambda: status
        with pytest.raises(OrderDenied, match="exceeds"):
            ask_status(worker.address, timeout_s=5)
        assert (peer.state, peer.status.num_losses) == (PeerState.READY, 0)


def test_a_question_about_pages_that_are_no_prompt_is_answered_truly():
    source = new_tree(PAGES[:2])
    for model in (MODEL, ModelId("other")):
        reservation = source.reserve(model, None, PAGES[2:4])
        reservation.commit()
    with worker_of(source) as worker, peer_of(worker.address, new_tree()) as peer:
        find = verbs.Find(pages=join_hashes([PAGES[2], PAGES[1]]))
        answer = ask_worker(worker.address, find, verbs.Found, timeout_s=5)
        assert [(it.model, it.num_pages) for it in answer.holdings] == [(MODEL, 1), ("other", 1)]
        assert (peer.state, peer.status.num_losses) == (PeerState.READY, 0)


@pytest.mark.parametrize("attribute", ["lease", "match"])
def test_failure_for_one_peer_ends_only_its_session(attribute, caplog):
    source = new_tree(PAGES)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken here")

    setattr(source, attribute, fail)
    with worker_of(source) as worker, peer_of(worker.address, new_tree()) as peer:
        if attribute == "lease":
            with RawPeer(worker.address) as other:
                bye = other.ask(a_fetch())
                assert isinstance(bye, wire.Bye)
                assert "the worker failed" in bye.reason
        else:
            with pytest.raises(ProtocolError, match="Bye"):
                find = verbs.Find(pages=join_hashes(PAGES))
                ask_worker(worker.address, find, verbs.Found, timeout_s=5)
        eventually(lambda: worker.status().num_peers == 1)
        assert worker.status().num_protocol_errors == 1
        assert (peer.state, peer.status.num_losses) == (PeerState.READY, 0)
    assert "RuntimeError: broken here" in caplog.text


def test_large_eviction_does_not_keep_others_waiting(raw):
    tree = new_tree()
    for number in range(1000):
        store(tree, pages_of(1, f"{number}"))
    with worker_of(tree, admin=()) as worker:
        operator = raw(worker.address)
        operator.send(wire.encode(verbs.Evict(model="", pages=b"")))
        status = ask(operator, verbs.StatusRequest())
        assert isinstance(status, verbs.Status), "it is answered before the order that came first"
        assert operator.poll(20_000)
        evicted = wire.decode_to_peer(memoryview(operator.recv()))
    assert evicted == verbs.Evicted(num_bytes=1000 * PAGE_TOTAL, num_disk_bytes=0)
    assert tree.num_pages == 0


def test_locations_that_are_never_released_are_bounded():
    """The fetch's pages stay held, although all of it was sent."""
    with (
        contextlib.closing(Arena(HOST_BYTES)) as arena,
        worker_of(new_tree(PAGES, memory=arena), max_streams=2) as worker,
        RawPeer(worker.address) as peer,
    ):

        def answer(id: int) -> wire.ToPeer:
            return peer.ask(a_fetch(id=id, reads_arena=True, steps=(("kv", 0),)))

        assert [type(answer(id)) for id in (1, 2)] == [wire.Located] * 2
        refused = answer(3)
        assert isinstance(refused, wire.Ended)
        assert "already serves 2" in refused.reason
        assert peer.ask(wire.Cancel(id=1)) == wire.Ended(id=1, error="cancelled")
        assert isinstance(answer(4), wire.Located)


def test_a_fetch_that_comes_twice_holds_nothing():
    source = new_tree(PAGES)
    with worker_of(source, max_bytes_per_s=1e5) as worker, RawPeer(worker.address) as peer:
        for _ in range(2):
            peer.send(a_fetch(timeout_ms=60_000))
        eventually(lambda: worker.status().num_protocol_errors == 1)
        eventually(lambda: worker.status().num_streams == 0)


def settled(number: Callable[[], int]) -> int:
    """Return the number once it has not changed for 0.2 s."""
    seen, since_s = number(), time.monotonic()
    while time.monotonic() < since_s + 0.2:
        if number() != seen:
            seen, since_s = number(), time.monotonic()
        time.sleep(0.01)
    return seen


def test_queued_frames_of_a_cancelled_fetch_are_not_sent():
    """Only two parts are still sent: bytes that the kernel has, and the batch that is being
    sent."""
    pages = pages_of(4096)
    fetch = a_fetch(pages=join_hashes(pages), timeout_ms=60_000)
    with worker_of(new_tree(pages)) as worker, RawPeer(worker.address) as peer:
        peer.send(fetch)
        eventually(lambda: worker.status().num_sent_bytes)
        sent_bytes = settled(lambda: worker.status().num_sent_bytes)
        peer.send(wire.Cancel(id=1))
        eventually(lambda: worker.status().num_streams == 0)
        ended = peer.receive()
        assert ended == wire.Ended(id=1, error="cancelled"), "it comes after all that was sent"
        assert sum(frame.size for frame in peer.frames) < sent_bytes
        peer.send(a_fetch(id=2))
        eventually(lambda: peer.hear() or peer.frames[-1].id == 2)


def test_a_worker_keeps_the_deadline_by_itself():
    """The peer in this test does not cancel."""
    with worker_of(new_tree(PAGES), max_bytes_per_s=1e4) as worker, RawPeer(worker.address) as peer:
        failure = peer.ask(a_fetch(timeout_ms=500))
        assert isinstance(failure, wire.Ended)
        assert failure.error == "deadline"
        assert len(peer.frames) < 4


def test_too_many_fetches_and_peers_are_turned_away(raw):
    with worker_of(new_tree(PAGES), max_bytes_per_s=1e5, max_streams=1, max_peers=1) as worker:
        with peer_of(worker.address, new_tree()) as peer:
            first, *others = (new_staging(16) for _ in range(4))
            for staging in (first, *others):
                peer.fetch(MODEL, PAGES, staging)
            for staging in others:
                with pytest.raises(FetchError, match="already serves 1 fetches"):
                    wait_all(staging)
            wait_all(first)
            bye = ask(raw(worker.address), wire.hello(new_tree().family, "", 0))
            assert isinstance(bye, wire.Bye)
            assert "already serves 1 peers" in bye.reason
        eventually(lambda: worker.status().num_peers == 0)


def test_greedy_receiver_leaves_places_for_others():
    with (
        contextlib.closing(Arena(HOST_BYTES)) as arena,
        worker_of(new_tree(PAGES, memory=arena), max_streams=16) as worker,
        contextlib.ExitStack() as stack,
    ):
        greedy, second, third = (stack.enter_context(RawPeer(worker.address)) for _ in range(3))

        def num_served(peer: RawPeer, num_asked: int = 16) -> int:
            """Return how many fetches the worker serves to a peer, each by located memory that the
            peer never releases."""
            fetch = a_fetch(reads_arena=True, steps=(("kv", 0),))
            answers = [
                peer.ask(msgspec.structs.replace(fetch, id=1 + id)) for id in range(num_asked)
            ]
            return sum(isinstance(it, wire.Located) for it in answers)

        assert num_served(greedy) == 12, "a peer by itself has three quarters"
        assert num_served(second, 2) == 2
        assert num_served(third, 1) == 1


def test_receiver_of_many_streams_gets_no_more_bytes_than_one_of_a_single_stream():
    with (
        worker_of(new_tree(PAGES), max_bytes_per_s=12 * SIZE) as worker,
        RawPeer(worker.address) as greedy,
        RawPeer(worker.address) as modest,
    ):
        for id in range(1, 17):
            greedy.send(a_fetch(id=id, frame_bytes=1 << 12, timeout_ms=20_000))
        eventually(lambda: worker.status().num_streams == 16)
        modest.send(a_fetch(frame_bytes=1 << 12, timeout_ms=20_000))

        def num_bytes(peer: RawPeer) -> int:
            peer.hear()
            return sum(frame.size for frame in peer.frames)

        eventually(lambda: num_bytes(modest) == SIZE * len(STEPS))
        assert num_bytes(greedy) < 3 * SIZE * len(STEPS)


def test_a_receiver_that_vanishes_or_stalls_frees_its_lease():
    source = new_tree(PAGES)
    with (
        worker_of(source, max_bytes_per_s=1e4, silence_s=3.0) as worker,
        RawPeer(worker.address) as vanishing,
        RawPeer(worker.address) as stalling,
    ):
        for peer in (vanishing, stalling):
            peer.send(a_fetch())
        eventually(lambda: worker.status().num_streams == 2)
        vanishing.channel.close()
        eventually(lambda: worker.status().num_streams == 1, 2.5)
        eventually(lambda: worker.status().num_streams == 0)
        eventually_free(source)


def test_a_worker_that_closes_in_mid_stream_frees_its_leases():
    source = new_tree(PAGES)
    with worker_of(source, max_bytes_per_s=1e4) as worker:
        peer = Peer(new_tree(), worker.address, ONCE)
        assert peer.wait_ready(20)
        staging = begun(peer, PAGES)
        eventually(lambda: worker.status().num_streams == 1)
        worker.close()
        with pytest.raises(FetchError, match="clos"):
            wait_all(staging)
        peer.close()
    source.evict()
    assert source.num_pages == 0


def test_streams_come_and_go_while_another_thread_counts_them():
    scheduler = SendScheduler(verbs.Status(version=0, epoch=0, model=""), None, time.monotonic)

    @dataclass(eq=False)
    class Seen:
        """A stream that adds another stream while the scheduler looks at it."""

        has_another: bool
        served_bytes = 0
        channel = property(lambda self: self)

        @property
        def is_over(self) -> bool:
            if self.has_another:
                self.has_another = False
                scheduler.add(Seen(False), lambda _: None)  # type: ignore[arg-type]
            return False

    scheduler.add(Seen(True), lambda _: None)  # type: ignore[arg-type]
    assert [len(scheduler), len(scheduler)] == [1, 2]
