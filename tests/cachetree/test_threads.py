"""A thread that ends with an error wakes its waiters at once."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Iterator

import pytest
from transport_parts import begun, eventually, new_tree, pages_of, peer_of, store, worker_of

from cachetree import FetchError, PeerState, WorkerThread
from cachetree.tier import lower_priority
from cachetree.transport import send_queue
from cachetree.transport.address import parse_remote
from cachetree.transport.frames import Frame, Unsealed

PAGES = pages_of(4)


class Item:
    """An item that can be lost."""


def breaking(items: Iterator[object]) -> None:
    for number, _ in enumerate(items):
        if number == 1:
            raise RuntimeError("a test")


def test_items_of_a_failed_thread_fail_at_once(caplog):
    failed: list[tuple[int, str]] = []
    thread = WorkerThread(
        "a-thread", breaking, fail=lambda it, error: failed.append((it, str(error)))
    )
    for number in range(4):
        assert thread.put(number)
    assert thread.close(10)
    assert failed == [(number, "a test") for number in (1, 2, 3)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "a-thread" in line and "a test" in line


def test_a_thread_that_waits_keeps_nothing_of_what_it_took():
    def take(items: Iterator[Item]) -> None:
        for item in items:
            del item

    thread, item = WorkerThread("a-thread", take), Item()
    known = weakref.ref(item)
    thread.put(item)
    del item
    eventually(lambda: known() is None, 5)
    thread.close(10)


def test_a_system_without_priorities_ends_no_thread(monkeypatch):
    monkeypatch.delattr("os.SCHED_BATCH")
    monkeypatch.setattr("os.setpriority", lambda *_: None)
    lower_priority()


def test_a_connection_whose_sender_ends_is_over(monkeypatch):
    monkeypatch.setattr(send_queue, "lower_priority", lambda: 1 / 0)
    near, far = socket.socketpair()
    with near, far:
        woken = threading.Event()
        queue = send_queue.SendQueue(near, Unsealed(), woken.set)
        queue.put(Frame(id=1, offset=0, size=1, checksum=0), [memoryview(b"1")])
        assert woken.wait(10)
        assert queue.error is not None and queue.has_written(queue.queued_bytes)
        queue.close()


@pytest.mark.parametrize("part", ["_view.forget", "_pulls.interrupt", "_breaker.failed"])
def test_a_peer_whose_thread_ends_fails_its_fetches(part, monkeypatch, caplog):
    reader = new_tree()
    with worker_of(new_tree()) as worker, peer_of(worker.address, reader) as peer:
        owner, _, name = part.partition(".")
        monkeypatch.setattr(getattr(peer, owner), name, lambda *_, **__: 1 / 0)
        monkeypatch.setattr(peer, "_turn", lambda *_: 1 / 0)
        staging = begun(peer, PAGES)
        eventually(lambda: peer.state is PeerState.CLOSED)
        eventually(lambda: staging.error is not None)
        assert isinstance(begun(peer, PAGES).error, FetchError)
    assert any(f"peer {worker.address}: its thread has ended" in it for it in caplog.messages)


def test_a_worker_whose_thread_ends_cuts_its_peers_off(monkeypatch, caplog):
    tree, reader = new_tree(), new_tree()
    store(tree, PAGES)
    with worker_of(tree) as worker, peer_of(worker.address, reader) as peer:
        eventually(lambda: reader.match(PAGES))
        scheduler = worker._service.scheduler
        for name in ("send", "retire", "close"):
            monkeypatch.setattr(scheduler, name, lambda: 1 / 0)
        eventually(lambda: peer.state is not PeerState.READY, 5)
        eventually(lambda: not reader.match(PAGES), 5)
        eventually(lambda: not worker._thread.is_alive(), 5)
        port = parse_remote(worker.address, field="").port
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
    assert any("its thread has ended" in it for it in caplog.messages)
