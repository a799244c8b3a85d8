"""How close is the transport's speed to raw TCP's, and in shared memory to one memcpy's?

    python -m benchmarks.transport [--mib 1024] [--repetitions 5] [--frame-mib 1 4 16]

Every contender moves the same bytes from one process to a prefaulted buffer of another, in frames
of the same size. The contenders take turns, and their bytes are compared first. CPU seconds are
those of all threads of both processes.

raw TCP           `sendall`, `recv_into`, without checksums, with the system's buffers
ZMQ frames        one message per frame, sent without a copy; ZMQ copies once, into the buffer
ZMQ, CURVE        the same, sealed by ZMQ's I/O threads (XSalsa20-Poly1305)
memcpy            within the receiver
transport         a fetch over TCP into memory that an earlier fetch used, as `Cache` does
transport, keys   the same from a worker with keys: AES-256-GCM, for which CPUs have instructions,
                  seals and opens in the threads that send and receive
in place          a fetch that reads the worker's arena, in shared memory

Physics: a socket moves every byte through the kernel twice. The transport adds a checksum of bytes
that are still in the receiver's cache; the worker remembers its own checksums. In place, bytes are
copied once. The worker's checksum runs beside the copy; the receiver's reads bytes that are still
in its cache. On two cores CPU time costs wall time: compare CPU seconds too. The goals are 0.9 of
raw TCP and 0.6 of one memcpy.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash
import zmq

from benchmarks import result
from benchmarks.races import E_LAYER, FAMILY, MODEL, STEPS, pages_in, race, sizes_of
from cachetree import (
    KV,
    CacheTree,
    Deadline,
    Location,
    PageHash,
    Part,
    Peer,
    PeerConfig,
    Worker,
    WorkerConfig,
)
from cachetree.memory import Arena, Blocks, staged
from cachetree.transport import write_key_pair

KEYED, FRAMES, CURVE = "transport, keys", "ZMQ frames", "ZMQ, CURVE"
MOST_QUEUED = 16
"""Messages that a ZMQ socket queues on either side, so that ZMQ and the network work at once."""
REST_S = 0.05
"""Seconds of rest before each run."""

Runs = dict[str, Callable[[], list[memoryview]]]
"""Contenders by name. Each is a function that returns the bytes it received."""


# The sending process.


def serve(pages: list[PageHash], directory: Path, teller: Connection) -> None:
    """Run a worker without keys, a worker with keys, and plain servers of the same bytes. Send
    their addresses through `teller`, and return when it closes."""
    num_bytes = sum(sizes_of(len(pages)).values())
    tree = CacheTree(FAMILY, host_bytes=num_bytes, memory=Arena(num_bytes))
    words = np.random.default_rng(0).integers(0, 1 << 63, num_bytes // 8, dtype=np.uint64)
    payload, at = words.view(np.uint8), 0
    for part in (KV, Part(E_LAYER)):
        reservation = tree.reserve(MODEL, None, pages, part)
        assert reservation is not None
        for step in reservation.steps:
            (view,) = reservation.views(step)
            np.copyto(np.frombuffer(view, np.uint8), payload[at : at + view.nbytes])
            at += view.nbytes
        reservation.commit()
    allowed = (str(directory / "receiver.pub"),)
    keys = {"key_file": str(directory / "sender.key"), "allowed_peers": allowed}
    workers = [Worker(tree, WorkerConfig()), Worker(tree, WorkerConfig(**keys))]
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_socket, args=(payload.data, listener), daemon=True).start()
    queues = [_serve_frames(payload.data, keys) for keys in ((b"", b""), zmq.curve_keypair())]
    teller.send(([worker.address for worker in workers], listener.getsockname(), queues))
    teller.poll(None)


def _serve_socket(payload: memoryview, listener: socket.socket) -> None:
    connection = listener.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := connection.recv(8, socket.MSG_WAITALL):
        for frame in _frames(payload, int.from_bytes(request, "big")):
            connection.sendall(frame)


def _queue(public: bytes, secret: bytes) -> zmq.Socket[bytes]:
    queue = zmq.Context.instance().socket(zmq.PAIR)
    queue.set_hwm(MOST_QUEUED)
    if public:
        queue.curve_publickey, queue.curve_secretkey = public, secret
    return queue


def _serve_frames(payload: memoryview, keys: tuple[bytes, bytes]) -> tuple[str, bytes]:
    """Serve frames over ZMQ, in a thread. Return the address and the public key."""
    queue = _queue(*keys)
    queue.curve_server = bool(keys[0])
    queue.bind("tcp://127.0.0.1:*")

    def send() -> None:
        while True:
            for frame in _frames(payload, int.from_bytes(queue.recv(), "big")):
                queue.send(frame, copy=False)

    threading.Thread(target=send, daemon=True).start()
    return queue.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"), keys[0]


def _frames(payload: memoryview, frame_bytes: int) -> Iterator[memoryview]:
    for at in range(0, payload.nbytes, frame_bytes):
        yield payload[at : at + frame_bytes]


# The receiving process.


@dataclass(frozen=True)
class Sender:
    """The sending process and its addresses."""

    process: psutil.Process
    workers: Sequence[str]
    """Addresses of two workers: one without keys, one with keys."""
    address: tuple[str, int]
    """Address of the raw TCP server."""
    queues: Sequence[tuple[str, bytes]]
    """ZMQ addresses, each with its public key: without keys, then with CURVE."""
    directory: Path

    def cpu_s(self) -> float:
        """CPU seconds that both processes have spent so far, in all threads."""
        theirs = self.process.cpu_times()
        return time.process_time() + theirs.user + theirs.system


class Receiver:
    """The receiving process's sockets and buffers. It makes the contenders for a size of frames."""

    def __init__(self, pages: list[PageHash], sender: Sender) -> None:
        self._pages, self._sizes, self._sender = pages, sizes_of(len(pages)), sender
        self.num_bytes = sum(self._sizes.values())
        self._arena = Arena(2 * self.num_bytes)
        self._baseline, self._source = (np.empty(self.num_bytes, np.uint8).data for _ in range(2))
        for buffer in (self._baseline, self._source):
            # Touch every page, so that none is faulted in later.
            np.frombuffer(buffer, np.uint8)[:] = 0
        self._tree = CacheTree(FAMILY, host_bytes=0)
        self._socket = socket.create_connection(sender.address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._queues = [self._connected(*it) for it in sender.queues]

    def _connected(self, address: str, server_key: bytes) -> zmq.Socket[bytes]:
        queue = _queue(*(zmq.curve_keypair() if server_key else (b"", b"")))
        if server_key:
            queue.curve_serverkey = server_key
        queue.connect(address)
        return queue

    @contextlib.contextmanager
    def contenders(self, frame_bytes: int) -> Iterator[Runs]:
        plain, keyed = self._sender.workers
        folder = self._sender.directory
        keys = {"key_file": str(folder / "receiver.key"), "server_key": str(folder / "sender.pub")}
        peers = {
            "transport": (plain, {"shared_memory": False}),
            KEYED: (keyed, {"shared_memory": False, **keys}),
            "in place": (plain, {}),
        }
        with contextlib.ExitStack() as stack:
            runs: Runs = {
                "memcpy": partial(self._copy, frame_bytes),
                "raw TCP": partial(self._receive, frame_bytes),
                **{
                    name: partial(self._receive_frames, queue, frame_bytes)
                    for name, queue in zip((FRAMES, CURVE), self._queues, strict=True)
                },
            }
            for name, (address, settings) in peers.items():
                config = PeerConfig(frame_bytes=frame_bytes, **settings)
                peer = Peer(self._tree, Location(address), config)
                stack.callback(peer.close)
                assert peer.wait_ready(10), peer.error
                assert peer.status.shares_memory == config.shared_memory
                runs[name] = partial(self._fetch, peer)
            yield runs

    def _copy(self, frame_bytes: int) -> list[memoryview]:
        frames = zip(
            _frames(self._source, frame_bytes), _frames(self._baseline, frame_bytes), strict=True
        )
        for source, into in frames:
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
        return [self._baseline]

    def _receive(self, frame_bytes: int) -> list[memoryview]:
        self._socket.sendall(frame_bytes.to_bytes(8, "big"))
        for frame in _frames(self._baseline, frame_bytes):
            at = 0
            while at < frame.nbytes:
                at += self._socket.recv_into(frame[at:])
        return [self._baseline]

    def _receive_frames(self, queue: zmq.Socket[bytes], frame_bytes: int) -> list[memoryview]:
        queue.send(frame_bytes.to_bytes(8, "big"))
        for frame in _frames(self._baseline, frame_bytes):
            assert queue.recv_into(frame) == frame.nbytes
        return [self._baseline]

    def _fetch(self, peer: Peer) -> list[memoryview]:
        parts = {step: Blocks(1, size) for step, size in self._sizes.items()}
        staging = staged(self._arena, parts, Deadline.after(120))
        peer.fetch(MODEL, self._pages, staging)
        for step in STEPS:
            staging.wait(step)
        return [view for step in STEPS for view in staging.views(step)]

    def check(self, runs: Runs) -> None:
        """Run each contender once as a warm-up, and compare the bytes. After this, memcpy's source
        holds the same bytes."""
        digests = {name: _digest(run()) for name, run in runs.items() if name != "memcpy"}
        assert len(set(digests.values())) == 1, f"the contenders brought different bytes: {digests}"
        np.copyto(np.frombuffer(self._source, np.uint8), np.frombuffer(self._baseline, np.uint8))
        assert _digest(runs["memcpy"]()) in digests.values()

    def row(self, frame_mib: int, repetitions: int) -> dict[str, Any]:
        with self.contenders(frame_mib << 20) as runs:
            self.check(runs)
            rest = partial(time.sleep, REST_S)
            speeds = race(runs, self.num_bytes, repetitions, self._sender.cpu_s, rest)
        return {
            "frame_mib": frame_mib,
            **{name: it.medians() for name, it in speeds.items()},
            "of_raw_tcp": speeds["transport"].of(speeds["raw TCP"]),
            "of_memcpy": speeds["in place"].of(speeds["memcpy"]),
            "keys_of_plain": speeds[KEYED].of(speeds["transport"]),
            "zmq_of_raw_tcp": speeds[FRAMES].of(speeds["raw TCP"]),
            "curve_of_keys": speeds[CURVE].of(speeds[KEYED]),
        }


def _digest(views: list[memoryview]) -> str:
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.hexdigest()


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="payload of one fetch")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--frame-mib", type=int, nargs="+", default=[1, 4, 16])
    args = parser.parse_args()
    pages = pages_in(args.mib)
    environment = result.here()
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for side in ("sender", "receiver"):
            write_key_pair(directory, side)
        incoming, teller = spawning.Pipe()
        process = spawning.Process(target=serve, args=(pages, directory, teller), daemon=True)
        process.start()
        teller.close()  # If the sender dies, `recv` fails and does not wait.
        sender = Sender(psutil.Process(process.pid), *incoming.recv(), directory)
        receiver = Receiver(pages, sender)
        rows = [receiver.row(it, args.repetitions) for it in args.frame_mib]
        process.kill()
    results = {"payload_mib": args.mib, "repetitions": args.repetitions, "rows": rows}
    result.write("transport", results, environment, args.json)


if __name__ == "__main__":
    main()
