"""How close does the transport come to raw TCP, and in shared memory to one memcpy?

    python benchmarks/transport.py [--mib 1024] [--repetitions 5] [--frame-kib 256 1024 4096 16384]
    python benchmarks/transport.py --keys

Every contender moves the same bytes from one process to a prefaulted buffer of another, in frames
of the same size; they take turns, their content is compared first, and CPU seconds are those of
all threads of both processes.

raw TCP       `sendall`, `recv_into`, without checksums; with default buffers and with 4 MiB
Unix socket   the same over one
gloo          `torch.distributed` send and recv
memcpy        within the receiver
transport     a fetch over TCP into memory of an earlier fetch, as `Cache` does
in place      a fetch that reads the worker's arena

Physics: a socket moves every byte through the kernel twice. The transport adds a checksum of what
is still in the receiver's cache; the worker remembers its own. In place bytes are copied once; the
worker's checksum runs beside it, the receiver's reads what is still in cache. On two cores what
costs CPU costs time: compare CPU seconds too.

With `--keys` a fetch from a worker with keys runs beside them: AES-256-GCM, for which CPUs have
instructions, seals and opens in the threads that send and receive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from result import here, write

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
    Step,
    Worker,
    WorkerConfig,
)
from cachetree.memory import Arena, Blocks, staged
from cachetree.transport import write_key_pair

MODEL = ModelId("sender")
FAMILY = Family(
    architecture="LlamaForCausalLM",
    num_layers=8,
    hidden_size=2048,
    num_kv_heads=8,
    head_dim=128,
    rope="{}",
    tokenizer="t",
    model_dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=64,
)
STEPS = (*(Step(Kind.KV, layer) for layer in range(FAMILY.num_layers)), Step(Kind.E, 3))
"""In the order of the entry, so that all contenders send the same bytes."""
BUFFER_BYTES = (0, 4 << 20)
"""Of raw sockets; 0 leaves them to the kernel."""
RAW = [f"{kind}, {size >> 20} MiB" for kind in ("raw TCP", "Unix socket") for size in BUFFER_BYTES]
KEYED = "transport, keys"


def sizes_of(num_pages: int) -> dict[Step, int]:
    return {step: num_pages * FAMILY.page_bytes(step.kind) for step in STEPS}


def pages_of(num_pages: int) -> list[PageHash]:
    return [PageHash(i.to_bytes(16, "big")) for i in range(num_pages)]


# The sending process.


def serve(num_pages: int, directory: Path, has_keys: bool) -> None:
    """A worker, and every baseline's server of the same bytes."""
    num_bytes = sum(sizes_of(num_pages).values())
    arena = Arena(num_bytes)
    tree = CacheTree(FAMILY, host_bytes=num_bytes, memory=arena)
    reservation = tree.reserve(MODEL, None, pages_of(num_pages), [3])
    assert reservation is not None
    words = np.random.default_rng(0).integers(0, 1 << 63, num_bytes // 8, dtype=np.uint64)
    payload, at = words.view(np.uint8).data, 0
    for step in STEPS:
        (view,) = reservation.views(step)
        np.copyto(np.frombuffer(view, np.uint8), words.view(np.uint8)[at : at + view.nbytes])
        at += view.nbytes
    reservation.commit()
    workers = [Worker(tree, WorkerConfig())]
    if has_keys:
        allowed = (str(directory / "receiver.pub"),)
        keys = {"key_file": str(directory / "sender.key"), "allowed_peers": allowed}
        workers.append(Worker(tree, WorkerConfig(**keys)))
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in BUFFER_BYTES]
    for size in BUFFER_BYTES:
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(str(directory / f"socket{size}"))
        listeners[-1].listen()
    for listener, size in zip(listeners, BUFFER_BYTES * 2, strict=True):
        arguments = (payload, listener, size)
        threading.Thread(target=_serve_socket, args=arguments, daemon=True).start()
    names = [it.getsockname() for it in listeners]
    print(json.dumps([[worker.address for worker in workers], names]), flush=True)
    threading.Thread(target=_serve_gloo, args=(payload, directory), daemon=True).start()
    sys.stdin.read()
    for worker in workers:
        worker.close()


def _serve_socket(payload: memoryview, listener: socket.socket, buffer_bytes: int) -> None:
    connection = _tuned(listener.accept()[0], buffer_bytes)
    while request := connection.recv(8, socket.MSG_WAITALL):
        for frame in _frames(payload, int.from_bytes(request, "big")):
            connection.sendall(frame)


def _serve_gloo(payload: memoryview, directory: Path) -> None:
    _join_gloo(directory, 0)
    request = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(request, 1)
        for frame in _frames(payload, int(request)):
            dist.send(torch.frombuffer(frame, dtype=torch.uint8), 1)


def _join_gloo(directory: Path, rank: int) -> None:
    dist.init_process_group("gloo", f"file://{directory}/gloo", rank=rank, world_size=2)


def _frames(payload: memoryview, frame_bytes: int) -> Iterator[memoryview]:
    for at in range(0, payload.nbytes, frame_bytes):
        yield payload[at : at + frame_bytes]


def _tuned(connection: socket.socket, buffer_bytes: int) -> socket.socket:
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if buffer_bytes else ():
        connection.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
    return connection


# The receiving process.


@dataclass(frozen=True)
class Sender:
    """The other process, and where it serves."""

    pid: int
    workers: Sequence[str]
    """Without keys, and with them if there are any."""
    sockets: Sequence[str | tuple[str, int]]
    directory: Path

    def cpu_s(self) -> float:
        """What both processes have spent so far, in all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


class Receiver:
    """Every contender, as a function from the frame size to the bytes that came."""

    def __init__(self, num_pages: int, sender: Sender) -> None:
        self._sizes = sizes_of(num_pages)
        self._pages = pages_of(num_pages)
        self.num_bytes = sum(self._sizes.values())
        self._sender = sender
        self._arena = Arena(2 * self.num_bytes)
        self._baseline, self._source = (np.empty(self.num_bytes, np.uint8).data for _ in range(2))
        for buffer in (self._baseline, self._source):
            np.frombuffer(buffer, np.uint8)[:] = 0
        self._tree = CacheTree(FAMILY, host_bytes=0)
        self._sockets = {}
        for name, address, size in zip(RAW, sender.sockets, BUFFER_BYTES * 2, strict=True):
            is_unix = isinstance(address, str)
            connection = _tuned(socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET), size)
            connection.connect(address if is_unix else tuple(address))
            self._sockets[name] = connection
        _join_gloo(sender.directory, 1)

    @contextlib.contextmanager
    def contenders(self, frame_bytes: int) -> Iterator[dict[str, Callable[[], list[memoryview]]]]:
        with contextlib.ExitStack() as stack:
            frames = {"frame_bytes": frame_bytes}
            configs = {
                "transport": (self._sender.workers[0], PeerConfig(shared_memory=False, **frames)),
                "in place": (self._sender.workers[0], PeerConfig(**frames)),
            }
            folder = self._sender.directory
            own, theirs = str(folder / "receiver.key"), str(folder / "sender.pub")
            for address in self._sender.workers[1:]:
                keys = {"key_file": own, "server_key": theirs}
                configs[KEYED] = (address, PeerConfig(shared_memory=False, **keys, **frames))
            runs: dict[str, Callable[[], list[memoryview]]] = {
                "memcpy": lambda: self._copy(frame_bytes),
                **{
                    name: lambda it=it: self._receive(it, frame_bytes)  # type: ignore[misc]
                    for name, it in self._sockets.items()
                },
                "gloo": lambda: self._receive_gloo(frame_bytes),
            }
            for name, (address, config) in configs.items():
                peer = Peer(self._tree, Location(address), config)
                stack.callback(peer.close)
                assert peer.wait_ready(10), peer.error
                assert peer.status.shares_memory == config.shared_memory
                runs[name] = lambda peer=peer: self._fetch(peer)  # type: ignore[misc]
            yield runs

    def _copy(self, frame_bytes: int) -> list[memoryview]:
        frames = zip(
            _frames(self._source, frame_bytes), _frames(self._baseline, frame_bytes), strict=True
        )
        for source, into in frames:
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
        return [self._baseline]

    def _receive(self, connection: socket.socket, frame_bytes: int) -> list[memoryview]:
        connection.sendall(frame_bytes.to_bytes(8, "big"))
        for frame in _frames(self._baseline, frame_bytes):
            at = 0
            while at < frame.nbytes:
                at += connection.recv_into(frame[at:])
        return [self._baseline]

    def _receive_gloo(self, frame_bytes: int) -> list[memoryview]:
        dist.send(torch.tensor([frame_bytes]), 0)
        for frame in _frames(self._baseline, frame_bytes):
            dist.recv(torch.frombuffer(frame, dtype=torch.uint8), 0)
        return [self._baseline]

    def _fetch(self, peer: Peer) -> list[memoryview]:
        parts = {step: Blocks(1, size) for step, size in self._sizes.items()}
        staging = staged(self._arena, parts, Deadline.after(120))
        peer.fetch(MODEL, self._pages, staging)
        for step in STEPS:
            staging.wait(step)
        return [view for step in STEPS for view in staging.views(step)]

    def check(self, runs: dict[str, Callable[[], list[memoryview]]]) -> None:
        """Each once, as a warm-up; afterwards memcpy's source holds the bytes too."""
        digests = {name: _digest(run()) for name, run in runs.items() if name != "memcpy"}
        assert len(set(digests.values())) == 1, f"the contenders brought different bytes: {digests}"
        np.copyto(np.frombuffer(self._source, np.uint8), np.frombuffer(self._baseline, np.uint8))
        assert _digest(runs["memcpy"]()) in digests.values()


@dataclass(frozen=True)
class Measured:
    """One contender: what its repetitions gave, in the order of turns."""

    gb_per_s: list[float]
    cpu_s_per_gb: list[float]

    def of(self, *others: Measured) -> float:
        """Median over the turns of this speed by the best of the others in the same turn."""
        turns = zip(self.gb_per_s, *(other.gb_per_s for other in others), strict=True)
        return statistics.median(ours / max(theirs) for ours, *theirs in turns)


_REST_S = 0.05
"""In which a peer's thread lets go of the last fetch: else the next one is lent new memory."""


def measure(receiver: Receiver, frame_bytes: int, repetitions: int) -> dict[str, Measured]:
    with receiver.contenders(frame_bytes) as runs:
        receiver.check(runs)
        measured = {name: Measured([], []) for name in runs}
        for _ in range(repetitions):
            for name, run in runs.items():
                time.sleep(_REST_S)
                begun_at_s, cpu_s = time.perf_counter(), receiver._sender.cpu_s()
                run()
                gigabytes = receiver.num_bytes / 1e9
                measured[name].gb_per_s.append(gigabytes / (time.perf_counter() - begun_at_s))
                spent_s = receiver._sender.cpu_s() - cpu_s
                measured[name].cpu_s_per_gb.append(spent_s / gigabytes)
    return measured


def _digest(views: list[memoryview]) -> str:
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="payload of one fetch")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--frame-kib", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--keys", action="store_true", help="also with encryption")
    parser.add_argument("--out", type=Path, help="append the results to this file too")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_pages = max(1, (args.mib << 20) // sum(sizes_of(1).values()))
    if args.serve:
        serve(num_pages, args.serve, args.keys)
        return
    environment = here()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if args.keys:
            for side in ("sender", "receiver"):
                write_key_pair(directory, side)
        command = [sys.executable, __file__, "--serve", name, "--mib", str(args.mib)]
        command += ["--keys"] * args.keys
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            workers, sockets = json.loads(process.stdout.readline())
            receiver = Receiver(num_pages, Sender(process.pid, workers, sockets, directory))
            results = {}
            for kib in args.frame_kib:
                results[kib] = measure(receiver, kib << 10, args.repetitions)
                _print(kib, results[kib])
            process.kill()  # Its gloo thread waits for ever.
    tcp, memcpy = RAW[: len(BUFFER_BYTES)], "memcpy"
    for question, ours, theirs in (
        ("how much of raw TCP's speed does the transport keep", "transport", tcp),
        ("how much of memcpy's speed does a fetch in place keep", "in place", [memcpy]),
    ):
        found = {
            "payload_mib": args.mib,
            "ratio_by_frame_kib": {
                kib: round(it[ours].of(*(it[name] for name in theirs)), 3)
                for kib, it in results.items()
            },
            "gb_per_s": {kib: _medians(it, "gb_per_s") for kib, it in results.items()},
            "cpu_s_per_gb": {kib: _medians(it, "cpu_s_per_gb") for kib, it in results.items()},
        }
        write(question, found, environment, args.out)


def _medians(measured: dict[str, Measured], field: str) -> dict[str, float]:
    return {name: round(statistics.median(getattr(it, field)), 3) for name, it in measured.items()}


def _print(kib: int, measured: dict[str, Measured]) -> None:
    tcp = [measured[name] for name in RAW[: len(BUFFER_BYTES)]]
    print(f"\n{f'frames of {kib} KiB':22} GB/s median (min to max)  of TCP  of memcpy  CPU s/GB")
    for name, it in measured.items():
        spread = f"{min(it.gb_per_s):.2f} to {max(it.gb_per_s):.2f}"
        print(
            f"{name:22} {statistics.median(it.gb_per_s):8.2f} {f'({spread})':16} {it.of(*tcp):7.2f}"
            f" {it.of(measured['memcpy']):10.2f} {statistics.median(it.cpu_s_per_gb):9.2f}"
        )


if __name__ == "__main__":
    main()
