"""Entries that outlive their engine: pushed to a worker, kept there, read back by others."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
from security_parts import Party, new_party
from transport_parts import (
    E_LAYER,
    FAMILY,
    FAST,
    MODEL,
    PAGE_BYTES,
    STEPS,
    check_content,
    content,
    eventually,
    new_tree,
    pages_of,
    store,
    wait_all,
    worker_of,
)

from cachetree import (
    Cache,
    CacheConfig,
    CacheTree,
    ConfigError,
    Deadline,
    Kind,
    Location,
    ModelId,
    PageHash,
    Plan,
    Span,
    Step,
    Worker,
    WorkerConfig,
)
from cachetree.checksum import checksum
from cachetree.transport import Status, ask_status, wire

PAGES = pages_of(64)
PAGE_TOTAL = (FAMILY.num_layers + 1) * PAGE_BYTES
ACCEPTS = WorkerConfig(accepts=True)


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


def has(cache: Cache, location: Location, num_pages: int) -> Callable[[], bool]:
    return lambda: any(
        (match.location, match.num_pages) == (location, num_pages) for match in cache.match(PAGES)
    )


def num_pushed(cache: Cache, **counts: int) -> Callable[[], bool]:
    def are() -> bool:
        (status,) = cache.status().stores
        return all(getattr(status, f"num_{name}") == num for name, num in counts.items())

    return are


def status_of(cache: Cache) -> Status:
    status = cache.status().worker
    assert status is not None
    return status


def test_what_comes_into_a_cache_goes_to_its_worker_in_order() -> None:
    with cache_of(worker=ACCEPTS) as worker:
        assert worker.address
        with at_worker(worker.address) as cache:
            store(cache.tree, PAGES[:20])
            store(cache.tree, PAGES)
            eventually(num_pushed(cache, stored=2, waiting=0))
            assert worker.tree.num_bytes == 64 * PAGE_TOTAL
            assert cache.status().stores[0].num_pushed_bytes == 64 * PAGE_TOTAL
            eventually(has(cache, worker.address, 64))
        with cache_of(peers=(worker.address,), serves=False) as other:
            assert other.wait_ready(5)
            fetched(other, worker.address, PAGES)


def test_several_caches_share_one_copy() -> None:
    with cache_of(worker=ACCEPTS) as worker:
        assert worker.address
        with at_worker(worker.address) as one, at_worker(worker.address) as two:
            store(one.tree, PAGES[:40])
            eventually(num_pushed(one, stored=1))
            store(two.tree, PAGES[:40])
            eventually(num_pushed(two, known=1, pushed_bytes=0))
            store(two.tree, PAGES)
            eventually(num_pushed(two, stored=1, pushed_bytes=24 * PAGE_TOTAL))
            assert worker.tree.num_bytes == 64 * PAGE_TOTAL


def test_a_worker_that_lost_the_beginning_is_given_it_again() -> None:
    with cache_of(worker=ACCEPTS) as worker:
        assert worker.address
        with at_worker(worker.address) as cache:
            store(cache.tree, PAGES[:20])
            store(cache.tree, PAGES[:40])
            eventually(num_pushed(cache, stored=2))
            worker.tree.clear()
            store(cache.tree, PAGES)
            eventually(num_pushed(cache, stored=5, waiting=0))
            fetched(cache, worker.address, PAGES)


def test_what_left_memory_before_its_turn_is_skipped() -> None:
    with cache_of(worker=ACCEPTS) as worker:
        address = worker.address
    assert address
    with at_worker(address) as cache:
        store(cache.tree, PAGES[:20])
        eventually(lambda: cache.status().stores[0].error)
        cache.tree.clear()
        with cache_of(worker=WorkerConfig(accepts=True, listen=address)):
            eventually(num_pushed(cache, gone=1, waiting=0, stored=0))


def test_everything_is_offered_again_to_a_worker_that_was_restarted() -> None:
    with cache_of(worker=ACCEPTS) as worker:
        address = worker.address
        assert address
        with at_worker(address) as cache:
            store(cache.tree, PAGES[:20])
            eventually(num_pushed(cache, stored=1))
            worker.close()
            with cache_of(worker=WorkerConfig(accepts=True, listen=address)) as second:
                store(cache.tree, PAGES[:40])
                eventually(lambda: second.tree.num_pages == 40)
                assert cache.status().stores[0].num_restarts == 1


def test_too_many_changes_lead_to_a_new_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachetree.transport.push._MAX_WAITING", 4)
    with cache_of(worker=ACCEPTS) as worker:
        address = worker.address
    assert address
    with at_worker(address) as cache:
        for num in range(2, 64, 2):
            store(cache.tree, PAGES[:num])
        with cache_of(worker=WorkerConfig(accepts=True, listen=address)) as worker:
            eventually(lambda: worker.tree.num_pages == 62)


def test_a_worker_that_accepts_nothing_is_told_nothing() -> None:
    with cache_of() as worker:
        assert worker.address
        with at_worker(worker.address) as cache:
            store(cache.tree, PAGES)
            eventually(num_pushed(cache, refused=1, pushed_bytes=0, waiting=0))
            assert "accepts" in cache.status().stores[0].error
            assert worker.tree.num_bytes == 0


def test_a_worker_without_room_refuses_and_stays_within_its_budget() -> None:
    with cache_of(worker=ACCEPTS, host_bytes=10 * PAGE_TOTAL) as worker:
        assert worker.address
        with at_worker(worker.address) as cache:
            store(cache.tree, PAGES[:20])
            eventually(num_pushed(cache, refused=1, pushed_bytes=0, waiting=0))
            assert worker.tree.num_bytes == 0


def test_only_those_with_an_allowed_key_can_store(tmp_path: Path) -> None:
    us, friend, stranger = (new_party(tmp_path, name) for name in ("us", "friend", "stranger"))
    settings = msgspec.convert({"accepts": True, **us.serving(friend)}, WorkerConfig)
    with cache_of(worker=settings) as worker:
        assert worker.address

        def pushing(party: Party) -> contextlib.AbstractContextManager[Cache]:
            peer = msgspec.structs.replace(FAST, key_file=party.key_file)
            keys = {worker.address: us.public_file}
            return at_worker(worker.address, peer=peer, peer_keys=keys)  # type: ignore[arg-type]

        with pushing(stranger) as cache:
            store(cache.tree, PAGES)
            eventually(lambda: "allowed_peers" in cache.status().stores[0].error)
            assert worker.tree.num_bytes == 0
        with pushing(friend) as cache:
            store(cache.tree, PAGES)
            eventually(num_pushed(cache, stored=1))
            fetched(cache, worker.address, PAGES)


def test_stores_must_be_among_the_peers() -> None:
    with pytest.raises(ConfigError, match=r"stores has tcp://127\.0\.0\.1:2"):
        CacheConfig(peers=("tcp://127.0.0.1:1",), stores=("tcp://127.0.0.1:2",))


# The worker's side, seen by a peer that may break the protocol.


class RawPeer:
    """Says what it is told to, and nothing else."""

    def __init__(self, worker: Worker) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(worker.address)
        self.send(wire.hello(FAMILY, "", 0))
        assert isinstance(self.receive(), wire.Hello)

    def send(self, message: wire.ToWorker, *payload: bytes) -> None:
        self._socket.send_multipart([wire.encode(message), *payload])

    def receive(self) -> wire.ToPeer:
        assert self._socket.poll(5000), "no answer"
        return wire.decode_to_peer(memoryview(self._socket.recv()))

    def ask(self, message: wire.ToWorker, *payload: bytes) -> wire.ToPeer:
        self.send(message, *payload)
        return self.receive()

    def frame(self, step: int, payload: bytes, id: int = 1, offset: int = 0) -> wire.ToPeer:
        header = wire.Frame(
            id=id, step=step, offset=offset, size=len(payload), checksum=checksum(payload)
        )
        return self.ask(header, payload)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


def new_store(pages: Sequence[PageHash] = PAGES[:2], **other: object) -> wire.Store:
    fields = {
        "id": 1,
        "model": MODEL,
        "parent": b"",
        "pages": wire.join_pages(pages),
        "e_layers": (E_LAYER,),
        "timeout_ms": 5000,
        **other,
    }
    return wire.Store(**fields)  # type: ignore[arg-type]


def payload_of(step: Step) -> bytes:
    return b"".join(content(page, step) for page in PAGES[:2])


@contextlib.contextmanager
def accepting(**config: object) -> Iterator[tuple[CacheTree, RawPeer]]:
    tree = new_tree()
    with worker_of(tree, accepts=True, **config) as worker, RawPeer(worker) as peer:
        yield tree, peer


def test_nothing_is_seen_of_a_store_before_its_last_byte() -> None:
    steps = [*(Step(Kind.KV, layer) for layer in range(4)), Step(Kind.E, E_LAYER)]
    with accepting() as (tree, peer):
        wanted = peer.ask(new_store())
        assert isinstance(wanted, wire.Wanted)
        assert (wanted.skipped, tree.num_bytes) == (0, 2 * PAGE_TOTAL)
        for number, step in enumerate(steps[:-1]):
            answer = peer.frame(number, payload_of(step))
            assert answer == wire.Credit(id=1, num_bytes=(number + 1) * 2 * PAGE_BYTES)
            assert not tree.match(PAGES)
        assert peer.frame(4, payload_of(steps[-1])) == wire.Stored(id=1)
        lease = tree.lease(MODEL, PAGES[:2], "test", Deadline.after(5))
        assert lease is not None
        for step in STEPS:
            views = lease.e(step.layer) if step.kind is Kind.E else lease.kv(step.layer)
            assert b"".join(views) == payload_of(step)
        assert peer.ask(new_store(id=2)) == wire.Wanted(
            id=2, skipped=2, frame_bytes=wanted.frame_bytes, window_bytes=wanted.window_bytes
        )


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda frame: msgspec.structs.replace(frame, checksum=1), "checksum"),
        (lambda frame: msgspec.structs.replace(frame, step=1), "step 1"),
        (lambda frame: msgspec.structs.replace(frame, offset=8), "at 8"),
    ],
)
def test_a_wrong_frame_ends_its_store_and_gives_back_the_room(
    spoil: Callable[[wire.Frame], wire.Frame], named: str
) -> None:
    payload = payload_of(Step(Kind.KV, 0))
    frame = wire.Frame(id=1, step=0, offset=0, size=len(payload), checksum=checksum(payload))
    with accepting() as (tree, peer):
        assert isinstance(peer.ask(new_store()), wire.Wanted)
        refused = peer.ask(spoil(frame), payload)
        assert isinstance(refused, wire.StoreRefused)
        assert refused.error == "protocol"
        assert named in refused.reason
        assert tree.num_bytes == 0
        peer.send(frame, payload)  # Under way when the refusal came.
        assert isinstance(peer.ask(wire.Ping()), wire.Pong)


def test_a_frame_larger_than_its_step_is_refused() -> None:
    with accepting() as (tree, peer):
        peer.ask(new_store())
        refused = peer.frame(0, bytes(2 * PAGE_BYTES + 1))
        assert isinstance(refused, wire.StoreRefused)
        assert "does not fit" in refused.reason
        assert tree.num_bytes == 0


def test_a_store_ends_with_its_peer_its_time_or_its_will() -> None:
    with accepting() as (tree, peer):
        assert isinstance(peer.ask(new_store(timeout_ms=50)), wire.Wanted)
        assert tree.num_bytes
        late = peer.receive()
        assert isinstance(late, wire.StoreRefused)
        assert (late.error, tree.num_bytes) == ("deadline", 0)

        assert isinstance(peer.ask(new_store(id=2)), wire.Wanted)
        peer.send(wire.Cancel(id=2))
        assert isinstance(peer.ask(wire.Ping()), wire.Pong)
        assert tree.num_bytes == 0

        assert isinstance(peer.ask(new_store(id=3)), wire.Wanted)
        peer.send(wire.Bye(reason="test"))
        eventually(lambda: tree.num_bytes == 0)


def test_a_peer_that_is_gone_leaves_no_reservation() -> None:
    tree = new_tree()
    with worker_of(tree, accepts=True) as worker:
        with RawPeer(worker) as peer:
            assert isinstance(peer.ask(new_store()), wire.Wanted)
            assert worker.status().num_open_stores == 1
        eventually(lambda: tree.num_bytes == 0)
        assert worker.status().num_open_stores == 0


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (new_store(e_layers=(7,)), "protocol"),
        (new_store(e_layers=(2, 1)), "protocol"),
        (new_store(pages=()), "protocol"),
        (new_store(pages=(PAGES[0], PAGES[0])), "protocol"),
        (new_store(model=""), "protocol"),
        (new_store(parent=PAGES[9]), "unknown_parent"),
        (new_store(pages=pages_of(50_000, "large")), "no_room"),
    ],
    ids=["no such layer", "order", "no pages", "twice", "no model", "parent", "too large"],
)
def test_a_store_that_cannot_be_is_refused(message: wire.Store, error: str) -> None:
    with accepting() as (tree, peer):
        refused = peer.ask(message)
        assert isinstance(refused, wire.StoreRefused)
        assert refused.error == error
        assert tree.num_bytes == 0


def test_open_stores_are_bounded_for_each_peer_and_in_all() -> None:
    def answers(peer: RawPeer, num: int) -> list[str]:
        stores = (new_store([page], id=i) for i, page in enumerate(PAGES[:num], 1))
        return [getattr(peer.ask(it), "error", "wanted") for it in stores]

    with accepting() as (_, peer):
        assert answers(peer, 5) == ["wanted"] * 4 + ["busy"]
    with accepting(max_stores=2) as (_, peer):
        assert answers(peer, 3) == ["wanted"] * 2 + ["busy"]


def test_a_payload_that_belongs_to_no_frame_ends_the_session() -> None:
    with accepting() as (_, peer):
        assert isinstance(peer.ask(wire.Ping(), b"more"), wire.Bye)


# With processes.


@contextlib.contextmanager
def served(folder: Path, listen: str = "tcp://127.0.0.1:0") -> Iterator[tuple[object, Location]]:
    """`cachetree serve` with a disk, as an operator starts it."""
    config = folder / "serve.yaml"
    cache = {
        "host_bytes": 64 << 20,
        "disk_path": str(folder / "disk"),
        "disk_bytes": 128 << 20,
        "worker": {"listen": listen},
    }
    config.write_text(json.dumps({"family": msgspec.to_builtins(FAMILY), "cache": cache}))
    command = [sys.executable, "-m", "cachetree.cli", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Location(process.stdout.readline().split()[-1])
        finally:
            process.kill()


def test_entries_outlive_the_engine_that_made_them_and_the_worker_too(tmp_path: Path) -> None:
    with served(tmp_path) as (process, address):
        engine = [sys.executable, __file__, address]
        with subprocess.Popen(engine, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == "pushed\n"
            first.kill()
        with cache_of(peers=(address,), serves=False) as second:
            assert second.wait_ready(5)
            fetched(second, address, PAGES)
        process.send_signal(signal.SIGTERM)  # type: ignore[attr-defined]
        assert process.wait(10) == 0  # type: ignore[attr-defined]
    with served(tmp_path) as (_, address), cache_of(peers=(address,), serves=False) as third:
        assert third.wait_ready(5)
        eventually(has(third, address, 64))
        fetched(third, address, PAGES)
        assert ask_status(address, timeout_s=5).num_received_bytes == 0


def _engine(address: Location) -> None:
    with at_worker(address) as cache:
        store(cache.tree, PAGES)
        eventually(num_pushed(cache, stored=1))
        print("pushed", flush=True)
        signal.pause()


if __name__ == "__main__":
    _engine(Location(sys.argv[1]))
