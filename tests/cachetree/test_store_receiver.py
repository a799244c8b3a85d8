"""Stores seen by a worker whose peer may break the protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec
import pytest
from push_parts import PAGE_TOTAL, PAGES, new_store
from transport_parts import (
    E_LAYER,
    FAMILY,
    MODEL,
    PAGE_BYTES,
    STEPS,
    RawPeer,
    content,
    eventually,
    new_tree,
    pages_of,
    store,
    worker_of,
)

from cachetree import CacheTree, Deadline, Kind, Step
from cachetree.memory.copying import checksum
from cachetree.transport import wire
from cachetree.transport.frames import Frame
from cachetree.tree import join_hashes

STORED = (*(Step(Kind.KV, layer) for layer in range(4)), Step(Kind.E, E_LAYER))


def payload_of(step: Step) -> bytes:
    return b"".join(content(page, step) for page in PAGES[:2])


@contextlib.contextmanager
def accepting(**config: object) -> Iterator[tuple[CacheTree, RawPeer]]:
    tree = new_tree()
    with worker_of(tree, accepts=True, **config) as worker, RawPeer(worker.address) as peer:
        yield tree, peer


def test_nothing_is_seen_of_a_store_before_its_last_byte() -> None:
    with accepting() as (tree, peer):
        wanted = peer.ask(new_store())
        assert isinstance(wanted, wire.Wanted)
        assert (wanted.skipped, tree.num_bytes) == (0, 2 * PAGE_TOTAL)
        for number, step in enumerate(STORED[:-1]):
            peer.part(number * 2 * PAGE_BYTES, payload_of(step))
            assert not tree.match(PAGES)
        assert peer.frame(8 * PAGE_BYTES, payload_of(STORED[-1])) == wire.Stored(id=1)
        lease = tree.lease(MODEL, PAGES[:2], "test", Deadline.after(5))
        for step in STEPS:
            assert b"".join(lease.views(step)) == payload_of(step)
        assert peer.ask(new_store(id=2)) == wire.Wanted(id=2, skipped=2)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda frame: msgspec.structs.replace(frame, checksum=1), "checksum"),
        (lambda frame: msgspec.structs.replace(frame, offset=8), "byte 8"),
    ],
)
def test_a_wrong_frame_ends_its_store_and_gives_back_the_room(
    spoil: Callable[[Frame], Frame], named: str
) -> None:
    payload = payload_of(Step(Kind.KV, 0))
    frame = Frame(id=1, offset=0, size=len(payload), checksum=checksum(payload))
    with accepting() as (tree, peer):
        assert isinstance(peer.ask(new_store()), wire.Wanted)
        refused = peer.ask_frame(spoil(frame), payload)
        assert isinstance(refused, wire.Ended)
        assert refused.error == "protocol"
        assert named in refused.reason
        assert tree.num_bytes == 0
        peer.send_frame(frame, payload)  # Under way when the refusal came.
        assert isinstance(peer.ask(wire.Ping()), wire.Pong)


def test_a_frame_larger_than_its_step_is_refused() -> None:
    with accepting() as (tree, peer):
        peer.ask(new_store())
        refused = peer.frame(0, bytes(2 * PAGE_BYTES + 1))
        assert isinstance(refused, wire.Ended)
        assert "does not fit" in refused.reason
        assert tree.num_bytes == 0


def test_a_store_ends_with_its_peer_its_time_or_its_will() -> None:
    with accepting() as (tree, peer):
        assert isinstance(peer.ask(new_store(timeout_ms=50)), wire.Wanted)
        assert tree.num_bytes
        late = peer.receive()
        assert isinstance(late, wire.Ended)
        assert (late.error, tree.num_bytes) == ("deadline", 0)

        assert isinstance(peer.ask(new_store(id=2)), wire.Wanted)
        assert peer.ask(wire.Cancel(id=2)) == wire.Ended(id=2, error="cancelled")
        assert tree.num_bytes == 0

        assert isinstance(peer.ask(new_store(id=3)), wire.Wanted)
        peer.send(wire.Bye(reason="test"))
        eventually(lambda: tree.num_bytes == 0)


def test_a_peer_that_is_gone_leaves_no_reservation() -> None:
    tree = new_tree()
    with worker_of(tree, accepts=True) as worker:
        with RawPeer(worker.address) as peer:
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
        assert isinstance(refused, wire.Ended)
        assert refused.error == error
        assert tree.num_bytes == 0


def test_a_peer_has_one_store_open_at_most() -> None:
    """Another ends neither it nor the session, and takes no room."""
    with accepting() as (tree, peer):
        assert isinstance(peer.ask(new_store(id=1)), wire.Wanted)
        refused = peer.ask(new_store(PAGES[2:4], id=2))
        assert isinstance(refused, wire.Ended)
        assert (refused.id, refused.error) == (2, "protocol")
        assert "store 2 comes before store 1 has ended" in refused.reason
        assert tree.num_bytes == 2 * PAGE_TOTAL
        for number, step in enumerate(STORED[:-1]):
            peer.part(number * 2 * PAGE_BYTES, payload_of(step))
        assert peer.frame(8 * PAGE_BYTES, payload_of(STORED[-1])) == wire.Stored(id=1)
        assert isinstance(peer.ask(new_store(PAGES[2:4], id=3)), wire.Wanted)


def test_a_store_and_a_fetch_of_one_number_do_not_meet() -> None:
    """The end of one is not the other's."""
    there = pages_of(8, "there")
    fetch = wire.Fetch(
        id=1,
        model=MODEL,
        pages=join_hashes(there),
        steps=(("kv", 0), ("kv", 1)),
        frame_bytes=2 * PAGE_BYTES,
        timeout_ms=60_000,
    )
    with accepting() as (tree, peer):
        store(tree, there)
        assert isinstance(peer.ask(new_store(id=1, timeout_ms=60_000)), wire.Wanted)
        peer.send(fetch)
        for number, step in enumerate(STORED[:-1]):
            peer.part(number * 2 * PAGE_BYTES, payload_of(step))
        came = peer.fetched(2 * len(there) * PAGE_BYTES)
        for layer in range(2):
            wanted = b"".join(content(page, Step(Kind.KV, layer)) for page in there)
            assert came[layer * len(wanted) : (layer + 1) * len(wanted)] == wanted
        assert peer.frame(8 * PAGE_BYTES, payload_of(STORED[-1])) == wire.Stored(id=1), (
            "it ended with the fetch"
        )


def test_a_message_that_has_no_place_in_a_session_ends_it() -> None:
    with accepting() as (_, peer):
        bye = peer.ask(wire.hello(FAMILY, "", 0))
        assert isinstance(bye, wire.Bye)
        assert "a Hello has no place" in bye.reason
