"""Pages that are read in place: only from the worker's own memory, only while they are held, or not
at all."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from transport_parts import (
    FAMILY,
    FAST,
    HOST_BYTES,
    MODEL,
    ONCE,
    PAGE_BYTES,
    PARTS,
    STEPS,
    RecordingStaging,
    ScriptedWorker,
    begun,
    check_content,
    eventually,
    eventually_free,
    fetch_all,
    new_tree,
    pages_of,
    peer_of,
    wait_all,
    worker_of,
    worker_process,
)

from cachetree import Deadline, FetchError, PeerState, ProtocolError, Step
from cachetree.ids import Kind
from cachetree.memory.arena import Arena
from cachetree.memory.copying import checksum
from cachetree.memory.slab import Blocks
from cachetree.transport import wire
from cachetree.transport.frames import Frame

PAGES = pages_of(16)
SIZE = 16 * PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena(HOST_BYTES)) as arena:
        yield arena


def inode_of(arena: Arena) -> int:
    return os.fstat(arena.file.fd).st_ino


def open_arenas() -> list[int]:
    """Return the inodes of the arenas, of this process or others, on which this process has
    descriptors."""
    inodes = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "memfd:cachetree" in str(link.readlink()):
                inodes.append(link.stat().st_ino)
    return inodes


def num_mappings(inode: int) -> int:
    return Path("/proc/self/maps").read_text().count(f" {inode} ")


class StalledStaging(RecordingStaging):
    """Staging in which the writer waits at the first frame."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(dict.fromkeys(STEPS, num_pages * PAGE_BYTES), Deadline.after(10))
        self.go_on = threading.Event()

    def room(self, step: Step, offset: int, size: int) -> memoryview:
        room = super().room(step, offset, size)
        self.go_on.wait()
        return room


@pytest.mark.parametrize(
    "wrong",
    [
        {"pid": 1 << 22},
        {"pid": 1},
        {"fd": 1 << 19},
        {"fd": -1},
        {"nonce": bytes(16)},
        {"nonce": b""},
        {"num_bytes": 1 << 20},
    ],
    ids=str,
)
def test_memory_of_another_process_than_the_worker_is_not_read(arena, wrong):
    source, inode = new_tree(PAGES, memory=arena), inode_of(arena)
    arena.file = msgspec.structs.replace(arena.file, **wrong)  # type: ignore[misc]
    with worker_of(source) as worker, peer_of(worker.address, new_tree()) as peer:
        assert not peer.status.shares_memory
        fetch_all(peer, PAGES)
        assert open_arenas().count(inode) == 1


def test_a_pipe_in_its_place_blocks_nobody(arena):
    source = new_tree(PAGES, memory=arena)
    read, write = os.pipe()
    arena.file = msgspec.structs.replace(arena.file, fd=read)  # type: ignore[misc]
    with worker_of(source) as worker, peer_of(worker.address, new_tree()) as peer:
        assert not peer.status.shares_memory
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("peers_choice", [False, True])
def test_either_side_can_switch_it_off(arena, peers_choice):
    source = new_tree(PAGES, memory=arena)
    config = msgspec.structs.replace(FAST, shared_memory=peers_choice)
    with (
        worker_of(source, shared_memory=not peers_choice) as worker,
        peer_of(worker.address, new_tree(), config) as peer,
    ):
        assert not peer.status.shares_memory
        fetch_all(peer, PAGES)


def test_a_connection_holds_one_mapping_and_no_descriptor(arena):
    source, inode = new_tree(PAGES, memory=arena), inode_of(arena)

    def num() -> tuple[int, int]:
        """Return the number of descriptors and of mappings."""
        return open_arenas().count(inode), num_mappings(inode)

    assert num() == (1, 1)
    with worker_of(source) as worker:
        for _ in range(3):
            with peer_of(worker.address, new_tree()) as peer:
                assert peer.status.shares_memory
                assert num() == (1, 2)
            eventually(lambda: num() == (1, 1))


def test_pages_stay_until_the_last_of_them_is_copied(arena):
    source = new_tree(PAGES, memory=arena)
    with worker_of(source) as worker, peer_of(worker.address, new_tree()) as peer:
        staging = StalledStaging(16)
        peer.fetch(MODEL, PAGES, staging)
        eventually(lambda: worker.status().num_sent_bytes == staging.num_bytes)
        eventually(lambda: worker.status().num_streams == 0)
        source.evict()
        assert source.num_pages == 16, "everything was located, and nothing read yet"
        staging.go_on.set()
        check_content(staging, PAGES)
        eventually_free(source)


def test_a_receiver_that_goes_frees_what_it_has_not_read(arena):
    source = new_tree(PAGES, memory=arena)
    with worker_of(source) as worker:
        with peer_of(worker.address, new_tree()) as peer:
            staging = StalledStaging(16)
            peer.fetch(MODEL, PAGES, staging)
            eventually(lambda: worker.status().num_sent_bytes == staging.num_bytes)
            staging.cancel()
            staging.go_on.set()
        eventually_free(source)


def test_memory_used_anew_while_it_is_read_is_an_error_and_no_content(arena):
    source = new_tree(PAGES, memory=arena)
    lease = source.lease(MODEL, PAGES, "test", Deadline.after(60), PARTS)
    with worker_of(source) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        staging = StalledStaging(16)
        peer.fetch(MODEL, PAGES, staging)
        eventually(lambda: staging.writes)
        for run in lease.views(STEPS[0]):
            np.frombuffer(run, np.uint8)[5] ^= 1
        staging.go_on.set()
        with pytest.raises(ProtocolError, match="checksum"):
            wait_all(staging)
        assert staging.num_landed_bytes == 0
        again = begun(peer, PAGES, steps=STEPS[1:])
        check_content(again, PAGES)


SOUND = wire.Located(frame=Frame(id=1, offset=0, size=SIZE, checksum=0), places=((0, SIZE),))


@pytest.mark.parametrize(
    "changed",
    [
        {"places": ((0, SIZE - 1),)},
        {"places": ()},
        {"places": ((0, SIZE), (8, 8))},
        {"places": ((SIZE, 0),)},
        {"places": ((-SIZE, 0),)},
        {"places": ((1 << 62, (1 << 62) + SIZE),)},
        {"places": ((0, (1 << 64) - 1),)},
        {"places": ((HOST_BYTES + 4096 - SIZE + 1, HOST_BYTES + 4096 + 1),)},
        {"checksum": 1},
        {"size": 2 * SIZE, "places": ((0, 2 * SIZE),)},
        {"offset": 1},
        {"offset": 9 * SIZE},
    ],
    ids=str,
)
def test_places_that_are_wrong_cost_that_fetch_only(arena, changed):
    loan = arena.take([Blocks(1, SIZE)])
    ((run,),) = loan.runs
    place, content = run.start, loan.memory[run.start : run.stop]
    right = {"checksum": checksum(content), "places": ((place, place + SIZE),)}

    def script(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        fields: dict[str, Any] = right | {"id": fetch.id} | changed
        places = fields.pop("places")
        frame = msgspec.structs.replace(SOUND.frame, **fields)
        worker.send(identity, wire.Located(frame=frame, places=places))

    with (
        ScriptedWorker(script, arena=arena.file) as worker,
        peer_of(worker.address, new_tree(), ONCE) as peer,
    ):
        staging = begun(peer, PAGES)
        with pytest.raises(ProtocolError):
            wait_all(staging)
        assert staging.num_landed_bytes == 0
        assert (peer.status.num_protocol_errors, peer.status.num_losses) == (1, 0)
        eventually(lambda: wire.Cancel(id=1) in worker.received)


def test_places_in_a_memory_that_is_not_read_are_an_error():
    def script(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        worker.send(identity, SOUND)

    with ScriptedWorker(script) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        staging = begun(peer, PAGES)
        with pytest.raises(ProtocolError, match="not read"):
            wait_all(staging)


def test_a_worker_that_is_killed_leaves_nothing_open():
    pages = pages_of(256)
    before = set(open_arenas())
    with worker_process(256, 1e6) as (process, address), peer_of(address, new_tree()) as peer:
        assert peer.status.shares_memory
        staging = begun(peer, pages, seconds=2)
        eventually(lambda: staging.writes)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(FetchError):
            wait_all(staging)
        assert peer.state is not PeerState.READY
        eventually(lambda: before.issuperset(open_arenas()))


def test_only_whoever_may_exchange_caches_is_told_where_the_memory_is(arena):
    context = zmq.Context()
    with worker_of(new_tree(PAGES, memory=arena)) as worker:
        for family, expected in (
            (FAMILY, arena.file),
            (msgspec.structs.replace(FAMILY, rope="other"), None),
        ):
            stranger = context.socket(zmq.DEALER)
            stranger.connect(worker.address)
            stranger.send(wire.encode(wire.hello(family, "", 0)))
            assert stranger.poll(20_000)
            hello = wire.decode_to_peer(memoryview(stranger.recv()))
            assert isinstance(hello, wire.Hello)
            assert hello.arena == expected
    context.destroy(linger=0)


def test_a_checksum_is_made_once_and_finds_what_changes_later(arena):
    source = new_tree(PAGES, memory=arena)
    with worker_of(source) as worker, peer_of(worker.address, new_tree(), ONCE) as peer:
        for _ in range(2):
            staging = fetch_all(peer, PAGES)
        lease = source.lease(MODEL, PAGES, "test", Deadline.after(10), PARTS)
        slabs = {slab for step in STEPS for slab, _ in lease.runs(step)}
        assert sum(len(slab.checksums) for slab in slabs) == len(STEPS)
        (view,) = lease.views(Step(Kind.KV, 0))
        view[100] ^= 1
        staging = begun(peer, PAGES)
        with pytest.raises(ProtocolError, match="checksum"):
            wait_all(staging)
