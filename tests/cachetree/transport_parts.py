"""A small family, trees with content that can be recomputed, and workers: real and scripted.

Run as a script it is a worker process: `transport_parts.py LISTEN NUM_PAGES BYTES_PER_S`.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec
import numpy as np
import zmq
from profile_parts import HALF, family

from cachetree import (
    CacheTree,
    Deadline,
    Family,
    Kind,
    Location,
    ModelId,
    PageHash,
    Peer,
    PeerConfig,
    Span,
    Staging,
    Step,
    Worker,
    WorkerConfig,
)
from cachetree.ids import KV, Part
from cachetree.memory.arena import Arena
from cachetree.memory.copying import scatter
from cachetree.memory.slab import Blocks, Loan, Pool
from cachetree.tier import Unwritten
from cachetree.transport import Keeper, ask, channel, verbs, wire
from cachetree.transport.address import Address
from cachetree.transport.channel import Channel
from cachetree.transport.data_port import DataPort
from cachetree.transport.frames import Frame, Unsealed

FAMILY = family(hidden_size=64, num_kv_heads=1, head_dim=32, **HALF)
MODEL = ModelId("sender")
PAGE_BYTES = FAMILY.kv_page_bytes
E_LAYER = 2
PARTS = (KV, Part(E_LAYER))
STEPS = (Step(Kind.E, E_LAYER), Step(Kind.KV, 0), Step(Kind.KV, 1), Step(Kind.KV, 3))
FAST = PeerConfig(frame_bytes=64 << 10, heartbeat_s=0.1, silence_s=30.0, reconnect_s=0.01)
HOST_BYTES = 256 << 20
ONCE = msgspec.structs.replace(FAST, max_retries=0)
"""Settings with which a fetch is given up at its first error."""
SILENCE_S = 0.5
"""Seconds of silence that count as a fault, in tests of silence. A busy machine may be silent for
as long."""


def pages_of(num: int, name: str = "p") -> list[PageHash]:
    return [PageHash(hashlib.sha256(f"{name}{i}".encode()).digest()[:16]) for i in range(num)]


def content(page: PageHash, step: Step) -> bytes:
    return content_of(FAMILY, page, step)


def content_of(family: Family, page: PageHash, step: Step) -> bytes:
    """Content of a page at one step. It differs for every page and step."""
    seed = page + f"{step.kind.value}{step.layer}".encode()
    size = family.page_bytes(step.kind)
    return hashlib.shake_128(seed).digest(64) * (size // 64)


def store(tree, pages, parent=None, model=MODEL):
    for part in PARTS:
        reservation = tree.reserve(model, parent, pages, part)
        for step in reservation.steps:
            payload = b"".join(content(page, step) for page in reservation.pages)
            scatter(reservation.views(step), memoryview(payload))
        reservation.commit()


class Heap:
    """Memory that no other process may map, so payloads go over connections."""

    file = None

    def take(self, parts: Sequence[Blocks]) -> Loan:
        runs, at = [], 0
        for num, size in parts:
            runs.append([Span(at, at + num * size)])
            at += num * size
        return Loan(np.empty(at, np.uint8).data, runs)

    def give_back(self, loan: Loan, places: Sequence[Span]) -> None:
        pass

    def place_of(self, view: memoryview) -> int | None:
        return None

    def close(self) -> None:
        pass


def new_memory() -> Pool:
    return Heap()


def new_tree(pages=(), family=FAMILY, memory=None):
    """Make a tree, in `new_memory()` if no memory is named."""
    tree = CacheTree(family, host_bytes=HOST_BYTES, memory=memory or new_memory())
    if pages:
        store(tree, pages)
    return tree


class RecordingStaging(Staging):
    """Staging that remembers the order of writes."""

    def __init__(self, sizes: dict[Step, int], deadline: Deadline) -> None:
        super().__init__(sizes, deadline)
        self.writes: list[tuple[Step, int, int]] = []

    def room(self, step: Step, offset: int, size: int) -> memoryview:
        self.writes.append((step, offset, size))
        return super().room(step, offset, size)


def new_staging(num_pages, seconds=10.0, steps=STEPS):
    sizes = dict.fromkeys(steps, num_pages * PAGE_BYTES)
    return RecordingStaging(sizes, Deadline.after(seconds))


def wait_all(staging: Staging) -> None:
    for step in staging.steps:
        staging.wait(step)


def check_content(staging: Staging, pages: Sequence[PageHash]) -> None:
    """Check that all content arrives, and is right."""
    wait_all(staging)
    for step in staging.steps:
        expected = b"".join(content(page, step) for page in pages)
        assert b"".join(staging.views(step)) == expected, step


def begun(peer, pages, seconds=10.0, steps=STEPS):
    """Begin a fetch of these pages."""
    staging = new_staging(len(pages), seconds, steps)
    peer.fetch(MODEL, pages, staging)
    return staging


def fetch_all(peer: Peer, pages: Sequence[PageHash]) -> Staging:
    """Fetch every step of these pages, and check the content."""
    staging = begun(peer, pages)
    check_content(staging, pages)
    return staging


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    give_up_at_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at_s, "did not come true in time"
        time.sleep(0.005)


def eventually_free(tree: CacheTree) -> None:
    """Wait until no holder keeps a page, before the leases of `new_staging` would expire."""

    def is_free() -> bool:
        tree.evict()
        return tree.num_pages == 0

    eventually(is_free, 8)


@contextlib.contextmanager
def worker_of(tree: CacheTree, **config: object) -> Iterator[Worker]:
    worker = Worker(tree, WorkerConfig(**config))  # type: ignore[arg-type]
    try:
        yield worker
    finally:
        worker.close()


def new_keeper(tree: CacheTree, max_bytes_per_s: float = inf) -> Keeper:
    return Keeper(tree, max_bytes_per_s, Unwritten(), time.monotonic)


@contextlib.contextmanager
def peer_of(address, tree, config=FAST, *, is_ready=True, keeper=None, clock=time.monotonic):
    peer = Peer(tree, address, config, keeper=keeper, clock=clock)
    try:
        if is_ready:
            assert peer.wait_ready(20), peer.error
        yield peer
    finally:
        peer.close()


def data_connection(hello: wire.ToPeer) -> Channel:
    """Open the data connection that a worker's hello offers. The caller closes it."""
    assert isinstance(hello, wire.Hello)
    assert hello.ticket is not None
    opened = channel.connect("127.0.0.1", hello.ticket, Unsealed(), unheard)
    flushed(opened)
    return opened


def flushed(channel: Channel) -> None:
    """Send everything that is queued, to a receiver that reads."""
    send_queue = channel.send_queue
    eventually(lambda: send_queue.has_written(send_queue.queued_bytes))


def ask_status(address, *, timeout_s, credentials=None):
    """Ask a worker for its status."""
    asked = verbs.StatusRequest()
    return ask(address, asked, verbs.Status, timeout_s=timeout_s, credentials=credentials)


def unheard(*_: object) -> None:
    """Callback that does nothing."""


def nobody(frame: Frame) -> None:
    """Discard the payload of a frame, which has no receiver."""


class RawPeer:
    """A peer that sends only what the test orders, and ignores adverts."""

    def __init__(self, address: Location) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(address)
        self.socket.send(wire.encode(wire.hello(FAMILY, "", 0)))
        assert self.socket.poll(20_000), "no answer"
        self.channel = data_connection(wire.decode_to_peer(memoryview(self.socket.recv())))
        self.frames: list[Frame] = []
        """Frames that arrived, in order."""
        self._payloads: list[memoryview] = []
        self._buffer = memoryview(b"")
        self._messages: deque[wire.ToPeer] = deque()

    def send(self, message: wire.ToWorker) -> None:
        self.channel.put_message(wire.encode(message))

    def send_frame(self, frame: Frame, payload: bytes) -> None:
        self.channel.put(frame, [memoryview(payload)])
        flushed(self.channel)

    def hear(self) -> None:
        """Read everything that has arrived."""
        for header in self.channel.receive(lambda frame: self):
            message = wire.decode_to_peer(header)
            if not isinstance(message, wire.Reset | wire.Entries | wire.Synced):
                self._messages.append(message)

    def receive(self) -> wire.ToPeer:
        def has_come() -> bool:
            self.hear()
            assert self._messages or self.channel.error is None, self.channel.error
            return bool(self._messages)

        eventually(has_come)
        return self._messages.popleft()

    def ask(self, message: wire.ToWorker) -> wire.ToPeer:
        self.send(message)
        return self.receive()

    def fetched(self, num_bytes: int) -> bytes:
        """Return the payloads of the next `num_bytes` bytes, in the order in which they arrive."""

        def has_come() -> bool:
            self.hear()
            return sum(map(len, self._payloads)) >= num_bytes

        eventually(has_come)
        payloads, self._payloads = self._payloads, []
        return b"".join(payloads)

    def buffer_for(self, frame: Frame) -> memoryview:
        self._buffer = memoryview(bytearray(frame.size))
        return self._buffer

    def is_pending(self, frame: Frame) -> bool:
        return True

    def mark_received(self, frame: Frame, *, is_sound: bool) -> None:
        assert is_sound
        self.frames.append(frame)
        self._payloads.append(self._buffer)

    def close(self) -> None:
        self.channel.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ScriptedWorker:
    """A worker that greets, sends an empty snapshot, and passes each fetch to `script`.

    `script(self, identity, fetch)` sends the messages that a broken worker would send.
    """

    def __init__(self, script, family=FAMILY, arena=None, listen="tcp://127.0.0.1:0"):
        self._script = script
        self._family = family
        self._arena = arena
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(listen)
        self.address = Location(self.socket.get_string(zmq.LAST_ENDPOINT))
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._data_port = DataPort(
            Address("127.0.0.1", 0),
            lambda _key: Unsealed(),
            self._poller,
            unheard,
            WorkerConfig(),
            time.monotonic,
        )
        self.channels: dict[bytes, Channel] = {}
        self.received: list[wire.ToWorker] = []
        self.answers_pings = True
        self._is_closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, identity: bytes, message: wire.ToPeer | Frame | bytes, *payload: bytes) -> None:
        """Send a message: over the data connection once there is one, before that over ZMQ."""
        if isinstance(message, Frame):
            self.channels[identity].put(message, [memoryview(b"".join(payload))])
            flushed(self.channels[identity])
            return
        header = message if isinstance(message, bytes) else wire.encode(message)
        if identity in self.channels:
            self.channels[identity].put_message(header)
            flushed(self.channels[identity])
        else:
            self.socket.send_multipart([identity, header, *payload])

    def turn(self) -> None:
        """Do nothing. The worker's thread calls this again and again; subclasses send messages
        here."""

    def send_raw(self, identity: bytes, raw: bytes) -> None:
        """Send raw bytes over the data connection."""
        self.channels[identity].send_queue.put_raw(raw)
        flushed(self.channels[identity])

    def _run(self) -> None:
        while not self._is_closing:
            ready = dict(self._poller.poll(20))
            self.turn()
            for arrival in self._data_port.arrivals(ready):
                assert isinstance(arrival, tuple)
                identity, opened = bytes.fromhex(arrival[0]), arrival[1]
                self.channels[identity] = opened
                self._poller.register(opened.fileno(), zmq.POLLIN)
                self.send(identity, wire.Reset())
                self.send(identity, wire.Synced())
            for identity, opened in tuple(self.channels.items()):
                for header in opened.receive(nobody):
                    self._hear(identity, wire.decode_to_worker(header))
                if opened.error is not None:
                    self._poller.unregister(opened.fileno())
                    self.channels.pop(identity).close()
            if self.socket in ready:
                identity, header = self.socket.recv_multipart()
                self._hear(identity, wire.decode_to_worker(memoryview(header)))

    def _hear(self, identity: bytes, message: wire.ToWorker) -> None:
        self.received.append(message)
        if isinstance(message, wire.Hello):
            ticket = self._data_port.issue_ticket(identity.hex())
            self.send(identity, wire.hello(self._family, "", 7, self._arena, ticket))
        elif isinstance(message, wire.Ping) and self.answers_pings:
            self.send(identity, wire.Pong())
        elif isinstance(message, wire.Fetch):
            self._script(self, identity, message)

    def __enter__(self) -> ScriptedWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        self._thread.join()
        for opened in self.channels.values():
            opened.close()
        self._data_port.close()
        self._context.destroy()


@contextlib.contextmanager
def worker_process(num_pages, bytes_per_s, listen="tcp://127.0.0.1:0"):
    """A worker of `pages_of(num_pages)` in its own process, in memory that others can read."""
    command = [sys.executable, str(Path(__file__)), listen, str(num_pages), str(bytes_per_s)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            yield process, Location(process.stdout.readline().strip())
        finally:
            process.kill()


def _serve(listen: str, num_pages: int, bytes_per_s: float) -> None:
    tree = new_tree(pages_of(num_pages), memory=Arena(HOST_BYTES))
    worker = Worker(tree, WorkerConfig(listen=listen, max_bytes_per_s=bytes_per_s))
    print(worker.address, flush=True)
    sys.stdin.read()
    worker.close()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
