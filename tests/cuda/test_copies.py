"""The thread that copies into slots on a device, for a batch of several loads."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from virtual_cuda import VirtualCuda

from cachetree.checkpoint import Codec
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
