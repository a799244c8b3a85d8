"""Every harm at every frame of a fetch between real servers. Answers are right and in time, and
nothing is left behind.

Over the data connection a fetch has E and the KV of eight layers, a header and a payload each, and
over ZMQ the request goes the other way. At each of these frames each fault strikes
once, and the worker is killed, killed and started again, or stopped between any two payloads; then
the same against the cache inside the author's engine. Takes ten minutes.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from engine_parts import eventually
from fault_proxy import Deed, Fault, FaultProxy, Strike, Towards, Via
from struck_parts import NUM_FRAMES, RECOVERY_S, Rig, rig_in

from cachetree import Deadline
from cachetree.disk import DiskTier

pytestmark = [pytest.mark.server, pytest.mark.slow]

SEED = 4
FOR_GOOD = (Fault.STALL, Fault.THROTTLE)
"""Faults that last as long as their connection. The proxy cuts it after the answer."""
LOSSES = (Fault.DROP_MESSAGE, Fault.FLIP_BODY, Fault.TRUNCATE, Fault.RESET)
"""Faults after which a fetch can only be complete if it asked for the rest."""
GROWTH_BYTES = 24 << 20
"""Half of the bytes that one kind of harm would leave if each fetch kept its memory."""

Frames = list[tuple[Towards, int, Via]]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig_in(tmp_path_factory.mktemp("struck"), seed=SEED) as started:
        yield started


@pytest.fixture(scope="module")
def frames(rig: Rig) -> Frames:
    seen = rig.frames(rig.proxy)
    print(f"{len(seen)} frames: {seen}")
    assert sum(towards is Towards.PEER for towards, *_ in seen) >= 2 * NUM_FRAMES
    assert sum(towards is Towards.WORKER for towards, *_ in seen) > 1
    return seen


@pytest.fixture(scope="module")
def authors_proxy(rig: Rig) -> Iterator[FaultProxy]:
    """Open the author's proxy, and shut the worker's, so that everything comes from the author."""
    rig.shelf.kill()
    rig.authors_proxy.open()
    rig.recover()
    yield rig.authors_proxy
    rig.authors_proxy.shut()
    bring_back(rig)


def between(frames: Frames) -> list[int]:
    """Return points at which a worker may end: before one of its messages, not within a message."""
    return [index for towards, index, via in frames if (towards, via) == (Towards.PEER, Via.DATA)][
        ::2
    ]


def bring_back(rig: Rig) -> None:
    if not rig.shelf.process.is_alive:
        rig.shelf.restart()
    eventually(rig.shelf.process.is_ready, RECOVERY_S)
    rig.recover()


def strike_all(rig, harms, proxy, mend=lambda: None):
    """Strike one fetch with each harm, and after it run a fetch without a harm."""
    rig.measure_alone()
    held, resident, messages, asked = rig.held(), rig.resident(), rig.told(), rig.outcomes.copy()
    blows = []
    for harm in harms:
        try:
            blow = rig.strike(harm, proxy)
        finally:
            mend()
        if blow is not None:
            blows.append(blow)
        rig.recover()
    added_s, queued_s = (max(getattr(it, of) for it in blows) for of in ("added_s", "queued_s"))
    outcomes = dict(Counter(blow.outcome for blow in blows))
    told_s = f"at worst {added_s:.2f} s more, {queued_s:.2f} s held back"
    print(f"{len(blows)} of {len(harms)} struck, {told_s}: {outcomes}")
    assert len(blows) >= 0.9 * len(harms)
    deadline = Deadline.after(RECOVERY_S)
    while (more := kept(rig, held)) and not deadline.has_passed:
        time.sleep(0.1)
    assert not more
    grown = {pid: now - resident[pid] for pid, now in rig.resident().items() if pid in resident}
    print(f"grown by {grown}")
    assert max(grown.values()) < GROWTH_BYTES
    for outcome, num in (rig.outcomes - asked).items():
        if cause := outcome.partition(": ")[2]:
            name = ("droidspeak:fallbacks_total", cause)
            assert rig.told()[name] - messages.get(name, 0) == num
    return blows


def kept(rig: Rig, before: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return what is held now beyond what was held before, as pairs (then, now).

    A worker's disk has readers that start when they are first needed: after a restart, mostly.
    """
    allowed = {"worker's threads": DiskTier.num_readers}
    return {
        name: (before[name], now)
        for name, now in rig.held().items()
        if now > before[name] + allowed.get(name, 0)
    }


def num_retries(rig: Rig) -> float:
    return sum(num for name, num in rig.told().items() if name[0] == "cachetree:retries_total")


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_at_every_frame(rig, frames, fault):
    before = num_retries(rig)
    mend = rig.proxy.cut if fault in FOR_GOOD else lambda: None
    blows = strike_all(rig, [Strike(fault, *frame) for frame in frames], rig.proxy, mend)
    if fault in LOSSES:
        towards_peer = [blow for blow in blows if blow.harm.towards is Towards.PEER]
        num_resumed = sum(blow.outcome == "reused" for blow in towards_peer)
        # Of faults that come this fast each third opens the breaker, which ends its fetch.
        assert num_resumed >= len(towards_peer) // 2
        # One may have met a pong, without which nothing is missing.
        eventually(lambda: num_retries(rig) - before >= num_resumed - 2)


def test_the_worker_is_killed_between_any_two_frames(rig, frames):
    def kill() -> None:
        rig.shelf.kill()
        rig.proxy.cut()

    harms = [Deed(kill, Towards.PEER, index, Via.DATA) for index in between(frames)]
    blows = strike_all(rig, harms, rig.proxy, lambda: bring_back(rig))
    assert all(blow.outcome.startswith("fallback") for blow in blows), "nobody could go on"


def test_the_worker_is_restarted_between_any_two_frames(rig, frames):
    """A worker that has restarted before the deadline sends the rest from its disk."""

    def kill_and_restart() -> None:
        rig.shelf.kill()
        rig.proxy.cut()
        rig.shelf.restart()

    harms = [Deed(kill_and_restart, Towards.PEER, index, Via.DATA) for index in between(frames)]
    strike_all(rig, harms, rig.proxy, lambda: bring_back(rig))


def stops(pid: Callable[[], int], frames: Frames) -> list[Deed]:
    def stop() -> None:
        os.killpg(pid(), signal.SIGSTOP)

    return [Deed(stop, Towards.PEER, index, Via.DATA) for index in between(frames)]


def test_the_worker_is_stopped_between_any_two_frames(rig, frames):
    def go_on() -> None:
        os.killpg(rig.shelf.process.pid, signal.SIGCONT)

    strike_all(rig, stops(lambda: rig.shelf.process.pid, frames), rig.proxy, go_on)


@pytest.mark.parametrize("fault", [Fault.DROP_MESSAGE, Fault.FLIP_BODY, Fault.RESET])
def test_an_engine_that_sends(rig, authors_proxy, fault):
    harms = [Strike(fault, *frame) for frame in rig.frames(authors_proxy)]
    strike_all(rig, harms, authors_proxy)


def test_an_engine_that_sends_is_stopped(rig, authors_proxy):
    def go_on() -> None:
        os.killpg(rig.author.pid, signal.SIGCONT)

    harms = stops(lambda: rig.author.pid, rig.frames(authors_proxy))
    strike_all(rig, harms, authors_proxy, go_on)


def test_an_engine_that_sends_is_killed(rig, authors_proxy):
    """This test is the last, because the engine does not come back."""

    def kill() -> None:
        rig.author.kill()
        authors_proxy.cut()

    blow = rig.strike(Deed(kill, Towards.PEER, NUM_FRAMES, Via.DATA), authors_proxy)
    assert blow is not None
    assert blow.outcome.startswith("fallback")
    print(blow)
