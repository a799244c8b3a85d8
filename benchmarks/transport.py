"""How much of a plain TCP connection's bandwidth does the transport keep?

    python benchmarks/transport.py [--mib 256] [--repetitions 7] [--curve]

Physics: over loopback both move every byte twice through the kernel. The transport adds per frame
of 1 MiB two checksums (one per side, at memory speed), one copy from ZMQ's buffer into the staging
buffer, and one header; it saves the receiver's wait, because sending, receiving and placing are
three threads. The baseline is `sendall` / `recv_into` of the same bytes between the same two
processes into one prefaulted buffer, without checksums. "pooled" fetches into the memory of an
earlier fetch, which is what `Cache` does; "fresh" into newly allocated memory, to show the price
of its page faults.

With `--curve` a fetch from a worker with keys, into pooled memory, runs beside them. Encryption and
decryption are one pass each over every byte, in libzmq's I/O threads: one core on either side. CPU
seconds are those of all threads of both processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
import zmq

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
    Staging,
    Step,
    Worker,
    WorkerConfig,
    pageable,
)
from cachetree.staging_pool import StagingPool
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
    kv_dtype="bfloat16",
    page_size=64,
)
STEPS = (Step(Kind.E, 3), *(Step(Kind.KV, layer) for layer in range(FAMILY.num_layers)))
TCP_CHUNK_BYTES = 1 << 20


def sizes_of(num_pages: int) -> dict[Step, int]:
    page_bytes = {Kind.KV: FAMILY.kv_page_bytes, Kind.E: FAMILY.e_page_bytes}
    return {step: num_pages * page_bytes[step.kind] for step in STEPS}


def pages_of(num_pages: int) -> list[PageHash]:
    return [PageHash(i.to_bytes(16, "big")) for i in range(num_pages)]


def serve(num_pages: int, keys: Path | None) -> None:
    """The sending process: a worker, and a plain TCP server of the same bytes."""
    sizes = sizes_of(num_pages)
    tree = CacheTree(FAMILY, host_bytes=sum(sizes.values()))
    reservation = tree.reserve(MODEL, None, pages_of(num_pages), [3])
    assert reservation is not None
    random = np.random.default_rng(0)
    for step in STEPS:
        view = reservation.e(3) if step.kind is Kind.E else reservation.kv(step.layer)
        np.frombuffer(view, np.uint64)[:] = random.integers(
            0, 1 << 63, view.nbytes // 8, dtype=np.uint64
        )
    reservation.commit()
    workers = [Worker(tree, WorkerConfig())]
    if keys is not None:
        allowed = (str(keys / "receiver.pub"),)
        config = WorkerConfig(key_file=str(keys / "sender.key"), allowed_peers=allowed)
        workers.append(Worker(tree, config))
    listener = socket.create_server(("127.0.0.1", 0))
    addresses = [worker.address for worker in workers]
    print(json.dumps([addresses, listener.getsockname()[1]]), flush=True)
    threading.Thread(target=_serve_tcp, args=(tree, num_pages, listener), daemon=True).start()
    sys.stdin.read()
    for worker in workers:
        worker.close()


def _serve_tcp(tree: CacheTree, num_pages: int, listener: socket.socket) -> None:
    lease = tree.lease(MODEL, pages_of(num_pages), "baseline", Deadline.after(3600))
    assert lease is not None
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(1):
        for step in STEPS:
            views = lease.e(3) if step.kind is Kind.E else lease.kv(step.layer)
            for view in views:
                for at in range(0, view.nbytes, TCP_CHUNK_BYTES):
                    connection.sendall(view[at : at + TCP_CHUNK_BYTES])


@dataclass(frozen=True)
class Sender:
    """The other process, and where it serves: in clear, and with keys if there are any."""

    pid: int
    addresses: list[str]
    port: int
    keys: Path | None

    def cpu_s(self) -> float:
        """What both processes have spent so far, in all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class Measured:
    """What the repetitions of one contender gave."""

    gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)


def measure(num_pages: int, repetitions: int, sender: Sender) -> dict[str, Measured]:
    sizes = sizes_of(num_pages)
    num_bytes = sum(sizes.values())
    pool = StagingPool(pageable, 2 * num_bytes)
    baseline = pageable(num_bytes)
    np.frombuffer(baseline, np.uint8)[:] = 0
    tree = CacheTree(FAMILY, host_bytes=0)
    configs = [PeerConfig()]
    if sender.keys is not None:
        own, theirs = str(sender.keys / "receiver.key"), str(sender.keys / "sender.pub")
        configs.append(PeerConfig(key_file=own, server_key=theirs))
    peers = [
        Peer(tree, Location(address), config)
        for address, config in zip(sender.addresses, configs, strict=True)
    ]
    for peer in peers:
        assert peer.wait_ready(10), peer.error
    connection = socket.create_connection(("127.0.0.1", sender.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(allocate: Callable[[int], memoryview], peer: Peer) -> list[memoryview]:
        staging = Staging(sizes, Deadline.after(60), allocate)
        peer.fetch(MODEL, pages_of(num_pages), staging)
        for step in STEPS:
            staging.wait(step)
        return [staging.view(step) for step in STEPS]

    def tcp() -> list[memoryview]:
        connection.sendall(b"x")
        at = 0
        while at < num_bytes:
            at += connection.recv_into(baseline[at : at + TCP_CHUNK_BYTES])
        return [baseline]

    contenders: dict[str, Callable[[], list[memoryview]]] = {
        "raw TCP": tcp,
        "transport, pooled": lambda: fetch(pool.allocate, peers[0]),
        "transport, fresh": lambda: fetch(pageable, peers[0]),
    }
    if sender.keys is not None:
        contenders["transport, CURVE"] = lambda: fetch(pool.allocate, peers[1])
    digests = {name: _digest(run()) for name, run in contenders.items()}  # Also the warm-up.
    assert len(set(digests.values())) == 1, f"the contenders brought different bytes: {digests}"
    measured = {name: Measured() for name in contenders}
    for _ in range(repetitions):
        for name, run in contenders.items():
            begun_at_s, cpu_s = time.perf_counter(), sender.cpu_s()
            run()
            measured[name].gb_per_s.append(num_bytes / (time.perf_counter() - begun_at_s) / 1e9)
            measured[name].cpu_s_per_gb.append((sender.cpu_s() - cpu_s) / num_bytes * 1e9)
    for peer in peers:
        peer.close()
    connection.close()
    return measured


def _digest(views: list[memoryview]) -> str:
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="payload of one fetch")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--curve", action="store_true", help="also with encryption")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_pages = max(1, (args.mib << 20) // sum(sizes_of(1).values()))
    if args.serve:
        serve(num_pages, args.keys)
        return
    with contextlib.ExitStack() as stack:
        keys = None
        if args.curve:
            keys = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name in ("sender", "receiver"):
                write_key_pair(keys, name)
        measured = _run(args, num_pages, keys)
    _report(args.mib, measured)


def _run(args: argparse.Namespace, num_pages: int, keys: Path | None) -> dict[str, Measured]:
    command = [sys.executable, __file__, "--serve", "--mib", str(args.mib)]
    if keys is not None:
        command += ["--keys", str(keys)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdout is not None
        addresses, port = json.loads(sender.stdout.readline())
        other = Sender(sender.pid, addresses, port, keys)
        measured = measure(num_pages, args.repetitions, other)
        sender.communicate("")
    return measured


def _report(payload_mib: int, measured: dict[str, Measured]) -> None:
    rates = {name: it.gb_per_s for name, it in measured.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    cpu = {name: statistics.median(it.cpu_s_per_gb) for name, it in measured.items()}
    ratios = [
        ours / tcp for ours, tcp in zip(rates["transport, pooled"], rates["raw TCP"], strict=True)
    ]
    print(f"{'':24} {'GB/s median':>12} {'min':>6} {'max':>6}  of raw TCP  CPU s/GB")
    for name, values in rates.items():
        share = medians[name] / medians["raw TCP"]
        print(
            f"{name:24} {medians[name]:12.2f} {min(values):6.2f} {max(values):6.2f} {share:11.2f}"
            f" {cpu[name]:9.2f}"
        )
    result = {
        "benchmark": "transport",
        "payload_mib": payload_mib,
        "gb_per_s": medians,
        "cpu_s_per_gb": cpu,
        "pooled_of_raw_tcp": statistics.median(ratios),
        "load_1m": os.getloadavg()[0],
        "cpus": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
        "commit": _commit(),
    }
    print(json.dumps(result))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
