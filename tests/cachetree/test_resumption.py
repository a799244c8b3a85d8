"""A fetch that is interrupted asks for the rest a few times, and ends by its deadline."""

from __future__ import annotations

import socket
import time

import msgspec
import pytest
from fault_proxy import Fault, FaultProxy, Strike, Towards, Via
from transport_parts import (
    FAST,
    MODEL,
    PAGE_BYTES,
    STEPS,
    ScriptedWorker,
    begun,
    check_content,
    content,
    eventually,
    fetch_all,
    new_staging,
    new_tree,
    pages_of,
    peer_of,
    store,
    wait_all,
    worker_of,
)

from cachetree import DeadlineExceeded, FetchError, PeerState, ProtocolError, StaleEntry
from cachetree.transport import wire
from cachetree.transport.address import parse_remote
from cachetree.transport.frames import Frame

PAGES = pages_of(16)
SIZE = 16 * PAGE_BYTES
FRAME_BYTES = SIZE // 4
PATIENT = msgspec.structs.replace(FAST, breaker_errors=100, connect_s=20.0)
"""Settings with a breaker that never opens, and with waits that a busy machine does not exceed."""


def frames_of(fetch: wire.Fetch) -> list[tuple[Frame, bytes]]:
    """Return all frames that a correct worker would send for the fetch, from its first byte on."""
    frames = []
    for index, step in enumerate(STEPS):
        whole = b"".join(content(page, step) for page in PAGES)
        for offset in range(0, SIZE, FRAME_BYTES):
            if index * SIZE + offset >= fetch.first_byte:
                part = whole[offset : offset + FRAME_BYTES]
                frame = Frame(
                    id=fetch.id,
                    offset=index * SIZE + offset,
                    size=len(part),
                    checksum=wire.checksum(part),
                )
                frames.append((frame, part))
    return frames


class BreakingWorker(ScriptedWorker):
    """A worker that serves `PAGES`. It breaks the first `num_broken` requests at their third frame,
    by `harm`."""

    def __init__(self, harm, num_broken):
        self.fetches: list[wire.Fetch] = []
        self._harm = harm
        self._num_broken = num_broken
        super().__init__(lambda _self, identity, fetch: self._stream(identity, fetch))

    def _stream(self, identity: bytes, fetch: wire.Fetch) -> None:
        self.fetches.append(fetch)
        for number, (frame, payload) in enumerate(frames_of(fetch)):
            is_broken = number == 2 and len(self.fetches) <= self._num_broken
            if not is_broken or self._harm(self, identity, frame, payload):
                self.send(identity, frame, payload)

    @property
    def starts(self) -> list[int]:
        """First frame of each fetch that the worker got."""
        return [fetch.first_byte // FRAME_BYTES for fetch in self.fetches]


def damaged(worker: BreakingWorker, identity: bytes, frame: Frame, payload: bytes) -> bool:
    worker.send(identity, frame, bytes([payload[0] ^ 1]) + payload[1:])
    return False


def missing(worker: BreakingWorker, identity: bytes, frame: Frame, payload: bytes) -> bool:
    return False


def doubled(worker: BreakingWorker, identity: bytes, frame: Frame, payload: bytes) -> bool:
    worker.send(identity, frame, payload)
    return True


def refused(worker: BreakingWorker, identity: bytes, frame: Frame, payload: bytes) -> bool:
    worker.send(identity, wire.Ended(id=frame.id, error="protocol", reason="twice"))
    return True


def goodbye(worker: BreakingWorker, identity: bytes, frame: Frame, payload: bytes) -> bool:
    worker.send(identity, wire.Bye(reason="closing"))
    return True


def noise(worker: BreakingWorker, identity: bytes, frame: Frame, payload: bytes) -> bool:
    worker.send(identity, b"noise")
    return True


SAME_CONNECTION = (damaged, missing, doubled, refused)


@pytest.mark.parametrize("harm", [*SAME_CONNECTION, goodbye, noise])
def test_the_rest_is_asked_for_and_what_landed_is_kept(harm):
    with (
        BreakingWorker(harm, num_broken=2) as worker,
        peer_of(worker.address, new_tree(), PATIENT) as peer,
    ):
        staging = fetch_all(peer, PAGES)
        num_landed = 3 if harm is doubled else 2
        assert worker.starts == [0, num_landed, 2 * num_landed]
        eventually(lambda: peer.status.num_landed_bytes == staging.num_bytes)
        assert peer.status.num_losses == (0 if harm in SAME_CONNECTION else 2)
        assert peer.status.num_retries == 2
        assert peer.status.num_failed_fetches == 0
        if harm in SAME_CONNECTION:
            ids = [fetch.id for fetch in worker.fetches]
            assert ids == sorted(set(ids))
            eventually(lambda: wire.Cancel(id=ids[0]) in worker.received)


@pytest.mark.parametrize(("harm", "num_errors"), [(damaged, 3), (goodbye, 0)])
def test_retries_are_bounded(harm, num_errors):
    """If the last retry ends with a protocol error, the fetch does, too."""
    with (
        BreakingWorker(harm, num_broken=99) as worker,
        peer_of(worker.address, new_tree(), PATIENT) as peer,
    ):
        staging = begun(peer, PAGES)
        error = ProtocolError if num_errors else FetchError
        with pytest.raises(error, match="checksum" if num_errors else "closing"):
            wait_all(staging)
        assert len(worker.fetches) == 1 + FAST.max_retries
        assert peer.status.num_failed_fetches == 1
        assert peer.status.num_protocol_errors == num_errors
        assert not num_errors or peer.state is PeerState.READY


@pytest.mark.parametrize(("towards", "place"), [(Towards.WORKER, 0), (Towards.PEER, -1)])
def test_lost_frames_are_missed_at_the_next_heartbeat(towards, place):
    """The lost frame is the request, or the last frame: no later frame shows the gap."""
    rarely = msgspec.structs.replace(PATIENT, heartbeat_s=0.5, frame_bytes=FRAME_BYTES)
    with (
        worker_of(new_tree(PAGES)) as worker,
        FaultProxy(worker.address, seed=1) as proxy,
        peer_of(proxy.address, new_tree(), rarely) as peer,
    ):
        index = 2 * (place if place >= 0 else len(STEPS) * 4 - 1)
        staging = new_staging(16)
        proxy.arm(Strike(Fault.DROP_MESSAGE, towards, index, Via.DATA))
        peer.fetch(MODEL, PAGES, staging)
        check_content(staging, PAGES)
        assert proxy.has_struck
        assert peer.status.num_retries == 1
        assert peer.status.num_losses == 1


def test_pages_gone_after_a_restart_are_stale():
    class Emptied(BreakingWorker):
        def _stream(self, identity: bytes, fetch: wire.Fetch) -> None:
            if self.fetches:
                gone = wire.Ended(id=fetch.id, error="stale", reason="no longer here")
                self.send(identity, gone)
            else:
                super()._stream(identity, fetch)

    with Emptied(goodbye, num_broken=1) as worker, peer_of(worker.address, new_tree()) as peer:
        staging = begun(peer, PAGES)
        with pytest.raises(StaleEntry):
            wait_all(staging)
        assert peer.status.probe_in_s is None


@pytest.mark.parametrize(
    ("resume_s", "deadline_s", "error"), [(30.0, 0.6, DeadlineExceeded), (0.3, 60.0, FetchError)]
)
def test_a_worker_that_stays_away_costs_no_more_than_the_patience_for_it(
    resume_s, deadline_s, error
):
    source = new_tree(PAGES)
    patient = msgspec.structs.replace(FAST, resume_s=resume_s)
    with (
        worker_of(source, max_bytes_per_s=1e4) as worker,
        peer_of(worker.address, new_tree(), patient) as peer,
    ):
        staging = begun(peer, PAGES, seconds=deadline_s)
        eventually(lambda: staging.writes)
        worker.close()
        begun_at_s = time.monotonic()
        with pytest.raises(FetchError) as failure:
            wait_all(staging)
        assert failure.type is error
        assert time.monotonic() - begun_at_s < 10
        eventually(lambda: peer.status.num_failed_fetches == 1)
        assert peer.status.probe_in_s is None
        assert peer.state is PeerState.CONNECTING


def test_a_handshake_that_breaks_off_meanwhile_is_tried_again():
    source = new_tree(PAGES)
    patient = msgspec.structs.replace(FAST, resume_s=30.0)
    with (
        worker_of(source, max_bytes_per_s=1e5) as worker,
        peer_of(worker.address, new_tree(), patient) as peer,
    ):
        staging = begun(peer, PAGES)
        eventually(lambda: staging.writes)
        worker.close()
        with socket.create_server(
            ("127.0.0.1", parse_remote(worker.address, field="").port)
        ) as server:
            server.accept()[0].close()
            eventually(lambda: peer.state is PeerState.UNTRUSTED)
        with worker_of(source, listen=worker.address):
            wait_all(staging)
        check_content(staging, PAGES)
        assert peer.status.num_failed_fetches == 0


def test_a_fetch_that_is_given_up_between_connections_is_forgotten():
    with (
        worker_of(new_tree(PAGES), max_bytes_per_s=1e4) as worker,
        peer_of(worker.address, new_tree()) as peer,
    ):
        staging = begun(peer, PAGES, seconds=30)
        eventually(lambda: staging.writes)
        worker.close()
        eventually(lambda: peer.state is PeerState.CONNECTING)
        staging.cancel()
        eventually(lambda: not peer._fetches._all)
        assert peer.status.num_failed_fetches == 0


def test_one_that_cannot_be_asked_for_again_keeps_no_other_from_it():
    first, second = new_staging(16), new_staging(16)
    num_asked = 0

    def script(worker: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            first.traceparent = object()  # type: ignore[assignment]
            worker.send(identity, wire.Bye(reason="closing"))
        for frame, payload in frames_of(fetch) if num_asked > 2 else ():
            worker.send(identity, frame, payload)

    with ScriptedWorker(script) as worker, peer_of(worker.address, new_tree(), PATIENT) as peer:
        for staging in (first, second):
            peer.fetch(MODEL, PAGES, staging)
        check_content(second, PAGES)
        assert "internal error" in str(first.error)


def test_a_lost_last_advert_is_missed_at_the_next_heartbeat():
    source, tree = new_tree(PAGES[:8]), new_tree()
    with (
        worker_of(source) as worker,
        FaultProxy(worker.address, seed=1) as proxy,
        peer_of(proxy.address, tree, msgspec.structs.replace(PATIENT, heartbeat_s=2.0)) as peer,
    ):
        proxy.arm(Strike(Fault.DROP_MESSAGE, Towards.PEER, 0, Via.DATA))
        store(source, PAGES[8:], PAGES[7])
        eventually(lambda: [it.num_pages for it in tree.match(PAGES)] == [16])
        assert proxy.has_struck
        assert peer.status.num_resyncs == 2
        assert peer.status.num_losses == 1
