"""Memory runs out during a recompute, a copy or both. The request is answered or aborted, and the
server continues."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from standins import loading, made, request

from cachetree.clock import Deadline
from cachetree.errors import DeadlineExceeded, FetchError, StaleEntry
from cachetree.ids import EMPTY_SPAN, Location, ModelId, Span, Step
from cachetree.memory.staging import Staging
from cachetree.names import ModelNames
from cachetree.planning.plan import Plan
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import ForwardMode
from sglang_droidspeak.linker import DroidSpeakLinker
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request import forward, partial_prefill
from sglang_droidspeak.request.forward import BatchForward
from sglang_droidspeak.request.load import Copies, Loader
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.partial_prefill import BlockTokens, PartialPrefill
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.request.request import Request
from sglang_droidspeak.request.source import Staged
from sglang_droidspeak.store.e_pool import EPool
from sglang_droidspeak.store.rows import ServerPool

PAGE, NUM_LAYERS, NUM_TOKENS = 16, 4, 64
EVERYTHING = Span(0, NUM_LAYERS)
SLOTS = torch.arange(100, 100 + NUM_TOKENS)
PLAN = Plan(
    sender=ModelId("s"),
    receiver=ModelId("r"),
    location=Location("tcp://127.0.0.1:1"),
    pages=Span(0, NUM_TOKENS // PAGE),
    block=Span(1, 3),
    num_layers=NUM_LAYERS,
)
REUSED = RequestProvenance(outcome="reused", reused_tokens=NUM_TOKENS, exact=False)


class Rows:
    """A KV pool that runs out of memory in one layer, `failures` times."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.failures = 0
        self.most_tokens = 8192

    def write_from(self, layer: int, _slots: torch.Tensor, _rows: memoryview) -> None:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("a test")
        self.written.append(layer)


class Prefills:
    """A stand-in for the model. It notes the computed blocks, and can run out of memory."""

    def __init__(self) -> None:
        self.blocks: list[Span] = []
        self.in_full: list[Span] = []
        self.failures = 0

    def run(self, _batch: Any, prefixes: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("a test")
        self.blocks += [it.block for it in prefixes]
        self.last = prefixes[-1]

    def run_in_full(self, batch: Any, _row: int, tokens: Span) -> None:
        if tokens:
            self.in_full.append(tokens)
            self.run(batch, [SimpleNamespace(block=EVERYTHING)])


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, forward_wait_s: float = 10.0) -> None:
        self.rows, self.prefills = Rows(), Prefills()
        self.released: list[Staging] = []
        self.labels = Labels(Metrics(enabled=False), ModelNames())
        monkeypatch.setattr(forward, "PartialPrefill", lambda *_: self.prefills)
        self.loader = Loader(NUM_LAYERS, Copies(None, "cpu"))
        parts: Any = (self.rows, MagicMock(), MagicMock())
        self.pool = ServerPool(*parts, PAGE)
        server = SimpleNamespace(
            identity=SimpleNamespace(num_layers=NUM_LAYERS),
            settings=SimpleNamespace(forward_wait_s=forward_wait_s, recompute_attention="server"),
        )
        table = torch.zeros(1, 128, dtype=torch.int64)
        table[0, :NUM_TOKENS] = SLOTS
        runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
        self.e_pool = EPool((), 200, Span(0, 1), SimpleNamespace(dtype=None, device="cpu"))
        self.forward = made(
            BatchForward,
            attachment=SimpleNamespace(
                server=server, runner=runner, e_pool=self.e_pool, stack=None
            ),
            loader=self.loader,
            meter=MagicMock(prefill=None, mean_prefill_s=lambda *_: None),
            labels=self.labels,
            ranks=Ranks(None),
        )
        self.req = request()
        self.req.extend_end = NUM_TOKENS + 1

    def loading(self, num_landed=None, num_there=0, num_head=0):
        """Return a request of which `num_landed` steps, or all, have landed. The device has
        `num_there` of its tokens, and it computes `num_head` after them."""
        staging = Staging(dict.fromkeys(PLAN.steps, NUM_TOKENS), Deadline.after(60))
        for step in PLAN.steps[:num_landed]:
            staging.write(step, 0, memoryview(bytes(NUM_TOKENS)))
        staging.release = lambda: self.released.append(staging)  # type: ignore[attr-defined]
        source = Staged(PLAN, self.pool, staging)
        prefixes.move(self.req, approximate=True)
        prefixes.note_approximate(self.req, NUM_TOKENS)
        at = Span(num_there + num_head, NUM_TOKENS)
        request = loading(PLAN, source, at, SLOTS[at.start :], self.req)
        request.load.head = Span(num_there, at.start) if num_head else EMPTY_SPAN
        return request

    def told(self) -> dict[str, Any]:
        self.labels.report([self.req])
        ((entry,),) = self.req.customized_info.values()
        return entry

    @property
    def num_cached(self) -> tuple[int, int]:
        """Return how many tokens SGLang counts as cached, and how many of these were loaded."""
        return self.req.cached_tokens, self.req.cached_tokens_host

    def num_reused(self) -> float:
        """Return the reused tokens that the metrics count."""
        (metric,) = self.labels.metrics.reused_tokens.collect()
        return sum(it.value for it in metric.samples if it.name.endswith("_total"))

    def is_told_exact(self) -> bool:
        return self.told()["exact"]

    def run(self) -> bool:
        """Run a batch of one request with a loaded prefix. True if SGLang keeps its result."""
        return self.end(self.launch(self.loading()))

    def launch(self, request: Request) -> int:
        """Launch the batch of this load. Return the index by which SGLang ends it."""
        index = self.loader.start([request.load])
        self.forward.expect(index, [request])
        if not self.req.retracted_stain:  # As SGLang counts.
            self.req.cached_tokens, self.req.cached_tokens_host = (
                NUM_TOKENS,
                len(request.load.whole),
            )
        batch = SimpleNamespace(
            reqs=[self.req],
            prefix_lens=[NUM_TOKENS],
            extend_lens=[1],
            extend_num_tokens=1,
            req_pool_indices=torch.tensor([0]),
            req_pool_indices_cpu=torch.tensor([0]),
            out_cache_loc=torch.tensor([900]),
            forward_mode=ForwardMode.EXTEND,
            hicache_consumer_index=index,
        )
        original = MagicMock(return_value="logits")
        assert self.forward.run_batch(original, None, batch) == "logits"
        original.assert_called_once()
        return index

    def end(self, index: int) -> bool:
        ends = threading.Thread(target=self.loader.finish, args=[index], daemon=True)
        ends.start()
        ends.join(20)
        assert not ends.is_alive(), "the batch's loads do not end"
        return self.forward.done(index)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch):
    rig_ = Rig(monkeypatch)
    yield rig_
    rig_.loader.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch):
    """Let forwards wait only for layers that are arriving already."""
    slow = Rig(monkeypatch, forward_wait_s=HASTY_S)
    yield slow
    slow.loader.close()


def assert_reuse_works(rig: Rig) -> None:
    rig.prefills.blocks.clear()
    rig.rows.written.clear()
    assert rig.run()
    assert rig.prefills.blocks == [PLAN.block]
    assert rig.rows.written == [0, 3]


def test_without_a_fault_the_block_is_computed_and_the_rest_copied(rig):
    assert_reuse_works(rig)
    assert not rig.is_told_exact()
    assert rig.num_cached == (NUM_TOKENS, NUM_TOKENS)


def test_a_recompute_without_memory_becomes_a_full_prefill(rig):
    rig.prefills.failures = 1
    assert rig.run()
    assert rig.prefills.blocks == [EVERYTHING]
    assert rig.is_told_exact()
    assert rig.num_cached == (0, 0)
    rig.req.retracted_stain = True  # SGLang does not count again what it admits again.
    rig.prefills.failures = 1
    assert rig.run()
    assert rig.num_cached == (0, 0)
    rig.req.retracted_stain = False
    assert_reuse_works(rig)


def test_a_full_prefill_after_approximate_pages_is_approximate(rig):
    """The approximate tokens were on the device before. No fault of this load makes them exact."""
    rig.prefills.failures = 1
    assert rig.end(rig.launch(rig.loading(num_there=PAGE)))
    assert rig.prefills.blocks == [EVERYTHING]
    assert not rig.is_told_exact()
    assert prefixes.is_approximate(rig.req)
    assert rig.told()["approximate_tokens"] == PAGE
    assert rig.num_cached == (PAGE, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_head_is_computed_first_and_counts_as_computed(rig, fails):
    rig.prefills.failures = int(fails)
    assert rig.end(rig.launch(rig.loading(num_head=PAGE)))
    whole, head = Span(0, NUM_TOKENS), Span(0, PAGE)
    assert rig.prefills.in_full == ([head, whole] if fails else [head])
    assert rig.prefills.blocks == [EVERYTHING] * fails or [EVERYTHING, PLAN.block]
    assert rig.num_cached == ((0, 0) if fails else (NUM_TOKENS - PAGE,) * 2)
    assert rig.is_told_exact() == fails


def test_where_the_full_prefill_fails_too_only_its_batch_is_given_up(rig):
    rig.prefills.failures = 2
    assert not rig.run()
    assert rig.prefills.blocks == []
    assert_reuse_works(rig)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("adopts", [False, True, torch.OutOfMemoryError("a test")], ids=repr)
def test_what_is_loaded_without_e_is_the_requests_to_tell(rig, adopts, fails):
    """If a full prefill has computed the tokens instead, the tokens have E."""
    request = rig.loading(num_landed=0 if fails else None)
    request.load.plan, source = replace(PLAN, sender=PLAN.receiver), request.load.source
    adopt_e = source.adopt_e if adopts is False else MagicMock(side_effect=[adopts])
    source.adopt_e = MagicMock(side_effect=adopt_e)  # type: ignore[method-assign]
    if fails:
        source.staging.fail(FetchError("a test"))
    assert rig.end(rig.launch(request))
    assert source.adopt_e.call_count == (not fails)
    assert prefixes.num_approximate(rig.req) == NUM_TOKENS, "as before: none of these was loaded"
    assert prefixes.num_without_e(rig.req) == (0 if adopts is True or fails else NUM_TOKENS)
    assert_reuse_works(rig)


@pytest.mark.parametrize("is_exact", [False, True])
def test_recompute_that_starts_from_another_models_e_has_no_e_of_its_own(rig, is_exact):
    request = rig.loading()
    request.load.plan = replace(PLAN, sender=PLAN.receiver if is_exact else PLAN.sender)
    assert rig.end(rig.launch(request))
    assert rig.prefills.last.is_exact == is_exact


@pytest.mark.parametrize("is_exact", [False, True])
def test_layers_are_told_whether_their_e_is_the_own_models(monkeypatch, is_exact):
    forward_batch = SimpleNamespace()
    monkeypatch.setattr(partial_prefill, "replay_of", lambda *_: forward_batch)
    monkeypatch.setattr(partial_prefill, "prepared", lambda *_: nullcontext())
    request: Any = MagicMock()
    tokens = BlockTokens(
        row=0, tokens=Span(0, PAGE), block=Span(0, 1), read_e=None, is_exact=is_exact
    )
    PartialPrefill._forward(request, MagicMock(), [tokens])
    request._stack.run.assert_called_once()
    assert forward_batch.has_own_e == is_exact


def test_slots_that_are_loaded_into_lose_the_e_of_their_last_owner(rig):
    rig.e_pool.valid[:] = True
    assert_reuse_works(rig)
    assert (~rig.e_pool.valid).nonzero().flatten().tolist() == SLOTS.tolist()


def test_a_copy_without_memory_is_computed_or_its_batch_given_up(rig):
    """If the fault is known before the forward, the tokens are computed. If not, the batch is given
    up."""
    rig.rows.failures = 1
    is_kept = rig.run()
    assert is_kept == (EVERYTHING in rig.prefills.blocks)
    assert_reuse_works(rig)


def test_a_copy_that_breaks_takes_no_other_load_of_its_batch_with_it(rig):
    loads = [rig.loading().load, rig.loading().load]
    rig.rows.failures = 1
    rig.loader.finish(rig.loader.start(loads))
    assert [it.is_good for it in loads] == [False, True]
    assert [it.wait_staged(Deadline.after(0)) is None for it in loads] == [False, True]


def test_a_wait_that_breaks_takes_no_other_load_of_its_batch_with_it(rig):
    loads = [rig.loading().load, rig.loading().load]
    staging = loads[0].source.staging
    loads[0].source = SimpleNamespace(staging=staging, wait=lambda _step: 1 / 0)
    index = rig.loader.start(loads)
    rig.forward.expect(index, [])
    rig.end(index)
    assert [it.is_good for it in loads] == [False, True]
    assert_reuse_works(rig)


def test_kv_of_another_model_is_told_as_such_and_takes_over_no_e(rig):
    """The KV counts as another model's even if the request's namespace does not say so."""
    request = rig.loading()
    request.load.source.adopt_e = MagicMock(return_value=True)  # type: ignore[method-assign]
    assert rig.end(rig.launch(request))
    prefixes.move(rig.req, approximate=False)
    assert not rig.is_told_exact()
    request.load.source.adopt_e.assert_not_called()


@pytest.mark.parametrize("breaks_at", [0, 2])
def test_a_loader_that_dies_ends_no_forward_and_no_later_batch(rig, monkeypatch, caplog, breaks_at):
    """The forward waits for each layer, as SGLang's pool does. After the first layers, it is
    already running."""

    def record(self: Copies, index: int, layer: int) -> None:
        if layer == breaks_at:
            raise RuntimeError("CUDA error: a test")
        record_soundly(self, index, layer)

    record_soundly = Copies.record
    monkeypatch.setattr(Copies, "record", record)
    counter = rig.loader.counter
    for _ in range(2):
        request = rig.loading()
        index = rig.loader.start([request.load])
        counter.set_consumer(index)
        waits = threading.Thread(
            target=lambda: [counter.wait_until(layer) for layer in range(NUM_LAYERS)], daemon=True
        )
        waits.start()
        waits.join(20)
        assert not waits.is_alive(), "the forward waits for ever"
        rig.forward.expect(index, [request])
        assert not rig.end(index)
    assert not rig.loader.is_alive
    (line,) = [it.getMessage() for it in caplog.records if it.name == "cachetree.tier"]
    assert "droidspeak-loader" in line and "CUDA error: a test" in line


def test_a_loader_that_died_before_a_forward_costs_a_full_prefill(rig, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Copies, "record", lambda *_: 1 / 0)
        rig.end(rig.loader.start([rig.loading().load]))
    for _ in range(3):
        assert rig.run()
        assert rig.prefills.blocks[-1] == EVERYTHING


@pytest.mark.parametrize("has_died_here", [True, False])
def test_a_server_whose_loader_died_is_off_on_all_ranks(has_died_here):
    linker: Any = MagicMock(_loader=SimpleNamespace(is_alive=not has_died_here, finish=id))
    linker._planner.off = ""
    linker._ranks.least = lambda _mine: [False]
    linker._retire = partial(DroidSpeakLinker._retire, linker)
    for _ in range(2):
        DroidSpeakLinker.finish_layer_wise_loading(linker, 0)
    assert linker._planner.off == "loader_failed"
    assert linker._offloader.is_stopped is True
    linker._cache.stop_serving.assert_called_once_with()


@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_batch_that_is_launched_before_the_last_one_ended_shares_nothing_with_it(rig, failing):
    """The order is that of SGLang's overlap schedule; memory runs out in one of the two."""
    requests, indices = [rig.loading(), rig.loading()], []
    for number, one in enumerate(requests):
        rig.prefills.failures = 2 if number == failing else 0
        indices.append(rig.launch(one))
    for number, (one, index) in enumerate(zip(requests, indices, strict=True)):
        staging = one.source.staging
        assert staging not in rig.released
        assert rig.end(index) == (number != failing)
        assert rig.released[-1] is staging
    assert_reuse_works(rig)


def test_a_copy_that_fails_under_the_forward_is_no_result(rig):
    one = rig.loading()
    index = rig.launch(one)
    one.load.is_good = False
    assert not rig.end(index)
    rig.req.finished_reason = FINISH_ABORT("External KV cache load failed")
    assert rig.told()["outcome"] == "aborted"
    assert rig.num_reused() == 0
    assert_reuse_works(rig)
    assert rig.num_reused() == NUM_TOKENS


def test_a_copy_that_fails_on_another_rank_is_no_result(rig):
    request = rig.loading()
    rig.forward._ranks = SimpleNamespace(least=lambda values: [False for _ in values])
    rig.labels.note(rig.req, REUSED)
    rig.forward.expect(7, [request])
    assert not rig.forward.done(7)
    rig.req.finished_reason = FINISH_ABORT("External KV cache load failed")
    assert rig.told()["outcome"] == "aborted"


HASTY_S = 0.01
FETCHED_S = 0.4
"""Seconds that two of three steps took. The third step is expected in half of that time."""


def test_a_forward_waits_for_what_still_comes_at_its_rate(hasty):
    request = hasty.loading(num_landed=2)
    time.sleep(FETCHED_S)
    late = [PLAN.steps[-1], 0, memoryview(bytes(NUM_TOKENS))]
    threading.Timer(FETCHED_S / 4, request.source.staging.write, late).start()
    assert hasty.end(hasty.launch(request))
    assert hasty.prefills.blocks == [PLAN.block]
    assert not request.load.cause


def test_a_forward_does_not_wait_for_a_link_that_stalls(hasty):
    request = hasty.loading(num_landed=2)
    time.sleep(FETCHED_S)
    assert hasty.end(hasty.launch(request))
    assert hasty.prefills.blocks[-1] == EVERYTHING
    assert request.load.cause == "ForwardWaitExceeded"


def test_what_ends_a_fetch_while_its_forward_waits_is_the_cause(hasty):
    request = hasty.loading(num_landed=2)
    staging = request.source.staging
    wait = staging.wait

    def wait_in_vain(step: Step, deadline: Deadline | None = None) -> None:
        try:
            wait(step, deadline)
        except DeadlineExceeded:
            staging.fail(StaleEntry("a test"))
            raise

    staging.wait = wait_in_vain  # type: ignore[method-assign]
    assert hasty.end(hasty.launch(request))
    assert request.load.cause == "StaleEntry"


@pytest.mark.parametrize(("num_landed", "share"), [(3, 0.0), (2, 0.525), (1, 1.0), (0, 1.0)])
def test_a_forward_waits_at_most_as_long_as_the_fetch_took(hasty, num_landed, share):
    """After one step in three, the rest would take twice as long as this step."""
    request, waits_s = hasty.loading(num_landed), []
    source = request.source
    time.sleep(FETCHED_S)

    def wait(_step: Step, deadline: Deadline | None = None) -> None:
        if deadline is not None:  # It is not the loader.
            waits_s.append(deadline.remaining_s())
        raise FetchError("a test")

    source.staging.wait = wait  # type: ignore[method-assign]
    least_s = source.elapsed_s
    hasty.end(hasty.launch(request))
    most_s = source.elapsed_s
    assert share * least_s - 0.1 <= waits_s[0] <= share * most_s + HASTY_S
