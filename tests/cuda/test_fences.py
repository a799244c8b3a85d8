"""No access races with another, and every fence in the product is needed for that.

The work of a server on its streams runs on a virtual device, with SGLang's own model and pools and
the product's own classes. Then it runs again for every fence, without this fence. A missing fence
shows as a race. It is also an error if no scenario needs a fence, or if none passes it.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_on_cuda import MAP, PAGE, Engine, Part, fork, land, load, on_device
from standins import loading
from virtual_cuda import ROOT, Line, VirtualCuda

from cachetree.clock import Deadline
from cachetree.errors import FetchError
from cachetree.ids import KV, LOCAL, Kind, PageHash, Span, Step, steps_of
from profiles.random_models import shape, write_models
from sglang_droidspeak.request.load import Copies, Loader
from sglang_droidspeak.request.source import Staged
from sglang_droidspeak.store.pool import PoolPages
from sglang_droidspeak.store.rows import KernelRows

TOKENS = list(range(4, 4 + 2 * PAGE + 4))
BLOCK = Span(1, 3)
STAGED_BYTES = 1 << 16
ORDERING = {"wait_stream", "wait_event", "synchronize", "query"}


def older_forward(engine: Engine, slots: torch.Tensor) -> None:
    """Run a forward that was launched before. It may still run, and writes these slots."""
    pool = engine.runner.token_to_kv_pool
    with torch.cuda.stream(engine.forwards):
        engine.forwards.wait_stream(engine.schedule)
        rows = [*pool.k_buffer, *pool.v_buffer, *engine.e_pool.e.values()]
        for buffer in rows:
            buffer[slots] = torch.ones(len(slots), *buffer.shape[1:], device="cuda")
        engine.e_pool.valid.index_fill_(0, slots, True)


def a_load_from_a_peer(engine: Engine) -> None:
    memory = engine.cuda.page_locked(STAGED_BYTES)
    slots = engine.slots(PAGE, 3 * PAGE)
    older_forward(engine, slots)
    request = engine.loading(slots[: 2 * PAGE], BLOCK, memory, e_map=MAP)
    land(request.source.staging)
    engine.run_with([request], Part(TOKENS, slots, 2 * PAGE))
    # Between any two events a virtual device takes a millisecond.
    assert request.load.copy_s == 0.001
    # The memory is another fetch's now.
    land(engine.loading(slots[: 2 * PAGE], BLOCK, memory).source.staging)
    torch.cuda.synchronize()
    assert engine.e_pool.num_pages_without(slots[: 2 * PAGE], PAGE) == 2, "E of who had the slots"


def a_load_that_fails(engine: Engine) -> None:
    memory = engine.cuda.page_locked(STAGED_BYTES)
    slots = engine.slots(PAGE, 3 * PAGE)
    request = engine.loading(slots[: 2 * PAGE], BLOCK, memory)
    values = {Step(Kind.E, 1): torch.ones(2 * PAGE, 64)}
    values[Step(Kind.KV, 0)] = torch.ones(2 * PAGE, 2, 64)
    land(request.source.staging, values)

    def fail() -> None:
        while not request.load.copied_bytes:
            time.sleep(0.001)
        request.source.staging.fail(FetchError("the peer is gone"))

    engine.run_with([request], Part(TOKENS, slots, 2 * PAGE), meanwhile=fail)
    land(engine.loading(slots[: 2 * PAGE], BLOCK, memory).source.staging)


def a_loader_that_dies(engine: Engine) -> None:
    memory = engine.cuda.page_locked(STAGED_BYTES)
    slots = engine.slots(PAGE, 2 * PAGE)
    request = engine.loading(slots, BLOCK, memory)
    land(request.source.staging)
    with patch.object(Copies, "record", lambda *_: 1 / 0):
        engine.loader.finish(engine.loader.start([request.load]))
    assert not request.load.is_good
    land(engine.loading(slots, BLOCK, memory).source.staging)


def a_load_from_the_pool(engine: Engine) -> None:
    source, slots = engine.slots(PAGE, 2 * PAGE), engine.slots(4 * PAGE, 3 * PAGE)
    older_forward(engine, source)
    older_forward(engine, slots)
    loaded = engine.slots(4 * PAGE, 2 * PAGE)
    request = engine.loading(loaded, BLOCK, PoolPages(source), e_map=MAP)
    engine.run_with([request], Part(TOKENS, slots, 2 * PAGE))
    # SGLang may give the source's slots to another request now, and to the stream of its scheduler
    # the memory in which these numbers were.
    for freed in (loaded, source):
        freed.zero_()
    older_forward(engine, engine.slots(PAGE, 2 * PAGE))


def a_load_of_what_is_cached(engine: Engine) -> None:
    """Load cached pages: the device reads the arena itself, and nothing is staged."""
    pages = an_offload(engine)
    slots = engine.slots(8 * PAGE, 3 * PAGE)
    older_forward(engine, slots)
    plan = engine.loading(slots[: 2 * PAGE], BLOCK, PoolPages(slots)).plan
    plan = replace(plan, location=LOCAL)
    staging = engine.cache.fetch(plan, pages, Deadline.after(300))
    source = Staged(plan, engine.pool, staging)
    req = SimpleNamespace(rid="r")
    request = loading(plan, source, Span(0, 2 * PAGE), slots[: 2 * PAGE], req)
    engine.run_with([request], Part(TOKENS, slots, 2 * PAGE))
    # The memory is another prompt's now.
    engine.cache.tree.evict()
    an_offload(engine)


def an_offload(engine: Engine) -> list[PageHash]:
    slots = engine.slots(PAGE, 2 * PAGE)
    older_forward(engine, slots)
    pages = engine.store(TOKENS, slots)
    # A peer asks for what is stored, and SGLang gives the slots to another request.
    parts = (KV, *engine.e_pool.e)
    lease = engine.cache.tree.lease(engine.model, pages, "a peer", Deadline.after(60), parts)
    for part in parts:
        for step in steps_of(part, engine.cache.family.num_layers):
            engine.cuda.on_host(reads=lease.views(step))
    older_forward(engine, slots)
    return pages


def a_measured_forward(engine: Engine) -> None:
    with engine.meter.forward([Span(0, 1000)]):
        older_forward(engine, engine.slots(PAGE, PAGE))
    assert engine.meter.prefill


SCENARIOS = (
    a_load_from_a_peer,
    a_load_that_fails,
    a_loader_that_dies,
    a_load_from_the_pool,
    a_load_of_what_is_cached,
    an_offload,
    a_measured_forward,
)


@dataclass(frozen=True)
class Seen:
    scenario: str
    dropped: Line | None
    races: list[str]
    fences: set[Line]
    waits: list[Line]
    allocations: list[Line]
    error: str = ""

    @property
    def is_bad(self) -> bool:
        return bool(self.races or self.error)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    config = shape("llama", layers=4, hidden=64, heads=1, kv_heads=1)
    (path,) = write_models(tmp_path_factory.mktemp("model"), config, ["model"])
    return path


@pytest.fixture(scope="module")
def seen(model) -> dict[tuple[str, Line | None], Seen]:
    """Run each scenario as it is. Then run it without each fence that it passes, until one scenario
    needs the fence."""
    return {(it.scenario, it.dropped): it for it in fork(partial(play_all, model), list[Seen])}


def play_all(model: Path) -> list[Seen]:
    runner = load(model)
    results, needed = [], set()
    for scenario in SCENARIOS:
        whole = fork(partial(play, runner, model, scenario, None), Seen)
        results.append(whole)
        for fence in sorted(whole.fences - needed):
            results.append(fork(partial(play, runner, model, scenario, fence), Seen))
            if results[-1].is_bad:
                needed.add(fence)
    return results


def play(runner: Any, model: Path, scenario: Callable, drop: Line | None) -> Seen:
    cuda, error = VirtualCuda(drop), ""
    with on_device(runner, model, (1,), cuda) as engine:
        cuda.allocations.clear()
        try:
            scenario(engine)
        except Exception as exc:  # noqa: BLE001
            error = repr(exc)
        engine.close()
    races = [str(it) for it in cuda.races[:3]]
    return Seen(scenario.__name__, drop, races, cuda.fences, engine.waits, cuda.allocations, error)


@pytest.mark.parametrize("scenario", [it.__name__ for it in SCENARIOS])
def test_nothing_races(seen, scenario):
    result = seen[scenario, None]
    assert not result.error
    assert not result.races, result.races[0]


@pytest.mark.parametrize(
    "scenario", ["a_load_from_a_peer", "a_load_from_the_pool", "a_load_of_what_is_cached"]
)
def test_the_host_waits_for_nothing_until_the_forward_is_launched(seen, scenario):
    assert sorted(map(str, seen[scenario, None].waits)) == []


def test_a_load_with_corrected_e_takes_no_memory_of_the_device(seen):
    """The buffers were counted before the KV pool was sized. The tensors of a batch are small."""
    loads = ("rows.py", "source.py", "load.py", "partial_prefill.py", "corrections/__init__.py")
    lines = map(str, seen["a_load_from_a_peer", None].allocations)
    assert [it for it in lines if it.partition(":")[0].endswith(loads)] == []


def forwards_before_reads(model: Path) -> list[int]:
    """Return how many layers of its full prefill have run when the event is recorded for which the
    end of a batch waits."""
    read, counts = Loader.read_by_current_stream, []
    with on_device(load(model), model, (1,), VirtualCuda()) as engine:

        def watched(loader: Loader, index: int) -> None:
            counts.append(len(engine.runner.attn_backend.runs))
            read(loader, index)

        with patch.object(Loader, "read_by_current_stream", watched):
            a_load_that_fails(engine)
        counts.append(len(engine.runner.attn_backend.runs))
        engine.close()
    return counts


def test_the_end_of_a_batch_waits_for_no_full_prefill(model):
    """SGLang asks for the end as soon as the batch is launched."""
    before, after = fork(partial(forwards_before_reads, model), list[int])
    assert before == 0 < after


def streams_of_an_offload(model: Path) -> list[bool]:
    """Return, for each gather of an offload, whether other operations run on its stream, too."""
    cuda, read, streams = VirtualCuda(), KernelRows.read, []

    def watched(rows: KernelRows, *args: Any) -> None:
        streams.append(torch.cuda.current_stream())
        read(rows, *args)

    with (
        patch.object(KernelRows, "read", watched),
        on_device(load(model), model, (1,), cuda) as engine,
    ):
        an_offload(engine)
        engine.close()
        busy = (cuda.default_stream, engine.forwards, engine.schedule)
    return [any(it is other for other in busy) for it in streams]


def test_what_is_stored_is_copied_on_a_stream_of_its_own(model):
    assert fork(partial(streams_of_an_offload, model), list[bool]) == [False, False]


def test_every_fence_is_needed(seen):
    needed = {fence for (_, fence), it in seen.items() if fence and it.is_bad}
    dropped = {fence for _, fence in seen if fence}
    assert dropped
    assert sorted(map(str, dropped - needed)) == []


def test_every_fence_in_the_source_is_passed(seen):
    passed = {(it.file, it.number) for _, it in seen if it}
    assert sorted(set(fences_in_source()) - passed) == []


def fences_in_source() -> Iterator[tuple[str, int]]:
    """Return the calls that order streams or wait for the device. `cachetree` has no such call."""
    for path in sorted((ROOT / "sglang_droidspeak").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ORDERING:
                yield str(path.relative_to(ROOT)), node.lineno
