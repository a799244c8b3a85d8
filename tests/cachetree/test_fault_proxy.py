"""Every fault at every frame of a session: a fetch brings the right bytes or none, in time, and
leaves nothing behind.

The frames are from both directions of the session's two connections, from the greeting to the last
frame of a fetch. Every frame meets every fault by default; a flip takes one random bit of each
frame, and the slow tests take many more.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_proxy import Deed, Fault, FaultProxy, Strike, Towards, Via
from tier_parts import plan_of
from transport_parts import (
    E_LAYER,
    FAMILY,
    HOST_BYTES,
    MODEL,
    check_content,
    content,
    eventually,
    new_tree,
    pages_of,
    unheard,
    wait_all,
    worker_of,
)

from cachetree import (
    CacheTree,
    Deadline,
    FetchError,
    Kind,
    Location,
    PeerConfig,
    ProtocolError,
    Span,
    Staging,
    Step,
)
from cachetree.cache import Cache
from cachetree.config import CacheConfig
from cachetree.memory.arena import Arena
from cachetree.memory.copying import checksum
from cachetree.memory.slab import ArenaFile, Pool
from cachetree.transport import wire
from cachetree.transport.frames import Frame, Unsealed, pack
from cachetree.transport.receiver import FrameReceiver
from cachetree.tree import join_hashes

PAGES = pages_of(4)
FRAME_BYTES = 4096
PEER = PeerConfig(
    frame_bytes=FRAME_BYTES, connect_s=0.4, heartbeat_s=0.1, silence_s=0.5, reconnect_s=0.01
)
FETCH_BYTES = 4 * len(PAGES) * FAMILY.kv_page_bytes
DEADLINE_S = 2.0
MARGIN_S = 1.0
"""Seconds for threads that wait for a processor."""
RECOVERY_S = 10.0
NUM_AT_ONCE = 16
MAX_LOST = 0.05
"""Largest share of the faulty fetches that may fail, if the machine is too busy to recover in time.
All others land whole, over the same connection or the next."""
BETWEEN_CONNECTIONS = " is connecting"
"""Text in the error of a fetch that is refused at once, because there is no session."""
NUM_ROUNDS = 30
"""Rounds of each slow test."""


def fetch(cache: Cache, location: Location) -> FetchError | None:
    """Fetch, and return the error, or None. Asserts that the content is right, and that content or
    error comes in time."""
    begun_at_s = time.monotonic()
    staging = cache.fetch(plan_of(location, Span(0, len(PAGES))), PAGES, Deadline.after(DEADLINE_S))
    assert staging is not None, "an earlier fetch still holds the staging budget"
    with staging:
        try:
            wait_all(staging)
        except FetchError as exc:
            return exc
        finally:
            assert time.monotonic() - begun_at_s < DEADLINE_S + MARGIN_S
        check_content(staging, PAGES)
    return None


def receiver(location: Location) -> Cache:
    """A cache with a staging budget for one fetch."""
    config = CacheConfig(peers=(location,), serves=False, peer=PEER, staging_bytes=FETCH_BYTES)
    return Cache(FAMILY, config)


@contextlib.contextmanager
def proxied(source):
    with (
        worker_of(source) as worker,
        FaultProxy(worker.address, seed=0) as proxy,
        receiver(proxy.address) as cache,
    ):
        assert cache.wait_ready(20)
        yield worker, proxy, cache


@dataclass(frozen=True)
class Outcome:
    has_struck: bool
    error: FetchError | None
    """Error of the fetch that may have met the fault."""


def strike_at(worker: Location, strike: Strike, seed: int) -> Outcome:
    """Cause the fault during a fetch. Asserts that the fetch is right or fails, and that a later
    one succeeds.

    The connection recovers or is replaced by itself: the test does not close the cache in between.
    """
    with FaultProxy(worker, seed=seed) as proxy:
        proxy.arm(strike)
        with receiver(proxy.address) as cache:
            eventually(lambda: cache.wait_ready(RECOVERY_S), RECOVERY_S)
            error = fetch(cache, proxy.address)
            if error is not None and BETWEEN_CONNECTIONS in str(error):
                error = None  # An idle session had met the fault: the fetch never began.
            eventually(lambda: fetch(cache, proxy.address) is None, RECOVERY_S)
            assert cache.status().staging_bytes_in_use == 0
        return Outcome(proxy.has_struck, error)


@pytest.fixture(scope="module")
def frames() -> list[tuple[Towards, int, Via]]:
    """Return the frames of one session with one undisturbed fetch."""
    all_frames = frames_of(new_tree(PAGES))
    assert len(all_frames) >= 3 + 1 + 4 + 2 * FETCH_BYTES // FRAME_BYTES
    return all_frames


def frames_of(source: CacheTree) -> list[tuple[Towards, int, Via]]:
    with proxied(source) as (_, proxy, cache):
        assert fetch(cache, proxy.address) is None
        return [
            (towards, index, via)
            for via in (Via.ZMQ, Via.DATA)
            for towards in Towards
            for index in range(proxy.num_frames(towards, via))
        ]


def held() -> tuple[int, int]:
    """Return the descriptors and threads of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    before = held()
    yield
    eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), 10)


def strike_all(strikes: Sequence[Strike], first_seed: int, memory: Pool | None = None) -> None:
    """Cause each fault on its own connection to one worker. Afterwards the worker has no open
    fetch."""
    source = new_tree(PAGES, memory=memory)
    with worker_of(source, silence_s=1.0) as worker:
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            results = {
                strike: pool.submit(strike_at, worker.address, strike, first_seed + number)
                for number, strike in enumerate(strikes)
            }
        wrong = {strike: error for strike, it in results.items() if (error := it.exception())}
        assert not wrong
        outcomes = {strike: it.result() for strike, it in results.items()}
        # When pings go decides how many frames there are.
        assert sum(it.has_struck for it in outcomes.values()) > 0.9 * len(strikes)
        lost = {str(strike): str(it.error) for strike, it in outcomes.items() if it.error}
        print(f"{len(lost)} of {len(strikes)} fetches fell back: {lost}")
        assert len(lost) <= MAX_LOST * len(strikes), lost
        eventually(lambda: worker.status().num_streams == 0)
        eventually(lambda: worker.status().num_peers == 0)
    source.evict()
    assert source.num_pages == 0, "a lease was not given back"


@pytest.mark.long
@pytest.mark.parametrize("fault", Fault)
def test_every_fault_at_every_frame(fault, frames, nothing_stays):
    strike_all([Strike(fault, *frame) for frame in frames], first_seed=0)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [Fault.FLIP_BODY, Fault.DROP_MESSAGE, Fault.REORDER_MESSAGE, Fault.STALL, Fault.RESET]
)
def test_every_fault_at_every_frame_while_pages_are_read_in_place(fault, nothing_stays):
    with closing(Arena(HOST_BYTES)) as memory:
        frames = frames_of(new_tree(PAGES, memory=memory))
    with closing(Arena(HOST_BYTES)) as memory:
        strike_all([Strike(fault, *frame) for frame in frames], first_seed=0, memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.FLIP_FRAMING, Fault.FLIP_BODY, Fault.TRUNCATE])
def test_many_bits_of_every_frame(fault, frames, nothing_stays):
    for number in range(NUM_ROUNDS):
        strikes = [Strike(fault, *frame) for frame in frames]
        strike_all(strikes, first_seed=1000 * (number + 1))


@pytest.mark.long
def test_a_peer_that_is_cut_off_again_and_again_holds_nothing_more(nothing_stays):
    with proxied(new_tree(PAGES)) as (worker, proxy, cache):
        assert fetch(cache, proxy.address) is None  # Now both of its connections are there.
        before = held()
        for num_cuts in range(1, 21):
            proxy.cut()
            eventually(lambda num=num_cuts: cache.status().peers[0].num_losses >= num)
            eventually(lambda: fetch(cache, proxy.address) is None)
        eventually(lambda: worker.status().num_peers == 1)
        eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def test_a_deed_is_done_before_its_frame_goes_on():
    with proxied(new_tree(PAGES)) as (_, proxy, cache):
        landed = []

        def cut() -> None:
            landed.append(cache.status().peers[0].num_landed_bytes)
            proxy.cut()

        proxy.arm(Deed(cut, Towards.PEER, 4, Via.DATA))
        assert fetch(cache, proxy.address) is None
        assert proxy.has_struck
        (num_bytes,) = landed
        assert num_bytes <= 2 * FRAME_BYTES, "two frames, with a header each, went on before it"
        assert cache.status().peers[0].num_retries == 1


def with_each_bit_flipped(sound: bytes) -> Iterator[memoryview]:
    """Yield the same buffer again and again, each time with another bit flipped."""
    flipped = bytearray(sound)
    view = memoryview(flipped)
    for at in range(len(flipped)):
        for bit in range(8):
            flipped[at] ^= 1 << bit
            yield view
            flipped[at] ^= 1 << bit


MANY_PAGES = join_hashes(pages_of(192))
ENTRY = wire.Entry(added=True, model=MODEL, parent=b"", pages=MANY_PAGES, part=E_LAYER)
FETCH = wire.Fetch(
    id=3,
    model=MODEL,
    pages=MANY_PAGES,
    steps=(("e", E_LAYER), ("kv", 0), ("kv", 1), ("kv", 3)),
    frame_bytes=1 << 20,
    timeout_ms=10_000,
    first_byte=4096,
)
TO_WORKER = (
    wire.hello(FAMILY, MODEL, 0),
    wire.Learned(),
    FETCH,
    wire.Cancel(id=3),
    wire.Ping(),
    wire.Bye(reason="closing"),
)
FRAME = Frame(id=3, offset=8192, size=4096, checksum=1 << 63)
TO_PEER = (
    wire.hello(FAMILY, MODEL, 1 << 60),
    wire.Reset(),
    wire.Entries(entries=(ENTRY,)),
    wire.Synced(),
    wire.hello(FAMILY, MODEL, 1, ArenaFile(pid=1 << 15, fd=9, num_bytes=1 << 40, nonce=bytes(16))),
    wire.Located(frame=FRAME, places=((4096, 6144), (0, 2048))),
    wire.Ended(id=3, error="stale", reason="192 pages are no longer here"),
    wire.Pong(),
    wire.Bye(reason="the worker is closing"),
)


def test_every_flipped_bit_of_a_header_is_detected():
    num_flips = 0
    undetected: Counter[str] = Counter()
    decoders = ((wire.decode_to_worker, TO_WORKER), (wire.decode_to_peer, TO_PEER))
    for decode, messages in decoders:
        for message in messages:
            for flipped in with_each_bit_flipped(wire.encode(message)):
                num_flips += 1
                with contextlib.suppress(ProtocolError):
                    decode(flipped)
                    undetected[type(message).__name__] += 1
    for flipped in with_each_bit_flipped(Unsealed().seal(pack(FRAME))):
        num_flips += 1
        with contextlib.suppress(ProtocolError):
            Unsealed().open(flipped)
            undetected["Frame"] += 1
    assert num_flips > 50_000
    assert not undetected


def test_every_flipped_bit_of_a_payload_is_detected():
    step = Step(Kind.KV, 0)
    num_flips = 0
    errors: list[FetchError] = []
    for page in PAGES:
        payload = content(page, step)
        staging = Staging({step: len(payload)}, Deadline.after(60))
        receiver = FrameReceiver(MODEL, [page], staging, unheard, lambda _, it: errors.append(it))
        receiver.id = 1
        frame = Frame(id=1, offset=0, size=len(payload), checksum=checksum(payload))
        room = receiver.buffer_for(frame)
        for flipped in with_each_bit_flipped(payload):
            num_flips += 1
            receiver.mark_received(frame, is_sound=checksum(flipped) == frame.checksum)
            error = errors.pop()
            assert isinstance(error, ProtocolError)
            assert "checksum" in str(error)
        assert staging.num_landed_bytes == 0
        room[:] = payload
        receiver.mark_received(frame, is_sound=checksum(room) == frame.checksum)
        check_content(staging, [page])
    assert num_flips > 50_000
