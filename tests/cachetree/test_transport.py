"""A worker and its peers over real sockets: which pages arrive, in which order, within which
limits."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import msgspec
import pytest
import transport_parts
from transport_parts import (
    E_LAYER,
    FAMILY,
    FAST,
    HOST_BYTES,
    MODEL,
    PAGE_BYTES,
    STEPS,
    RawPeer,
    RecordingStaging,
    ask_status,
    begun,
    check_content,
    eventually,
    eventually_free,
    fetch_all,
    new_staging,
    new_tree,
    pages_of,
    peer_of,
    store,
    wait_all,
    worker_of,
)

from cachetree import (
    CacheTree,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    FamilyMismatch,
    FetchError,
    Kind,
    Location,
    ModelId,
    Peer,
    PeerState,
    StaleEntry,
    Step,
    Worker,
    WorkerConfig,
)
from cachetree.memory.arena import Arena
from cachetree.transport.sender import LOCATED_BYTES

PAGES = pages_of(256)


@pytest.fixture(autouse=True, params=["frames", "shared memory"])
def in_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test twice: pages come in frames, and pages are read in place."""
    with ExitStack() as stack:
        if request.param == "shared memory":

            def new_memory() -> Arena:
                return stack.enter_context(closing(Arena(HOST_BYTES)))

            monkeypatch.setattr(transport_parts, "new_memory", new_memory)
        yield


def num_matched(tree: CacheTree) -> int:
    return max((match.num_pages for match in tree.match(PAGES)), default=0)


def test_a_fetch_brings_the_content_e_first_then_kv_in_layer_order():
    tree = new_tree()
    with worker_of(new_tree(PAGES)) as worker, peer_of(worker.address, tree) as peer:
        (match,) = tree.match(PAGES)
        assert (match.location, match.num_pages) == (worker.address, 256)
        assert match.e_pages == {E_LAYER: 256}
        assert peer.status.shares_memory == (worker._tree.memory.file is not None)
        staging = fetch_all(peer, PAGES)
        most = LOCATED_BYTES if peer.status.shares_memory else FAST.frame_bytes
    order = [(STEPS.index(step), offset) for step, offset, _ in staging.writes]
    assert order == sorted(order)
    assert max(size for *_, size in staging.writes) <= most


def test_a_part_of_a_prefix_and_steps_of_any_number():
    with worker_of(new_tree(PAGES)) as worker, peer_of(worker.address, new_tree()) as peer:
        staging = begun(peer, PAGES[70:100], steps=[Step(Kind.KV, 3)])
        check_content(staging, PAGES[70:100])
        empty = begun(peer, [])
        wait_all(empty)


def test_short_runs_are_joined_into_larger_frames():
    tree = new_tree()
    parent = None
    for page in PAGES:
        store(tree, [page], parent)
        parent = page
    with worker_of(tree) as worker, peer_of(worker.address, new_tree()) as peer:
        staging = fetch_all(peer, PAGES)
    assert len(staging.writes) == staging.num_bytes // (64 << 10)


def test_peers_learn_of_what_comes_and_what_goes():
    source, tree = new_tree(PAGES[:10]), new_tree()
    with worker_of(source) as worker, peer_of(worker.address, tree):
        assert tree.match(PAGES)[0].num_pages == 10
        store(source, PAGES[10:20], PAGES[9])
        eventually(lambda: num_matched(tree) == 20)
        source.evict()
        eventually(lambda: not tree.match(PAGES))


@pytest.mark.parametrize("max_pending_changes", [4096, 1])
def test_a_worker_can_be_asked_what_all_its_peers_know(max_pending_changes):
    """After each change the peers know the new tree, also if two changes come together, and if a
    slow peer gets a new snapshot instead."""
    source, trees = new_tree(), [new_tree(), new_tree()]
    with worker_of(source, max_pending_changes=max_pending_changes) as worker, ExitStack() as stack:
        assert worker.knowing()(), "nobody is there"
        for tree in trees:
            stack.enter_context(peer_of(worker.address, tree))
        for stop in range(2, 129, 2):
            for page in (stop - 2, stop - 1):
                store(source, PAGES[page : page + 1], PAGES[page - 1] if page else None)
            eventually(worker.knowing())
            assert [num_matched(tree) for tree in trees] == [stop, stop]
        stack.close()
        store(source, PAGES[128:129], PAGES[127])
        eventually(worker.knowing())


def test_worker_does_not_wait_for_a_peer_that_left():
    source = new_tree()
    with worker_of(source) as worker:
        with RawPeer(worker.address):
            eventually(lambda: worker.status().num_peers == 1)
            store(source, PAGES[:1])
            knows = worker.knowing()
            assert not knows(), "it never says that it has learned"
        eventually(knows)


def test_only_local_entries_are_advertised():
    first, second, third = new_tree(PAGES), new_tree(), new_tree()
    with (
        worker_of(first) as a,
        peer_of(a.address, second),
        worker_of(second) as b,
        peer_of(b.address, third),
    ):
        assert second.match(PAGES)
        assert not third.match(PAGES)


def test_a_large_tree_is_advertised_whole():
    pages = pages_of(5000)
    tree = new_tree()
    with worker_of(new_tree(pages)) as worker, peer_of(worker.address, tree):
        assert tree.match(pages)[0].num_pages == 5000


def test_a_slow_subscriber_gets_a_new_snapshot_instead_of_a_gap():
    source, tree = new_tree(PAGES[:1]), new_tree()
    with worker_of(source, max_pending_changes=2) as worker, peer_of(worker.address, tree) as peer:
        for stop in range(2, 129):
            store(source, PAGES[stop - 1 : stop], PAGES[stop - 2])
            if stop % 32 == 0:
                source.evict()
                store(source, PAGES[:stop])
        eventually(lambda: num_matched(tree) == 128)
        assert peer.status.num_resyncs > 1
        assert peer.state is PeerState.READY


def test_another_family_is_refused_by_field_and_leaves_no_entries():
    other = msgspec.structs.replace(FAMILY, rope='{"theta": 5e5}')
    tree = new_tree(family=other)
    with (
        worker_of(new_tree(PAGES)) as worker,
        peer_of(worker.address, tree, is_ready=False) as peer,
    ):
        assert not peer.wait_ready(5)
        assert peer.state is PeerState.REFUSED
        assert isinstance(peer.error, FamilyMismatch)
        assert "rope is '{}' there" in str(peer.error)
        assert not tree.match(PAGES)
        eventually(lambda: worker.status().num_refused_peers == 1)
        assert worker.status().num_peers == 0
        staging = begun(peer, PAGES[:1])
        with pytest.raises(FetchError, match="refused"):
            wait_all(staging)


def test_pages_that_are_gone_are_stale():
    source = new_tree(PAGES)
    with worker_of(source) as worker, peer_of(worker.address, new_tree()) as peer:
        for model, pages in ((ModelId("nobody"), PAGES), (MODEL, pages_of(256, "q"))):
            staging = new_staging(256)
            peer.fetch(model, pages, staging)
            with pytest.raises(StaleEntry, match=worker.address):
                wait_all(staging)
        no_e = begun(peer, PAGES, steps=[Step(Kind.E, 1)])
        with pytest.raises(StaleEntry):
            wait_all(no_e)
        assert worker.status().fetches_by_outcome == {"stale": 3}
        source.evict()
        assert source.num_pages == 0, "a refused fetch kept its lease"


def test_cancel_stops_the_stream_and_frees_the_lease():
    source = new_tree(PAGES)
    with (
        worker_of(source, max_bytes_per_s=1e6) as worker,
        peer_of(worker.address, new_tree()) as peer,
    ):
        staging = begun(peer, PAGES)
        eventually(lambda: staging.writes)
        staging.cancel()
        eventually(lambda: worker.status().num_streams == 0)
        with pytest.raises(Cancelled):
            wait_all(staging)
        eventually_free(source)
        assert peer.status.num_failed_fetches == 0
        assert worker.status().num_sent_bytes < staging.num_bytes // 2


def test_a_worker_says_behind_a_cancelled_fetch_that_no_more_comes():
    """A worker that is asked says at once that no bytes of a cancelled fetch are left, not at the
    next heartbeat."""
    pages = pages_of(256)
    quiet = msgspec.structs.replace(FAST, heartbeat_s=10.0)
    with (
        worker_of(new_tree(pages), max_bytes_per_s=2e5) as worker,
        peer_of(worker.address, new_tree(), quiet) as peer,
    ):
        staging = begun(peer, pages, seconds=60.0)
        eventually(lambda: staging.num_landed_bytes >= 20_000)
        staging.cancel()
        eventually(lambda: peer.link)  # Measured by the end of the fetch.
        eventually(lambda: peer.link and not peer.link.ahead)
        assert peer.link.frame_bytes == quiet.frame_bytes
        eventually(lambda: worker.status().fetches_by_outcome == {"cancelled": 1})


def test_a_deadline_ends_both_sides():
    with (
        worker_of(new_tree(PAGES), max_bytes_per_s=1e6) as worker,
        peer_of(worker.address, new_tree()) as peer,
    ):
        staging = begun(peer, PAGES, seconds=0.2)
        with pytest.raises(DeadlineExceeded):
            wait_all(staging)
        assert staging.num_landed_bytes < staging.num_bytes
        eventually(lambda: worker.status().num_streams == 0)
        eventually(lambda: peer.status.num_failed_fetches == 1)
        assert peer.status.bytes_per_s == pytest.approx(1e6, rel=0.5)


def test_impossible_fetch_fails_at_once_and_others_do_not():
    """One fetch has a name that is no text. Another has no time limit; it gets the longest that a
    worker allows."""
    with (
        worker_of(new_tree(PAGES), max_bytes_per_s=5e6) as worker,
        peer_of(worker.address, new_tree()) as peer,
    ):
        other, endless = new_staging(256), new_staging(256, seconds=math.inf)
        unspeakable = new_staging(256)
        for staging in (other, endless):
            peer.fetch(MODEL, PAGES, staging)
        eventually(lambda: endless.is_complete, 5)
        assert peer.status.num_losses == 0
        peer.fetch(ModelId("\ud800"), PAGES, unspeakable)
        eventually(lambda: unspeakable.error is not None, 5)
        assert "internal error" in str(unspeakable.error)
        check_content(other, PAGES)


def test_two_fetches_share_the_link_evenly():
    arrivals: list[int] = []

    class Marked(RecordingStaging):
        mark = 0

        def room(self, step: Step, offset: int, size: int) -> memoryview:
            arrivals.append(self.mark)
            return super().room(step, offset, size)

    sizes = dict.fromkeys(STEPS, 256 * PAGE_BYTES)
    with (
        worker_of(new_tree(PAGES), max_bytes_per_s=10e6) as worker,
        peer_of(worker.address, new_tree()) as peer,
    ):
        stagings = [Marked(sizes, new_staging(0).deadline) for _ in range(2)]
        for mark, staging in enumerate(stagings):
            staging.mark = mark
            peer.fetch(MODEL, PAGES, staging)
        for staging in stagings:
            check_content(staging, PAGES)
    half = len(arrivals) // 2
    assert 0.4 * half <= sum(arrivals[:half]) <= 0.6 * half


def test_the_cap_is_kept_within_a_fifth_and_measured():
    """The clocks run at a quarter of the speed, so a delayed thread changes the result less."""

    def clock() -> float:
        return time.monotonic() / 4

    pages = PAGES[:128]
    worker = Worker(new_tree(pages), WorkerConfig(max_bytes_per_s=5e6), clock=clock)
    with closing(worker), peer_of(worker.address, new_tree(), clock=clock) as peer:
        staging = new_staging(len(pages))
        begun_at_s = clock()
        peer.fetch(MODEL, pages, staging)
        wait_all(staging)
        rate = staging.num_bytes / (clock() - begun_at_s)
        assert 4e6 <= rate <= 6e6
        eventually(lambda: peer.status.bytes_per_s)
        assert peer.status.bytes_per_s == pytest.approx(rate, rel=0.1)
        assert max(size for *_, size in staging.writes) <= 50_000  # 10 ms


def test_a_worker_tells_its_numbers():
    with worker_of(new_tree(PAGES), model="me") as worker, peer_of(worker.address, new_tree()):
        status = ask_status(worker.address, timeout_s=5)
        assert status == worker.status()
        assert (status.model, status.num_peers, status.num_pages) == ("me", 1, 256)
        assert status.pages_by_model == {MODEL: 256}
        assert status.epoch == worker.epoch
    with pytest.raises(DeadlineExceeded, match="no worker answered"):
        ask_status(worker.address, timeout_s=0.05)


def test_a_peer_that_leaves_is_noticed_and_one_that_closes_fails_its_fetches():
    with worker_of(new_tree(PAGES), max_bytes_per_s=1e6) as worker:
        tree = new_tree()
        peer = Peer(tree, worker.address, FAST)
        assert peer.wait_ready(20)
        staging = begun(peer, PAGES)
        eventually(lambda: staging.writes)
        with peer._changed:
            peer._is_closing = True
        ending = begun(peer, PAGES[:1])
        peer.close()
        peer.close()
        assert peer.state is PeerState.CLOSED
        assert not tree.match(PAGES)
        eventually(lambda: worker.status().num_peers == 0)
        late = begun(peer, PAGES[:1])
        for each in (staging, ending, late):
            with pytest.raises(FetchError, match="closed"):
                wait_all(each)


def test_a_name_that_stands_for_several_hosts_leads_to_one(monkeypatch):
    """The session is opened where the ticket came from, whatever the name stands for meanwhile."""
    hosts = iter(["127.0.0.1", "127.0.0.99", "127.0.0.1", "127.0.0.99"])

    def look_up(name: str, port: int, *_: object) -> list[tuple[object, ...]]:
        assert name == "workers.test"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(hosts), port))]

    with worker_of(new_tree(PAGES)) as worker:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        port = worker.address.rpartition(":")[2]
        with peer_of(Location(f"tcp://workers.test:{port}"), new_tree()) as peer:
            assert peer.status.num_losses == 0


def test_a_worker_is_as_patient_as_the_kernel_can_be():
    with (
        worker_of(new_tree(), silence_s=65_534) as worker,
        peer_of(worker.address, new_tree()) as peer,
    ):
        assert peer.status.num_losses == 0
    with pytest.raises(ConfigError, match=r"silence_s is 86400; .* at most 65534 s"):
        WorkerConfig(silence_s=86_400)


def test_a_taken_or_foreign_address_stops_the_start():
    with worker_of(new_tree()) as worker, pytest.raises(ConfigError, match="cannot be bound"):
        Worker(new_tree(), WorkerConfig(listen=worker.address))
    with pytest.raises(ConfigError, match="insecure"):
        Worker(new_tree(), WorkerConfig(listen="tcp://0.0.0.0:0"))
    with pytest.raises(ConfigError, match="peer address"):
        Peer(new_tree(), "nowhere", FAST)  # type: ignore[arg-type]
