"""How much of a plain TCP connection's bandwidth does the transport keep?

    python benchmarks/transport.py [--mib 256] [--repetitions 7]

Physics: over loopback both move every byte twice through the kernel. The transport adds per frame
of 1 MiB two checksums (one per side, at memory speed), one copy from ZMQ's buffer into the staging
buffer, and one header; it saves the receiver's wait, because sending, receiving and placing are
three threads. The baseline is `sendall` / `recv_into` of the same bytes between the same two
processes into one prefaulted buffer, without checksums. "pooled" fetches into the memory of an
earlier fetch, which is what `Cache` does; "fresh" into newly allocated memory, to show the price
of its page faults.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

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


def serve(num_pages: int) -> None:
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
    worker = Worker(tree, WorkerConfig())
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps([worker.address, listener.getsockname()[1]]), flush=True)
    threading.Thread(target=_serve_tcp, args=(tree, num_pages, listener), daemon=True).start()
    sys.stdin.read()
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


def measure(num_pages: int, repetitions: int, address: str, port: int) -> dict[str, list[float]]:
    sizes = sizes_of(num_pages)
    num_bytes = sum(sizes.values())
    pool = StagingPool(pageable, 2 * num_bytes)
    baseline = pageable(num_bytes)
    np.frombuffer(baseline, np.uint8)[:] = 0
    tree = CacheTree(FAMILY, host_bytes=0)
    peer = Peer(tree, Location(address), PeerConfig())
    assert peer.wait_ready(10), peer.error
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(allocate: Callable[[int], memoryview]) -> list[memoryview]:
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
        "transport, pooled": lambda: fetch(pool.allocate),
        "transport, fresh": lambda: fetch(pageable),
    }
    digests = {name: _digest(run()) for name, run in contenders.items()}  # Also the warm-up.
    assert len(set(digests.values())) == 1, f"the contenders brought different bytes: {digests}"
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repetitions):
        for name, run in contenders.items():
            begun_at_s = time.perf_counter()
            run()
            rates[name].append(num_bytes / (time.perf_counter() - begun_at_s) / 1e9)
    peer.close()
    connection.close()
    return rates


def _digest(views: list[memoryview]) -> str:
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="payload of one fetch")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_pages = max(1, (args.mib << 20) // sum(sizes_of(1).values()))
    if args.serve:
        serve(num_pages)
        return
    command = [sys.executable, __file__, "--serve", "--mib", str(args.mib)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdout is not None
        address, port = json.loads(sender.stdout.readline())
        rates = measure(num_pages, args.repetitions, address, port)
        sender.communicate("")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [
        ours / tcp for ours, tcp in zip(rates["transport, pooled"], rates["raw TCP"], strict=True)
    ]
    print(f"{'':24} {'GB/s median':>12} {'min':>6} {'max':>6}  of raw TCP")
    for name, values in rates.items():
        share = medians[name] / medians["raw TCP"]
        print(
            f"{name:24} {medians[name]:12.2f} {min(values):6.2f} {max(values):6.2f} {share:11.2f}"
        )
    result = {
        "benchmark": "transport",
        "payload_mib": args.mib,
        "gb_per_s": medians,
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
