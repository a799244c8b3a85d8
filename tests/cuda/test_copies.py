"""The thread that copies into slots on a device, for a batch of several loads."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from virtual_cuda import VirtualCuda

from cachetree.checkpoint import Codec
from cachetree.clock import Deadline
from cachetree.errors import FetchError
from cachetree.ids import Span
from cachetree.memory import copying
from sglang_droidspeak.request.load import Copies, Load, Loader
from sglang_droidspeak.store.rows import Coding, DeviceRows, ServerPool

WIDTH, NUM_LAYERS = 64, 2
PLAN: Any = SimpleNamespace(block=Span(0, 0))


class Source:
    """Page-locked memory with a row for one slot."""

    def __init__(self, cuda: VirtualCuda) -> None:
        self.memory = cuda.page_locked(4 * WIDTH)
        self.pool = torch.zeros(4, WIDTH, device="cuda")
        self.staging = SimpleNamespace(num_bytes=4 * WIDTH, is_complete=True)

    def wait(self, _step: object) -> None:
        """Return at once: this stand-in for a fetch has all bytes from the start."""

    def copy(self, _layer: int, _at: Span, slots: torch.Tensor) -> int:
        row = torch.frombuffer(self.memory, dtype=torch.float32).to("cuda", non_blocking=True)
        self.pool[slots] = row[None]
        return self.memory.nbytes


class Breaks(Source):
    def copy(self, *_args: object) -> int:
        raise torch.OutOfMemoryError("a test")


def copied(cuda: VirtualCuda, *sources: Source) -> Loader:
    """Return a loader that has just ended a batch of these sources."""
    loader = Loader(NUM_LAYERS, Copies(None, "cuda"))
    slots = torch.tensor([2], device="cuda")
    at: Any = Span(0, 1)
    loads = [Load(plan=PLAN, source=it, at=at, slots=slots) for it in sources]  # type: ignore[arg-type]
    loader.finish(loader.start(loads))
    return loader


def test_it_never_leaves_its_stream_for_the_first_device(cuda):
    loader = copied(cuda, Source(cuda))
    left = [name for name in cuda.left if name == "droidspeak-loader"]
    loader.close()
    assert left == []


def test_no_copy_is_asked_for_before_its_stream_waits_for_forwards(cuda, monkeypatch):
    loader, calls = Loader(NUM_LAYERS, Copies(None, "cuda")), []
    monkeypatch.setattr(Copies, "begin", lambda *_: calls.append("waits"))
    monkeypatch.setattr(loader._thread, "put", lambda _: calls.append("asks"))
    loader.start([])
    loader.close()
    assert calls[:2] == ["waits", "asks"]


def test_a_batchs_copies_wait_for_all_that_computes(cuda, monkeypatch):
    forwards, waited, recorded = torch.cuda.Stream(), [], []
    copies = Copies(forwards, "cuda")
    monkeypatch.setattr(copies._stream, "wait_stream", waited.append)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda *on: recorded.append(on))
    )
    copies.begin(0)
    copies.start_clock(0)
    assert waited == [torch.cuda.current_stream(), forwards]
    assert recorded == [(copies._stream,)], "the clock starts behind what the copies wait for"


def test_the_clock_stops_behind_the_last_layers_copy(cuda, monkeypatch):
    calls: list[object] = []
    monkeypatch.setattr(Copies, "record", lambda _self, _index, layer: calls.append(layer))
    monkeypatch.setattr(Copies, "stop_clock", lambda *_: calls.append("stop"))
    copied(cuda).close()
    assert calls == [0, "stop", 1]


def test_a_forward_waits_on_the_device_for_the_copy_of_each_layer(cuda, monkeypatch):
    waited = []
    monkeypatch.setattr(Copies, "forward_waits", lambda _self, *of: waited.append(of))
    loader = Loader(NUM_LAYERS, Copies(None, "cuda"))
    index = loader.start([])
    loader.counter.set_consumer(index)
    for layer in range(NUM_LAYERS):
        loader.counter.wait_until(layer)
    loader.finish(index)
    loader.close()
    assert waited == [(index, layer) for layer in range(NUM_LAYERS)]


def test_the_current_stream_waits_for_one_layers_copy_or_for_all(cuda, monkeypatch):
    copies, waited = Copies(None, "cuda"), []
    copies.begin(0)
    with copies.on_stream():
        copies.record(0, 1)
    stream = SimpleNamespace(wait_event=waited.append, wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    copies.forward_waits(0, 0)
    assert waited == [], "nothing was copied of that layer"
    copies.forward_waits(0, 1)
    copies.current_stream_waits()
    assert waited == [copies._events[0][1], copies._stream]


def test_a_lost_device_copies_nothing_more(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: 1 / 0)
    Copies(None, "cuda").stop()


def test_a_load_with_a_layer_missing_says_so():
    source: Any = SimpleNamespace()
    at: Any = Span(0, 1)
    load = Load(plan=PLAN, source=source, at=at, slots=torch.tensor([2]))
    load.fail()
    assert str(load.wait_staged(Deadline.after(60))) == "a layer could not be copied"


def test_seconds_of_the_hosts_copies_are_shared_by_bytes():
    loader, loads = Loader(NUM_LAYERS, Copies(None, "cpu")), []
    for num_bytes in (100, 300):
        source: Any = SimpleNamespace(
            wait=lambda _: None,
            copy=lambda *_, num_bytes=num_bytes: num_bytes,
            staging=SimpleNamespace(num_bytes=1, is_complete=True),
        )
        at: Any = Span(0, 1)
        loads.append(Load(plan=PLAN, source=source, at=at, slots=torch.tensor([2])))
    loader.finish(loader.start(loads))
    loader.close()
    seconds = sum(it.copied_s for it in loads)
    assert seconds > 0
    assert [it.copy_s for it in loads] == pytest.approx([seconds / 4, 3 * seconds / 4])


def test_who_cannot_wait_for_a_layer_or_copy_it_says_which(cuda, caplog):
    waits, copies = Source(cuda), Breaks(cuda)
    waits.wait = lambda _: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    copied(cuda, waits, copies).close()
    said = [f"{what} layer {it} failed" for it in (0, 1) for what in ("waiting for", "loading")]
    assert caplog.messages == said


def test_what_is_copied_beside_a_load_that_breaks_is_waited_for_too(cuda):
    source = Source(cuda)
    loader = copied(cuda, source, Breaks(cuda))
    copying.copy(source.memory, memoryview(np.ones(4 * WIDTH, np.uint8)))  # Another fetch has it.
    loader.close()
    assert not cuda.races, cuda.races[0]


def test_no_copy_runs_on_a_stream_that_computes(cuda, monkeypatch):
    """torch hands out a few streams in turn, and SGLang has one of them."""
    pool = [torch.cuda.Stream() for _ in range(4)]
    in_turn = iter([*pool[:3], *pool[2:]])
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: next(in_turn))
    with monkeypatch.context() as scheduling:
        scheduling.setattr(torch.cuda, "current_stream", lambda: pool[1])
        copies = Copies(pool[0], "cuda")
    with copies.on_stream():
        assert torch.cuda.current_stream() is pool[2]
    assert copies.another_stream() is pool[3]


def test_who_abandons_a_load_waits_for_the_layer_that_is_being_copied():
    is_copying, may_end, events = threading.Event(), threading.Event(), []

    def copy(*_: object) -> int:
        is_copying.set()
        may_end.wait(60)
        events.append("copied")
        return 0

    source: Any = SimpleNamespace(
        wait=lambda _: None, copy=copy, staging=SimpleNamespace(fail=lambda _: None)
    )
    at: Any = Span(0, 1)
    load = Load(plan=PLAN, source=source, at=at, slots=torch.tensor([2]))
    copying = threading.Thread(target=load.copy, args=(0,))
    copying.start()
    assert is_copying.wait(60)
    threading.Timer(0.1, may_end.set).start()
    load.abandon(FetchError("a test"))
    events.append("abandoned")
    copying.join()
    load.copy(1)
    assert events == ["copied", "abandoned"], "and of what comes later nothing is"


def test_a_long_load_takes_no_more_of_the_devices_memory_than_a_forwards_tokens():
    written: list[tuple[list[int], bytes]] = []

    def write(_layer: int, slots: torch.Tensor, source: memoryview) -> None:
        written.append((slots.tolist(), bytes(source)))

    rows: Any = SimpleNamespace(write_from=write, most_tokens=DeviceRows.most_tokens)
    pool = ServerPool(rows, None, Coding(Codec.NONE, 1), 16)  # type: ignore[arg-type]
    data = np.random.default_rng(1).bytes(2 * 20_000)
    runs = [memoryview(data[:6_000]), memoryview(data[6_000:])]
    assert pool.load(0, torch.arange(20_000), runs) == len(data)
    assert max(len(slots) for slots, _ in written) == 4096
    assert [slot for slots, _ in written for slot in slots] == list(range(20_000))
    assert b"".join(source for _, source in written) == data
