"""A worker with many, slow or silent receivers: equal shares, bounded memory, bounded time.

Run as a script, this file is a worker of many short runs. It prints its memory for every line that
it reads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec
import pytest
from fault_proxy import Fault, FaultProxy, Strike, Towards, Via
from transport_parts import (
    FAST,
    MODEL,
    PAGE_BYTES,
    RawPeer,
    begun,
    check_content,
    eventually,
    new_memory,
    new_staging,
    new_tree,
    pages_of,
    peer_of,
    store,
    worker_of,
)

from cachetree import CacheTree, Location, Worker, WorkerConfig
from cachetree.transport import wire
from cachetree.transport.advertise import Advert, Advertiser, ChangeQueue, RemoteView
from cachetree.transport.channel import Channel
from cachetree.transport.frames import MESSAGE, Frame, Unsealed
from cachetree.tree import Change

PAGES = pages_of(256)
NUM_BYTES = 4 * 256 * PAGE_BYTES


def counting(worker: Worker) -> Counter[str]:
    """Return the payload bytes that each peer got while bytes for both were waiting."""
    total: Counter[str] = Counter()
    sent: Counter[str] = Counter()

    def count(name: str, channel: Channel) -> None:
        put = channel.put

        def counted(frame: Frame, payload: Sequence[memoryview]) -> None:
            put(frame, payload)
            if frame.id != MESSAGE:
                total[name] += frame.size
                if len(total) == 2 and NUM_BYTES not in total.values():
                    sent[name] += frame.size

        channel.put = counted  # type: ignore[method-assign]

    for session in worker._sessions:
        count(session.name, session.channel)
    return sent


@pytest.mark.parametrize("frame_bytes", [64 << 10, 4096])
def test_two_receivers_get_equal_shares_also_with_other_frames(frame_bytes):
    """The cap keeps both connections free, so only the worker decides which peer is next."""
    other = msgspec.structs.replace(FAST, frame_bytes=frame_bytes)
    with (
        worker_of(new_tree(PAGES), max_bytes_per_s=10e6) as worker,
        peer_of(worker.address, new_tree()) as first,
        peer_of(worker.address, new_tree(), other) as second,
    ):
        sent = counting(worker)
        stagings = [new_staging(256), new_staging(256)]
        for peer, staging in zip((first, second), stagings, strict=True):
            peer.fetch(MODEL, PAGES, staging)
        for staging in stagings:
            check_content(staging, PAGES)
    assert len(sent) == 2
    assert max(sent.values()) > NUM_BYTES // 4
    assert min(sent.values()) >= 0.8 * max(sent.values())


# Memory: every frame of this worker is joined from short runs. So copies of queued frames would
# show in its memory.

NUM_LARGE = 4096
LARGE_BYTES = 4 * NUM_LARGE * PAGE_BYTES
SLACK_BYTES = 8 << 20
"""Bytes allowed for an allocator and the sessions: an eighth of the bytes that a slow receiver does
not get."""


class MeteredWorker:
    """A worker process that reports its memory."""

    def __init__(self, process: Popen[str]) -> None:
        self._process = process
        self.address = Location(self._read())

    def resident_bytes(self) -> int:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return int(self._read())

    def _read(self) -> str:
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def metered_worker() -> Iterator[MeteredWorker]:
    command = [sys.executable, str(Path(__file__))]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            yield MeteredWorker(process)
        finally:
            process.kill()


@pytest.mark.long
@pytest.mark.parametrize("fault", [Fault.THROTTLE, Fault.STALL])
def test_a_slow_receiver_takes_no_memory(fault):
    """Bytes that the kernel does not accept stay in the arena, without a copy."""
    with (
        metered_worker() as worker,
        FaultProxy(worker.address, seed=0) as proxy,
        peer_of(proxy.address, new_tree()) as peer,
    ):
        before = worker.resident_bytes()
        proxy.arm(Strike(fault, Towards.PEER, 0, Via.DATA))
        staging = begun(peer, pages_of(NUM_LARGE), seconds=60)
        eventually(lambda: proxy.has_struck)
        measured = []
        for _ in range(15):
            measured.append(worker.resident_bytes())
            time.sleep(0.1)
        assert staging.num_landed_bytes < LARGE_BYTES // 4, "the receiver was not slow"
        staging.cancel()
        assert max(measured) - before < SLACK_BYTES


def test_a_full_queue_of_adverts_ends_in_a_new_snapshot():
    """Whatever was dropped, the view is right whenever it is complete, and it becomes complete in
    the end."""
    source, tree = new_tree(PAGES[:1]), new_tree()
    advertiser = Advertiser(source, max_pending=3, wake=lambda: None, clock=time.monotonic)
    view = RemoteView(tree, Location("tcp://worker:1"))
    adverts: list[Advert] = []

    def tell(num: int) -> None:
        for _ in range(num):
            if (advert := advertiser.next()) is None:
                break
            view.apply(advert)
            adverts.append(advert)

    tell(99)
    assert adverts.count(wire.Reset()) == 1
    for stop in range(2, 65):
        store(source, PAGES[stop - 1 : stop], PAGES[stop - 2])
        if stop % 16 == 0:
            tell(stop // 16)  # Slow: some of it only, then many more changes.
    tell(99)
    assert adverts.count(wire.Reset()) > 1
    assert wire.Synced() in adverts[-adverts[::-1].index(wire.Reset()) :]
    assert tree.match(PAGES)[0].num_pages == 64
    advertiser.close()


def test_pages_that_left_while_changes_were_dropped_are_forgotten():
    source, tree, others = new_tree(PAGES[:8]), new_tree(), pages_of(3, "others ")
    advertiser = Advertiser(source, max_pending=1, wake=lambda: None, clock=time.monotonic)
    view = RemoteView(tree, Location("tcp://worker:1"))
    for advert in iter(advertiser.next, None):
        view.apply(advert)
    assert tree.match(PAGES[:8])[0].num_pages == 8
    source.evict()
    store(source, others)
    for advert in iter(advertiser.next, None):
        view.apply(advert)
    assert not tree.match(PAGES[:8])
    assert tree.match(others)[0].num_pages == 3
    advertiser.close()


def test_after_changes_were_dropped_the_next_ones_are_told_once_from_a_new_snapshot_on():
    tree = new_tree()
    changes = ChangeQueue(tree, max_changes=2, wake=lambda: None)
    assert not list(changes.restart())
    for number in range(3):
        store(tree, pages_of(1, f"{number} "))
    assert changes.has_overflowed and not changes.take()
    assert num_told(changes.restart()) == 3
    store(tree, pages_of(1, "3 "))
    assert num_told(changes.take()) == 1 and not changes.has_overflowed
    changes.close()


def num_told(changes: Iterable[Change]) -> int:
    """Count the pages of all changes. Asserts that no change comes twice."""
    parts = [(it.pages, it.part) for it in changes]
    assert len(parts) == len({*parts})
    return len({pages for pages, _ in parts})


def accepted_at(port: int) -> Iterator[socket.socket]:
    """Copies of this process's TCP sockets that a listener on `port` accepted."""
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_socket():
            with socket.socket(fileno=os.dup(int(descriptor.name))) as copy:
                is_tcp = copy.family == socket.AF_INET
                if is_tcp and copy.getsockname()[1] == port and is_connected(copy):
                    yield copy


def is_connected(one: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return bool(one.getpeername())
    return False


def test_a_peer_that_vanishes_from_the_network_is_bounded_by_the_kernel():
    """Two connections end: the one for questions, and the one of its session."""
    with worker_of(new_tree(), silence_s=6.0) as worker, RawPeer(worker.address) as peer:
        ports = [int(worker.address.rpartition(":")[2]), peer.channel._socket.getpeername()[1]]
        accepted = {
            (
                port,
                it.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                it.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                it.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                it.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                it.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
            )
            for port in ports
            for it in accepted_at(port)
        }
        assert accepted == {(port, 6000, 1, 3, 1, 3) for port in ports}


def test_messages_that_nobody_reads_are_few():
    """Messages for a peer that does not read are limited. The kernel buffers some MiB more, and
    then the connection ends."""
    message = bytes(64 << 10)
    near, far = socket.socketpair()
    near.setblocking(False)
    with far, contextlib.closing(Channel(near, Unsealed(), lambda: None)) as channel:
        num = 0
        while channel.error is None:
            channel.put_message(message)
            num += 1
            assert num < 2000
        assert "does not read" in str(channel.error)
        assert not channel.has_room


def _serve() -> None:
    pages = pages_of(NUM_LARGE)
    tree = CacheTree(new_tree().family, host_bytes=256 << 20, memory=new_memory())
    for at, page in enumerate(pages):
        store(tree, [page], pages[at - 1] if at else None)
    worker = Worker(tree, WorkerConfig())
    print(worker.address, flush=True)
    for _ in sys.stdin:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        print(num_pages * os.sysconf("SC_PAGE_SIZE"), flush=True)


if __name__ == "__main__":
    _serve()
