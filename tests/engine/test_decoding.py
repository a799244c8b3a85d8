"""On a CPU encoded E is decoded while its request waits, and never by the scheduler's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from request_parts import planned_as
from test_waiting import FakeMeter, request

from cachetree.checkpoint.family import Codec, vector_bytes
from cachetree.clock import Deadline
from cachetree.errors import FetchError
from cachetree.ids import Kind, Location, ModelId, Span, Step
from cachetree.memory.arena import Arena
from cachetree.memory.slab import Blocks
from cachetree.memory.staging import staged
from cachetree.planning.plan import Plan
from sglang_droidspeak.request import source as decoding
from sglang_droidspeak.request.arrivals import Arrivals
from sglang_droidspeak.request.request import Phase, Request
from sglang_droidspeak.request.source import Source, Sources
from sglang_droidspeak.store import rows
from sglang_droidspeak.store.rows import Coding, ServerPool

PAGE, HIDDEN, HEAD_DIM = 16, 128, 64
NUM_TOKENS = 3 * PAGE
CODING = Coding(Codec.INT8, HEAD_DIM)
E_BYTES = NUM_TOKENS * HIDDEN // HEAD_DIM * vector_bytes(Codec.INT8, HEAD_DIM, 4)
E_STEP = Step(Kind.E, 1)
PLAN = Plan(
    sender=ModelId("peer"),
    receiver=ModelId("here"),
    location=Location("tcp://peer"),
    pages=Span(1, 4),
    block=Span(1, 3),
    num_layers=4,
)
WAIT_S = 60.0
"""Far longer than anything here takes: a thread that never answers fails a test in the end."""


class Held:
    """Decoding that begins when it is allowed to, on whatever thread it was begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed, self.begun = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []
        self.error: Exception | None = None
        self._decode = rows.decode
        monkeypatch.setattr(rows, "decode", self)

    def __call__(self, *args: Any) -> torch.Tensor:
        self.threads.append(threading.current_thread())
        self.begun.set()
        if threading.current_thread() is not threading.main_thread():
            assert self.allowed.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return self._decode(*args)


class Rig:
    """Fetches of one plan, of which all has landed; E in two runs, as an arena may have it."""

    def __init__(self) -> None:
        self.arena = Arena(1 << 20)
        self.values = torch.randn(NUM_TOKENS, HIDDEN)
        raw = bytearray(E_BYTES)
        CODING.store(self.values, memoryview(raw))
        self.raw = bytes(raw)
        no_rows = torch.empty(0, HIDDEN)
        parts: Any = (None, SimpleNamespace(no_rows=no_rows), CODING)
        settings = SimpleNamespace(fetch_deadline_s=WAIT_S)
        server: Any = SimpleNamespace(settings=settings, page_size=PAGE)
        self.sources = Sources(
            server,
            SimpleNamespace(fetch=lambda *_: self.staging()),  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            ServerPool(*parts, PAGE),
        )

    def staging(self) -> Any:
        parts = dict.fromkeys(PLAN.steps, Blocks(1, NUM_TOKENS)) | {E_STEP: Blocks(1, E_BYTES)}
        it = staged(self.arena, parts, Deadline.after(WAIT_S))
        for step in PLAN.steps:
            it.write(step, 0, memoryview(self.raw if step == E_STEP else bytes(NUM_TOKENS)))
        return it

    def source(self) -> Source:
        found = self.sources.of(PLAN, (), request(), None)  # type: ignore[arg-type]
        assert found is not None
        return found


def until(source: Source) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not source.progress().has_e:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.allowed.set()


def test_a_request_is_ready_once_its_e_is_decoded_by_another_thread(held: Held) -> None:
    rig = Rig()
    meter: Any = FakeMeter(recompute=None)
    arrivals = Arrivals(rig.sources, meter, None)  # type: ignore[arg-type]
    it = Request(request())
    it.take_up(planned_as(PLAN))
    assert arrivals.look(it, None) is Phase.FETCHING  # type: ignore[arg-type]
    source = it.source
    assert source is not None and source.arrival.is_complete
    held.allowed.set()
    until(source)
    assert arrivals.look(it, None) is Phase.READY  # type: ignore[arg-type]
    at = Span(2 * PAGE, 3 * PAGE)
    expected = CODING.load([memoryview(bytearray(rig.raw))], torch.empty(0, HIDDEN))[
        PAGE : 2 * PAGE
    ]
    num_decoded = len(held.threads) - 1  # Without the one that was just expected.
    found = source.e(1, at)
    assert torch.equal(found, expected)
    assert len(held.threads) == num_decoded + 1
    assert threading.main_thread() not in held.threads[:num_decoded]
    # Each piece is a part of what was decoded: nothing is copied again.
    assert (
        source.e(1, Span(PAGE, 4 * PAGE)).untyped_storage().data_ptr()
        == found.untyped_storage().data_ptr()
    )


def test_its_bytes_are_not_lent_again_while_they_are_decoded(held: Held) -> None:
    rig = Rig()
    source = rig.source()
    source.progress()
    assert held.begun.wait(WAIT_S)
    source.release()
    del source
    assert rig.arena.lent_bytes == 0 < rig.arena.held_bytes
    held.allowed.set()
    deadline_s = time.monotonic() + WAIT_S
    while rig.arena.held_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_what_is_decoded_ahead_is_bounded(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_MOST_BYTES", 2 * NUM_TOKENS * HIDDEN * 4)
    held.allowed.set()
    rig = Rig()
    one, two, three = (rig.source() for _ in range(3))
    for source in (one, two):
        until(source)
    assert not three.progress().has_e
    one.release()
    until(three)


def test_one_that_is_larger_than_the_bound_is_decoded_alone(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_MOST_BYTES", 1)
    held.allowed.set()
    until(Rig().source())


def test_what_goes_wrong_ends_the_fetch(held: Held) -> None:
    held.error = MemoryError("a test")
    held.allowed.set()
    source = Rig().source()
    with pytest.raises(FetchError, match="E could not be decoded: a test"):
        until(source)
