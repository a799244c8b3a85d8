"""A worker that keeps failing is left alone, then tried by one fetch at a time. Tests of the rule,
and of a peer that follows it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_parts import (
    FAST,
    MODEL,
    ScriptedWorker,
    begun,
    check_content,
    eventually,
    new_staging,
    new_tree,
    pages_of,
    peer_of,
    wait_all,
    worker_of,
)
from tree_parts import FakeTime

from cachetree import (
    Cancelled,
    ConfigError,
    FetchError,
    Peer,
    PeerConfig,
    PeerState,
    Staging,
    StaleEntry,
)
from cachetree.ids import KV
from cachetree.transport import wire
from cachetree.transport.backoff import Breaker

PAGES = pages_of(16)
CONFIG = PeerConfig()
ERROR = FetchError("broken")


class Oracle:
    """The rule in its simplest form: it looks at the whole history for every question."""

    def __init__(self) -> None:
        self.errors_at_s: list[float] = []
        self.opened_at_s: float | None = None
        self.cooldown_s = CONFIG.cooldown_s
        self.probe: int | None = None

    def state(self, now_s: float) -> str:
        if self.opened_at_s is None:
            return "closed"
        return "open" if now_s < self.opened_at_s + self.cooldown_s else "half open"

    def admits(self, now_s: float, fetch: int) -> bool:
        state = self.state(now_s)
        if state == "half open" and self.probe is None:
            self.probe = fetch
            return True
        return state == "closed"

    def fails(self, now_s: float) -> None:
        if self.state(now_s) == "half open":
            self.cooldown_s = min(2 * self.cooldown_s, 10 * CONFIG.cooldown_s)
            self.opened_at_s, self.probe = now_s, None
        elif self.state(now_s) == "closed":
            self.errors_at_s.append(now_s)
            recent = [at_s for at_s in self.errors_at_s if now_s - at_s <= CONFIG.breaker_window_s]
            if len(recent) >= CONFIG.breaker_errors:
                self.opened_at_s = now_s
                self.errors_at_s = []

    def succeeds(self, now_s: float) -> None:
        if self.probe is not None:
            self.opened_at_s = self.probe = None
            self.cooldown_s = CONFIG.cooldown_s


WAITS_S = (0.0, 0.5, 3.0, 5.0, 29.9, 31.0, 70.0, 400.0)
ACTS = ("fail", "outlast") * 4 + ("ask", "ask", "succeed", "give up")
EVENTS = st.lists(st.sampled_from(WAITS_S + ACTS), min_size=40, max_size=80)
"""Waits, and acts of a fetch or of time. They often last until the cooldown has its bound."""


@given(EVENTS)
def test_any_sequence_goes_as_the_rule_says(events):
    clock = FakeTime()
    breaker, oracle = Breaker(CONFIG, clock), Oracle()
    for number, event in enumerate(events):
        match event:
            case "ask":
                assert breaker.admits() == oracle.admits(clock.now_s, number)
            case "fail":
                breaker.failed(ERROR)
                oracle.fails(clock.now_s)
            case "succeed":
                breaker.succeeded()
                oracle.succeeds(clock.now_s)
            case "give up":
                breaker.released()
                oracle.probe = None
            case "outlast":
                clock.now_s += breaker.probe_in_s or 0.0
            case seconds:
                clock.now_s += seconds
        state = oracle.state(clock.now_s)
        assert breaker.is_open == (state == "open")
        if state == "closed":
            assert breaker.probe_in_s is None
        else:
            assert oracle.opened_at_s is not None
            end_s = oracle.opened_at_s + oracle.cooldown_s
            assert breaker.probe_in_s == pytest.approx(max(0.0, end_s - clock.now_s))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_retries": -1}, "max_retries is -1"),
        ({"breaker_errors": 0}, "breaker_errors is 0"),
        ({"breaker_window_s": 0.0}, "breaker_window_s is 0"),
        ({"cooldown_s": 0.0}, "cooldown_s is 0"),
        ({"cooldown_s": math.inf}, "cooldown_s is inf; give a finite"),
        ({"connect_s": math.nan}, "connect_s is nan; give a finite"),
    ],
)
def test_settings_are_checked(changed, message):
    with pytest.raises(ConfigError, match=message):
        PeerConfig(**changed)  # type: ignore[arg-type]


# A peer and its breaker.

STRICT = msgspec.structs.replace(FAST, max_retries=0, cooldown_s=100.0, silence_s=3600.0)
"""Settings for tests that set the clock forward by the cooldown. The time skipped is no silence."""


class Ahead:
    """A clock that is set forward by hand."""

    def __init__(self) -> None:
        self._by_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._by_s

    def set_forward(self, seconds: float, peer: Peer) -> None:
        """Set the clock forward, and wake the peer's thread, which waits by real time."""
        self._by_s += seconds
        peer._wakeup.wake()


class MoodyWorker(ScriptedWorker):
    """A worker that damages the last page of every fetch until it is well. It also offers pages
    that it cannot serve."""

    def __init__(self) -> None:
        self.num_hellos = 0
        self.error = "deadline"
        super().__init__(lambda _self, identity, fetch: self._fail(identity, fetch))

    def send(self, identity: bytes, message: wire.ToPeer | bytes, *payload: bytes) -> None:
        if isinstance(message, wire.Hello):
            self.num_hellos += 1
        if isinstance(message, wire.Synced):
            entry = wire.Entry(added=True, model=MODEL, parent=b"", pages=b"".join(PAGES), part=KV)
            super().send(identity, wire.Entries(entries=(entry,)))
        super().send(identity, message, *payload)

    def _fail(self, identity: bytes, fetch: wire.Fetch) -> None:
        self.send(identity, wire.Ended(id=fetch.id, error=self.error, reason="moody"))


def failed_fetch(fetch: Callable[..., None]) -> FetchError:
    staging: Staging = new_staging(16)
    fetch(MODEL, PAGES, staging)
    with pytest.raises(FetchError) as caught:
        wait_all(staging)
    return caught.value


def test_a_worker_that_keeps_failing_is_not_offered_and_not_asked():
    tree, clock = new_tree(), Ahead()
    with MoodyWorker() as worker, peer_of(worker.address, tree, STRICT, clock=clock) as peer:
        for _ in range(2):
            assert "moody" in str(failed_fetch(peer.fetch))
            assert tree.match(PAGES)
        failed_fetch(peer.fetch)
        eventually(lambda: peer.state is PeerState.RESTING)
        assert not tree.match(PAGES)
        status = peer.status
        assert "moody" in status.error
        assert status.probe_in_s is not None
        assert 0 < status.probe_in_s <= STRICT.cooldown_s
        assert "resting" in str(failed_fetch(peer.fetch))
        assert worker.num_hellos == 1, "it was not left alone"
        num_asked = sum(isinstance(it, wire.Fetch) for it in worker.received)
        assert num_asked == 3

        # Half open: entries are back, one fetch goes, and its failure doubles the cooldown.
        clock.set_forward(STRICT.cooldown_s, peer)
        eventually(lambda: peer.state is PeerState.READY)
        assert tree.match(PAGES)
        assert peer.status.probe_in_s == 0
        failed_fetch(peer.fetch)
        eventually(lambda: peer.state is PeerState.RESTING)
        assert (peer.status.probe_in_s or 0) > STRICT.cooldown_s
        assert worker.num_hellos == 2


def test_a_worker_is_left_alone_for_years_where_the_settings_say_so(caplog):
    """The wait is longer than a poll can take."""
    patient = msgspec.structs.replace(
        STRICT, cooldown_s=1e8, connect_s=1e8, heartbeat_s=1e8, silence_s=1e9
    )
    clock = Ahead()
    with MoodyWorker() as worker, peer_of(worker.address, new_tree(), patient, clock=clock) as peer:
        for _ in range(3):
            failed_fetch(peer.fetch)
        eventually(lambda: peer.state is PeerState.RESTING)
        clock.set_forward(patient.cooldown_s, peer)
        eventually(lambda: peer.state is PeerState.READY)
    assert "internal error" not in caplog.text


class BoastfulWorker(ScriptedWorker):
    """A worker with an impossible budget in its hello."""

    def send(self, identity: bytes, message: wire.ToPeer | bytes, *payload: bytes) -> None:
        if isinstance(message, wire.Hello):
            message = msgspec.structs.replace(message, budget_bytes=-1)
        super().send(identity, message, *payload)


def test_a_hello_with_a_negative_budget_is_an_error_of_the_protocol(caplog):
    with (
        BoastfulWorker(lambda *_: None) as worker,
        peer_of(worker.address, new_tree(), STRICT, is_ready=False) as peer,
    ):
        eventually(lambda: peer.state is PeerState.RESTING)
        assert "budget_bytes" in str(peer.error)
    assert "internal error" not in caplog.text


def test_internal_errors_of_a_session_open_the_breaker_and_are_logged_once(caplog, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("cachetree.transport.peer.RemoteView.limit", fail)
    with (
        MoodyWorker() as worker,
        peer_of(worker.address, new_tree(), STRICT, is_ready=False) as peer,
    ):
        eventually(lambda: peer.state is PeerState.RESTING)
        assert worker.num_hellos == STRICT.breaker_errors
    assert caplog.text.count("Traceback") == 1


@pytest.mark.parametrize(("answer", "error"), [("stale", StaleEntry), ("failed", FetchError)])
def test_missing_pages_and_busy_workers_do_not_count_as_errors(answer, error):
    with MoodyWorker() as worker, peer_of(worker.address, new_tree(), STRICT) as peer:
        worker.error = answer
        for _ in range(10):
            assert type(failed_fetch(peer.fetch)) is error
        assert peer.status.probe_in_s is None


@pytest.mark.parametrize("error", [Cancelled("it left"), FetchError("it could not compute")])
def test_cancelled_fetch_is_no_error_and_ends_no_other_fetch(error):
    with (
        worker_of(new_tree(PAGES), max_bytes_per_s=1e5) as worker,
        peer_of(worker.address, new_tree(), STRICT) as peer,
    ):
        lasting, *given_up = (new_staging(16) for _ in range(5))
        for staging in (lasting, *given_up):
            peer.fetch(MODEL, PAGES, staging)
        for staging in given_up:
            eventually(lambda it=staging: it.writes)
            staging.fail(error)
        check_content(lasting, PAGES)
        assert peer.state is PeerState.READY
        assert peer.status.probe_in_s is None


def test_a_probe_that_lands_closes_it():
    source = new_tree(PAGES)
    with worker_of(source, max_bytes_per_s=1e4) as worker:
        tree, clock = new_tree(), Ahead()
        with peer_of(worker.address, tree, STRICT, clock=clock) as peer:
            for _ in range(3):
                late = begun(peer, PAGES, seconds=0.05)
                with pytest.raises(FetchError):
                    wait_all(late)
                eventually(lambda: not peer._fetches._all)
            eventually(lambda: peer.state is PeerState.RESTING)
            clock.set_forward(STRICT.cooldown_s, peer)
            eventually(lambda: peer.state is PeerState.READY)
            probe, other = new_staging(1), new_staging(16)
            peer.fetch(MODEL, PAGES[:1], probe)
            peer.fetch(MODEL, PAGES, other)
            with pytest.raises(FetchError, match="another fetch is trying it now"):
                wait_all(other)
            check_content(probe, PAGES[:1])
            eventually(lambda: peer.status.probe_in_s is None)


def test_clean_restarts_with_nothing_under_way_are_no_errors():
    with worker_of(new_tree(PAGES)) as first:
        address = first.address
        with peer_of(address, new_tree(), STRICT) as peer:
            for _ in range(5):
                first.close()
                eventually(lambda: peer.state is PeerState.CONNECTING)
                with worker_of(new_tree(PAGES), listen=address):
                    eventually(lambda: peer.state is PeerState.READY)
                eventually(lambda: peer.state is PeerState.CONNECTING)
            assert peer.status.num_losses == 6
            assert peer.status.probe_in_s is None
