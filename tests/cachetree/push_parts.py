"""Caches that push to a worker, and a peer that may break the protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import msgspec
import zmq
from transport_parts import (
    E_LAYER,
    FAMILY,
    FAST,
    MODEL,
    PAGE_BYTES,
    check_content,
    data_connection,
    eventually,
    flushed,
    pages_of,
    wait_all,
)

from cachetree import (
    Cache,
    CacheConfig,
    Deadline,
    Location,
    ModelId,
    PageHash,
    Plan,
    Span,
    Worker,
)
from cachetree.memory.copying import checksum
from cachetree.transport import wire
from cachetree.transport.frames import Frame
from cachetree.tree import join_hashes

PAGES = pages_of(64)
PAGE_TOTAL = (FAMILY.num_layers + 1) * PAGE_BYTES


@contextlib.contextmanager
def cache_of(**config: object) -> Iterator[Cache]:
    settings = {"host_bytes": 64 << 20, "peer": FAST, **config}
    with Cache(FAMILY, msgspec.convert(settings, CacheConfig)) as cache:
        yield cache


def at_worker(address: Location, **config: object) -> contextlib.AbstractContextManager[Cache]:
    """A cache that pushes to a worker and reads from it."""
    return cache_of(peers=(address,), stores=(address,), serves=False, **config)


def fetched(cache: Cache, location: Location, pages: Sequence[PageHash]) -> None:
    """Fetch from there and compare every byte."""
    plan = Plan(
        sender=MODEL,
        receiver=ModelId("receiver"),
        location=location,
        pages=Span(0, len(pages)),
        block=Span(E_LAYER, E_LAYER + 1),
        num_layers=FAMILY.num_layers,
    )
    staging = cache.fetch(plan, pages, Deadline.after(5))
    assert staging is not None
    with staging:
        wait_all(staging)
        check_content(staging, pages)


def num_pushed(cache: Cache, **counts: int) -> Callable[[], bool]:
    def are() -> bool:
        (status,) = cache.status().stores
        return all(getattr(status, f"num_{name}") == num for name, num in counts.items())

    return are


class _Kept:
    """A sink of everything."""

    def __init__(self) -> None:
        self.payloads: list[memoryview] = []

    def buffer_for(self, frame: Frame) -> memoryview:
        self.payloads.append(memoryview(bytearray(frame.size)))
        return self.payloads[-1]

    def is_pending(self, frame: Frame) -> bool:
        return True


class RawPeer:
    """Says what it is told to, and nothing else."""

    def __init__(self, worker: Worker) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(worker.address)
        self.send(wire.hello(FAMILY, "", 0))
        self._channel = data_connection(self.receive())

    def send(self, message: wire.ToWorker) -> None:
        self._socket.send(wire.encode(message))

    def send_frame(self, frame: Frame, payload: bytes) -> None:
        self._channel.put(frame, [memoryview(payload)])
        flushed(self._channel)

    def receive(self) -> wire.ToPeer:
        assert self._socket.poll(20_000), "no answer"
        return wire.decode_to_peer(memoryview(self._socket.recv()))

    def ask(self, message: wire.ToWorker) -> wire.ToPeer:
        self.send(message)
        return self.receive()

    def ask_frame(self, frame: Frame, payload: bytes) -> wire.ToPeer:
        self.send_frame(frame, payload)
        return self.receive()

    def frame(self, step: int, payload: bytes, id: int = 1, offset: int = 0) -> wire.ToPeer:
        header = Frame(
            id=id, step=step, offset=offset, size=len(payload), checksum=checksum(payload)
        )
        return self.ask_frame(header, payload)

    def fetched(self, num_bytes: int) -> bytes:
        """The payloads of so many bytes that come next, in the order in which they come."""
        sink = _Kept()

        def has_come() -> bool:
            assert all(arrival.is_sound for arrival in self._channel.receive(sink))
            return sum(map(len, sink.payloads)) >= num_bytes

        eventually(has_come)
        return b"".join(sink.payloads)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._context.destroy(linger=0)


def new_store(pages: Sequence[PageHash] = PAGES[:2], **other: object) -> wire.Store:
    fields = {
        "id": 1,
        "model": MODEL,
        "parent": b"",
        "pages": join_hashes(pages),
        "e_layers": (E_LAYER,),
        "timeout_ms": 5000,
        **other,
    }
    return wire.Store(**fields)  # type: ignore[arg-type]
