"""The data connection by itself: frames arrive whole, also if a side is slow, early, wrong or
gone."""

from __future__ import annotations

import resource
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing

import msgspec
import psutil
import pytest
import zmq
from transport_parts import eventually, flushed, nobody, unheard

from cachetree import ProtocolError, WorkerConfig
from cachetree.memory.copying import checksum
from cachetree.transport import channel
from cachetree.transport.address import Address
from cachetree.transport.channel import Channel
from cachetree.transport.data_port import _MAX_SILENT, DataPort
from cachetree.transport.frames import (
    KEY_BYTES,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MESSAGE,
    PIECE_BYTES,
    Frame,
    Seals,
    Unsealed,
    pack,
)
from cachetree.transport.handshake import Refusal
from cachetree.transport.send_queue import SendQueue

LARGE_BYTES = 4 << 20
SIZES = (1, 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, LARGE_BYTES)


class Memory:
    """Accepts all frames, and stores their payloads."""

    def __init__(self) -> None:
        self.rooms: list[memoryview] = []
        self.frames: list[Frame] = []
        """Frames that arrived whole, with a right checksum."""
        self.num_damaged = 0
        self.is_open = True

    def receiver_of(self, frame: Frame) -> Memory:
        return self

    def buffer_for(self, frame: Frame) -> memoryview | None:
        self.rooms.append(memoryview(bytearray(frame.size)))
        return self.rooms[-1]

    def is_pending(self, frame: Frame) -> bool:
        return self.is_open

    def mark_received(self, frame: Frame, *, is_sound: bool) -> None:
        self.num_damaged += not is_sound
        if is_sound:
            self.frames.append(frame)


Pair = tuple[Channel, Channel]
SealsOf = Callable[[bool], Unsealed]
"""Function that returns the seals of the worker (True) or of the peer (False)."""


def unsealed(is_worker: bool) -> Unsealed:
    return Unsealed()


def sealed(is_worker: bool) -> Unsealed:
    return Seals(bytes(KEY_BYTES), is_worker=is_worker)


@pytest.fixture
def connected() -> Iterator[Callable[[SealsOf], Pair]]:
    """Return a worker's end and a peer's end of one connection."""
    ends: list[Channel] = []

    def connect(seals_of: SealsOf = unsealed) -> Pair:
        for is_worker, end in zip((True, False), socket.socketpair(), strict=True):
            end.setblocking(False)
            ends.append(Channel(end, seals_of(is_worker), unheard))
        return ends[-2], ends[-1]

    yield connect
    for end in ends:
        end.close()


def frame_of(payload: bytes | bytearray, **changed: int) -> Frame:
    sound = Frame(id=1, offset=3, size=len(payload), checksum=checksum(payload))
    return msgspec.structs.replace(sound, **changed)


def payload_of(size: int, seed: int = 1) -> bytes:
    return bytes((seed + at) % 251 for at in range(min(size, 251))) * (size // 251 + 1)


def passed(sender: Channel, receiver: Channel, sink: Memory, num: int) -> list[memoryview]:
    """Return the messages among `num` arrivals, while both sides take turns."""
    messages: list[memoryview] = []

    def turn() -> bool:
        messages.extend(receiver.receive(sink.receiver_of))
        return len(messages) + len(sink.frames) + sink.num_damaged >= num

    eventually(turn)
    return messages


@pytest.mark.parametrize("seals_of", [unsealed, sealed])
def test_frames_of_all_sizes_come_whole_in_both_directions(connected, seals_of):
    ends = connected(seals_of)
    for sender, receiver in (ends, ends[::-1]):
        sink = Memory()
        payloads = [payload_of(size, size)[:size] for size in SIZES]
        frames = [frame_of(payload) for payload in payloads]
        for frame, payload in zip(frames, payloads, strict=True):
            sender.put(frame, [memoryview(payload)])
        sender.put_message(b"and a word")
        (message,) = passed(sender, receiver, sink, len(SIZES) + 1)
        assert sink.frames == frames
        assert sink.rooms == payloads
        assert message == b"and a word"
        flushed(sender)
        assert sender.send_queue.queued_bytes <= receiver.received_bytes


@pytest.mark.parametrize("seals_of", [unsealed, sealed])
def test_a_place_is_let_go_once_its_frame_is_there(connected, seals_of):
    """Memory that a fetch has filled can be lent again, even if no other frame ever comes."""

    class Room(bytearray):
        pass

    sender, receiver = connected(seals_of)
    sink, places = Memory(), [Room(PIECE_BYTES + 1)]
    sink.buffer_for = lambda _frame: memoryview(places[0])  # type: ignore[method-assign]
    payload = payload_of(PIECE_BYTES + 1)[: PIECE_BYTES + 1]
    sender.put(frame_of(payload), [memoryview(payload)])
    passed(sender, receiver, sink, 1)
    assert sink.frames == [frame_of(payload)]
    living = weakref.ref(places.pop())
    assert living() is None


@pytest.mark.parametrize("seals_of", [unsealed, sealed])
def test_a_place_that_is_given_up_is_written_no_more(connected, seals_of, monkeypatch):
    """The rest of the frame is discarded. Later frames arrive as if nothing had happened."""
    monkeypatch.setattr(channel, "_MAX_READS", 1)
    sender, receiver = connected(seals_of)
    sink, payload = Memory(), b"\xff" * LARGE_BYTES
    sender.put(frame_of(payload), [memoryview(payload)])
    eventually(
        lambda: list(receiver.receive(sink.receiver_of)) or receiver.received_bytes > 64 << 10
    )
    monkeypatch.undo()
    before = bytes(sink.rooms[0])
    assert before.count(b"\0")
    sink.is_open = False
    sender.put(frame_of(b"next"), [memoryview(b"next")])
    passed(sender, receiver, sink, 1)
    assert sink.frames == [frame_of(b"next")]
    assert sink.rooms[1] == b"next"
    assert sink.rooms[0] == before


@pytest.mark.parametrize("seals_of", [unsealed, sealed])
def test_a_message_that_comes_in_parts_is_heard(seals_of):
    """A message belongs to no fetch, so no deadline ends the wait for its rest."""
    sink, message = Memory(), b"a word that is cut in two"
    sink.is_open = False
    (sending, between), (onward, receiving) = socket.socketpair(), socket.socketpair()
    receiving.setblocking(False)
    with (
        between,
        onward,
        closing(Channel(sending, seals_of(True), unheard)) as sender,
        closing(Channel(receiving, seals_of(False), unheard)) as receiver,
    ):
        sender.put_message(message)
        flushed(sender)
        whole = between.recv(1 << 10)
        onward.sendall(whole[:-8])
        assert not list(receiver.receive(sink.receiver_of))
        assert not list(receiver.receive(sink.receiver_of))
        onward.sendall(whole[-8:])
        assert list(receiver.receive(sink.receiver_of)) == [message]


def test_a_wrong_payload_is_told_and_a_wrong_header_ends_it(connected):
    sender, receiver = connected(unsealed)
    sender.put(frame_of(b"right"), [memoryview(b"wrong")])
    sink = Memory()
    passed(sender, receiver, sink, 1)
    assert (sink.frames, sink.num_damaged) == ([], 1)
    sender.send_queue.put_raw(b"\1" * 40)
    with pytest.raises(ProtocolError, match="checksum"):
        passed(sender, receiver, Memory(), 1)


@pytest.mark.parametrize(
    ("id", "size"),
    [(1, 0), (1, MAX_FRAME_BYTES + 1), (MESSAGE, MAX_MESSAGE_BYTES + 1), (1, (1 << 32) - 1)],
)
def test_a_size_above_the_cap_takes_no_memory(connected, id, size):
    sender, receiver = connected(unsealed)
    sink = Memory()
    sender.put(frame_of(b"", id=id, size=size), [memoryview(b"")])
    with pytest.raises(ProtocolError, match=f"{size} bytes of payload"):
        passed(sender, receiver, sink, 1)
    assert not sink.rooms


def test_a_receiver_that_does_not_read_is_waited_for(connected):
    """The queue has at most one batch, and copies none of its bytes."""
    sender, receiver = connected(unsealed)
    payload = payload_of(1 << 20)[: 1 << 20]
    num_put = 0
    while sender.has_room:
        sender.put(frame_of(payload), [memoryview(payload)])
        num_put += 1
        assert num_put < 100
    for _ in range(3):
        time.sleep(0.02)
        assert not sender.has_room
    sink = Memory()
    passed(sender, receiver, sink, num_put)
    assert sink.frames == [frame_of(payload)] * num_put
    eventually(lambda: sender.has_room)


def test_a_connection_closed_while_nobody_reads_lets_go_at_once(connected):
    """The kernel takes only a part of the queued bytes. The rest is not read any more."""

    class Page(bytearray):
        pass

    others = set(threading.enumerate())
    sender, _receiver = connected(unsealed)
    page = Page(LARGE_BYTES)
    for _ in range(4):
        sender.put(frame_of(page), [memoryview(page)])
    living = weakref.ref(page)
    del page
    time.sleep(0.05)
    assert living() is not None
    begun_s = time.monotonic()
    sender.close()
    assert time.monotonic() - begun_s < 1.0
    assert living() is None
    assert sender.send_queue.has_written(sender.send_queue.queued_bytes)
    assert not any(it.name == "cachetree-send" for it in {*threading.enumerate()} - others)


def test_a_fault_of_the_sending_thread_ends_the_connection(connected, caplog):
    """If the connection stayed open, its reader would wait for ever."""
    sender, receiver = connected(sealed)
    sender.put(frame_of(b"what cannot be sealed"), [None])  # type: ignore[list-item]
    eventually(lambda: sender.error is not None)
    assert "internal error" in str(sender.error)
    assert "a data connection ends here" in caplog.text
    sender.close()
    assert not list(receiver.receive(nobody))
    assert receiver.error is not None


def test_waiter_for_room_is_woken_when_there_is_room():
    woken = threading.Event()
    near, far = socket.socketpair()
    send_queue = SendQueue(near, Unsealed(), woken.set)
    payload = payload_of(1 << 20)[: 1 << 20]
    with near, far, closing(send_queue):
        while send_queue.has_room:
            send_queue.put(frame_of(payload), [memoryview(payload)])
        assert not woken.wait(0.05)
        num_bytes = send_queue.queued_bytes
        while num_bytes:
            num_bytes -= len(far.recv(min(1 << 20, num_bytes)))
        assert woken.wait(20)
        eventually(lambda: send_queue.has_room)


def test_a_batch_does_not_outgrow_its_bound(monkeypatch):
    """After many fast sends, the frames that wait for a reader that has stopped still take at most
    twice the bound."""
    near, far = socket.socketpair()
    payload, most_bytes = payload_of(1 << 20)[: 1 << 20], 8 << 20
    monkeypatch.setattr("cachetree.transport.send_queue.MOST_BATCH_BYTES", most_bytes)
    send_queue = SendQueue(near, Unsealed(), unheard)

    def read(num_bytes: int) -> None:
        while num_bytes:
            num_bytes -= len(far.recv(min(1 << 20, num_bytes)))

    with near, far, closing(send_queue):
        reading = threading.Thread(target=read, args=(96 << 20,))
        reading.start()
        for _ in range(100):
            eventually(lambda: send_queue.has_room)
            send_queue.put(frame_of(payload), [memoryview(payload)])
        reading.join()
        waiting_bytes = 0
        while send_queue.has_room:
            send_queue.put(frame_of(payload), [memoryview(payload)])
            waiting_bytes += len(payload)
        assert waiting_bytes < 2 * most_bytes + (4 << 20)


def test_bytes_left_after_a_turn_are_read_in_the_next_without_new_ones():
    """A turn reads a limited number of bytes. Meanwhile the socket may sleep until a MiB has
    arrived."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    far, near = ends
    near.setblocking(False)
    with far, closing(Channel(near, Unsealed(), unheard)) as end:
        seals, large, small = Unsealed(), payload_of(2 << 20)[: 2 << 20], b"a small one"
        far.sendall(seals.seal(pack(frame_of(large))))
        poller = select.poll()
        poller.register(end.fileno(), select.POLLIN)
        assert poller.poll(20_000)
        sink = Memory()
        assert not list(end.receive(sink.receiver_of))
        rest = [seals.seal(pack(frame_of(small))) + small for _ in range(50)]
        sending = threading.Thread(target=far.sendall, args=(large + b"".join(rest),))
        sending.start()
        while len(sink.frames) < 51:
            assert poller.poll(20_000), f"it sleeps on after {len(sink.frames)} frames"
            assert not list(end.receive(sink.receiver_of))
        sending.join()
        assert sink.frames == [frame_of(large), *[frame_of(small)] * 50]


def test_an_end_is_noticed_by_whoever_reads_or_writes(connected):
    one, other = connected(unsealed)
    other.close()
    assert not list(one.receive(nobody))
    assert one.error is not None
    assert not one.has_room
    one, other = connected(unsealed)
    one.put(frame_of(b"x"), [memoryview(b"x")])
    other.close()
    one.put(frame_of(b"y"), [memoryview(b"y")])
    eventually(lambda: one.error is not None)
    flushed(one)


class Door:
    """A data port in a thread."""

    def __init__(self, *, shows_all: bool = False) -> None:
        """Make a port in a thread. If `shows_all`, it also sees connections that have sent nothing,
        as the kernel shows them in a crowd."""
        self._poller = zmq.Poller()
        config = WorkerConfig(silence_s=5.0)
        self.port = DataPort(
            Address("127.0.0.1", 0),
            lambda _key: Unsealed(),
            self._poller,
            unheard,
            config,
            time.monotonic,
        )
        if shows_all:
            self.port._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 0)
        self.num_turns = 0
        self.let_in: list[str] = []
        self.refused: list[Refusal] = []
        self._channels: list[Channel] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run)

    @property
    def num_waiting(self) -> int:
        return len(self.port._silent)

    def _run(self) -> None:
        while not self._is_closing:
            self.num_turns += 1
            ready = dict(self._poller.poll(10))
            for arrival in self.port.arrivals(ready):
                if isinstance(arrival, Refusal):
                    self.refused.append(arrival)
                else:
                    self.let_in.append(arrival[0])
                    self._channels.append(arrival[1])

    def __enter__(self) -> Door:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        self._thread.join()
        self.port.close()
        for opened in self._channels:
            opened.close()


def test_a_ticket_lets_its_owner_in_and_nobody_after():
    with Door() as door:
        gone = door.port.issue_ticket("one")  # There is another for them.
        tickets = {name: door.port.issue_ticket(name) for name in ("one", "two")}
        opened = [
            channel.connect("127.0.0.1", tickets[name], Unsealed(), unheard)
            for name in ("two", "one")
        ]
        for each in opened:
            flushed(each)
        eventually(lambda: sorted(door.let_in) == ["one", "two"])
        for ticket in (tickets["two"], gone):
            opened.append(channel.connect("127.0.0.1", ticket, Unsealed(), unheard))
            flushed(opened[-1])
        eventually(lambda: len(door.refused) == 2)
        eventually(lambda: list(opened[-1].receive(nobody)) or opened[-1].error)
        assert len(door.let_in) == 2
        assert all("127.0.0.1 came to bulk_port without a ticket" in it.why for it in door.refused)
        for each in opened:
            each.close()


def test_a_part_of_a_token_is_none():
    with Door() as door:
        ticket = door.port.issue_ticket("owner")
        with socket.create_connection(("127.0.0.1", ticket.port)) as hasty:
            hasty.sendall(ticket.token[:-1])
            assert hasty.recv(1) == b""
        eventually(lambda: [it.who for it in door.refused] == ["127.0.0.1"])


def test_a_crowd_between_a_connection_and_its_token_does_not_keep_it_out():
    """Neither the number of strangers nor what they send keeps the owner of the token out."""
    with Door() as door:
        ticket = door.port.issue_ticket("owner")
        where = ("127.0.0.1", ticket.port)
        with socket.create_connection(where) as owner, ExitStack() as stack:
            crowd = [stack.enter_context(socket.create_connection(where)) for _ in range(400)]
            for talker in crowd[100:]:
                talker.sendall(b"?")
            eventually(lambda: len(door.refused) == 300)
            owner.sendall(ticket.token)
            eventually(lambda: door.let_in == ["owner"])


def test_a_crowd_that_the_kernel_does_not_keep_back_is_dismissed_for_who_comes():
    """Only few strangers may wait, and only for a short time."""
    with Door(shows_all=True) as door, ExitStack() as stack:
        ticket = door.port.issue_ticket("owner")
        where = ("127.0.0.1", ticket.port)
        crowd = [stack.enter_context(socket.create_connection(where)) for _ in range(300)]
        eventually(lambda: door.num_waiting == _MAX_SILENT)
        with socket.create_connection(where) as owner:
            assert crowd[300 - _MAX_SILENT].recv(1) == b"", "the oldest has made room"
            owner.sendall(ticket.token)
            eventually(lambda: door.let_in == ["owner"])
        eventually(lambda: not door.num_waiting)
        for talker in crowd:
            assert talker.recv(1) == b""


class Hosts:
    """A listener with connections that seem to come from these hosts, one after another."""

    def __init__(self, listener: socket.socket, hosts: Iterable[str]) -> None:
        self._listener, self._hosts = listener, iter(hosts)
        self.fileno, self.close = listener.fileno, listener.close

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, _ = self._listener.accept()
        return connection, (next(self._hosts), 1)


@pytest.mark.parametrize(
    ("host", "crowd"),
    [
        ("192.0.2.1", ["192.0.2.2"] * 300),
        ("2001:db9::1", [f"2001:db8::{number:x}" for number in range(300)]),
    ],
)
def test_crowd_of_one_source_ends_no_connection_of_another(host, crowd):
    door = Door(shows_all=True)
    door.port._listener = Hosts(door.port._listener, [host, *crowd])
    with door, ExitStack() as stack:
        where = ("127.0.0.1", door.port.issue_ticket("owner").port)
        first, *others = (
            stack.enter_context(socket.create_connection(where)) for _ in range(1 + len(crowd))
        )
        eventually(lambda: door.num_waiting == _MAX_SILENT)
        assert others[0].recv(1) == b""
        with pytest.raises(BlockingIOError):
            first.recv(1, socket.MSG_DONTWAIT)


def test_without_descriptors_the_port_waits_for_some():
    """A port that tried again and again would take the thread's time from all other peers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Door() as door, socket.socket() as owner:
        ticket = door.port.issue_ticket("owner")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            owner.connect(("127.0.0.1", ticket.port))
            owner.sendall(ticket.token)
            before = door.num_turns
            time.sleep(0.5)
            assert 10 < door.num_turns - before < 150
            assert not door.let_in
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        eventually(lambda: door.let_in == ["owner"])


def test_a_channel_that_brings_no_pieces_has_no_memory_for_them():
    process, num_channels = psutil.Process(), 50
    with ExitStack() as all_of_them:
        before_bytes = process.memory_info().rss
        for _ in range(num_channels):
            for end in socket.socketpair():
                all_of_them.enter_context(closing(Channel(end, Unsealed(), unheard)))
        assert process.memory_info().rss - before_bytes < num_channels * PIECE_BYTES
