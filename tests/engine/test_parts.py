"""The parts of the engine extension that need no server."""

from __future__ import annotations

import sys
import time
import types
from dataclasses import replace
from math import nan
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client import CollectorRegistry
from standins import loading
from tree_parts import FAMILY

from cachetree.cache import Cache
from cachetree.checkpoint import Codec
from cachetree.clock import Deadline
from cachetree.config import CacheConfig
from cachetree.errors import DeadlineExceeded, FetchError
from cachetree.ids import DISK, EMPTY_SPAN, LOCAL, Kind, Location, ModelId, PageHash, Span, Step
from cachetree.memory.staging import Staging
from cachetree.planning.plan import Match, Plan, Requested
from cachetree.status import FetchCounts
from cachetree.transport import PeerState, PeerStatus
from sglang_droidspeak.engine import HookType, place_hooks
from sglang_droidspeak.metrics import CacheMetrics, Metrics
from sglang_droidspeak.request import load as load_of_a_request
from sglang_droidspeak.request.controls import Controls, parse_controls
from sglang_droidspeak.request.load import ForwardWaitExceeded, Load
from sglang_droidspeak.request.meta_info import outcome_of, provenance_of
from sglang_droidspeak.request.partial_prefill import BlockTokens, pack
from sglang_droidspeak.request.request import Request
from sglang_droidspeak.request.source import Staged
from sglang_droidspeak.store.rows import Coding, DeviceRows, HostRows, ServerPool, rows_of

PAGE = 16
MIDDLE = Span(2, 4)


def prefix(row: int, start: int, stop: int, block: Span = MIDDLE) -> BlockTokens:
    def read(tokens: Span, into: torch.Tensor) -> None:
        into[:, 0] = torch.arange(tokens.start, tokens.stop)

    read_e = read if block.start else None
    return BlockTokens(row=row, tokens=Span(start, stop), block=block, read_e=read_e)


@pytest.mark.parametrize("max_tokens", [1, 3, 7, 100])
def test_pack_covers_every_token_once_in_order(max_tokens):
    prefixes = [
        prefix(0, 0, 9),
        prefix(1, 5, 6, Span(1, 2)),
        prefix(2, 16, 30),
        prefix(3, 0, 4, Span(0, 2)),
    ]
    seen: dict[int, list[int]] = {}
    for forward in pack(prefixes, max_tokens):
        assert sum(len(piece.tokens) for piece in forward) <= max_tokens
        assert len({piece.block for piece in forward}) == 1
        for piece in forward:
            seen.setdefault(piece.row, []).extend(piece.tokens)
            if piece.read_e is not None:
                rows = torch.empty(len(piece.tokens), 1)
                piece.read_e(piece.tokens, rows)
                assert rows[:, 0].tolist() == list(piece.tokens)
    assert seen == {p.row: list(p.tokens) for p in prefixes}


def test_pack_fills_forwards():
    assert len(list(pack([prefix(0, 0, 10), prefix(1, 0, 10)], 5))) == 4


@pytest.mark.parametrize(
    ("block", "span"),
    [(None, None), ("none", EMPTY_SPAN), ("all", Span(0, 6)), ("2:5", Span(2, 5))],
)
def test_controls_name_a_block(block, span):
    assert Controls(block=block).requested(num_layers=6) == Requested(block=span)


@pytest.mark.parametrize("block", ["5:2", "2:2", "2:7", "-1:3", "2", "a:b", ""])
def test_controls_refuse_a_wrong_block(block):
    with pytest.raises(ValueError, match="block"):
        Controls(block=block).requested(num_layers=6)


@pytest.mark.parametrize("params", [{"droidspeak": {"mod": "off"}}, {"droidspeak": 3}])
def test_controls_refuse_what_they_do_not_know(params):
    with pytest.raises(ValueError, match="droidspeak"):
        parse_controls(params)


@pytest.mark.parametrize(
    "params",
    [{"mode": "x\n" * 9999}, {"x\n" * 9999: 1}, {"block": "1\n" * 9999}, {"sender": "s" * 9999}],
)
def test_what_is_said_of_wrong_controls_is_one_short_line(params):
    """The message is kept with the request, and logged."""
    with pytest.raises(ValueError, match="accepted in droidspeak") as refused:
        parse_controls({"droidspeak": params}).requested(6)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 700


def test_controls_are_optional():
    assert parse_controls(None) == parse_controls({"other": 1}) == Controls()


@pytest.mark.parametrize(
    "peer", ["10.0.0.5", "10.0.0.5:8000", "http://10.0.0.5:8000", "tcp://10.0.0.5"]
)
def test_what_a_peer_has_as_well_is_looked_for_there(peer):
    """Other peers count only for pages, E and models that the named peer lacks."""

    def at(location: str, num_pages: int, e_pages: int, model: str = "m") -> Match:
        return Match(
            model=ModelId(model),
            location=Location(location),
            num_pages=num_pages,
            e_pages={2: e_pages},
        )

    far, same = at("tcp://10.0.0.5:7001", 8, 8), at("tcp://10.0.0.6:7001", 8, 8)
    more = [
        at("tcp://10.0.0.6:7001", 9, 8),
        at("tcp://10.0.0.7:7001", 8, 9),
        at("tcp://10.0.0.6:7001", 1, 1, "other"),
        at("tcp://10.0.0.5:7002", 1, 1),
        at(LOCAL, 8, 8),
        at("pool:", 8, 8),
    ]
    matches = [same, *more, far]
    assert Controls(peer=peer).preferred(matches) == [*more, far]
    for unknown in (None, "", "10.0.0.50", "7001", "://"):
        assert Controls(peer=unknown).preferred(matches) == matches


KV: Any = SimpleNamespace(page_size=PAGE)


def loading_request(deadline_s: float = 5.0) -> Request:
    plan = Plan(
        sender=ModelId("s"),
        receiver=ModelId("r"),
        location=Location("tcp://127.0.0.1:1"),
        pages=Span(2, 6),
        block=Span(1, 3),
        num_layers=4,
    )
    sizes = dict.fromkeys(plan.steps, 40)
    source = Staged(plan, KV, Staging(sizes, Deadline.after(deadline_s)))
    return loading(plan, source, Span(48, 80), torch.arange(32), SimpleNamespace(rid="r1"))


def test_a_load_reads_its_pages_of_the_staged_ones():
    load = loading_request().load
    step = Step(Kind.KV, 0)
    load.source.staging.write(step, 0, memoryview(bytes(range(40))))
    assert b"".join(load.source.rows(step, load.at)) == bytes(range(10, 30))


@pytest.mark.parametrize("slots", [[5, 6, 7, 8], [8, 5, 6, 1, 2, 3], [4]])
def test_a_host_pools_rows_are_read_written_and_copied_wherever_they_lie(slots):
    pool: Any = SimpleNamespace(k_buffer=[torch.randn(32, 2, 3)], v_buffer=[torch.randn(32, 2, 3)])
    rows, buffers = rows_of(pool, Coding(Codec.NONE, 3)), (pool.k_buffer[0], pool.v_buffer[0])
    expected = torch.stack([buffer[slots] for buffer in buffers], 1)
    raw = memoryview(bytearray(expected.nbytes))
    assert isinstance(rows, HostRows)
    here = torch.tensor(slots)
    rows.read(here, [[raw]])
    assert torch.equal(torch.frombuffer(raw, dtype=torch.float32).view_as(expected), expected)
    rows.write_from(0, here + 8, raw)
    rows.copy(0, here.flip(0), here + 20)
    for targets in (here + 8, (here + 20).flip(0)):
        assert torch.equal(torch.stack([buffer[targets] for buffer in buffers], 1), expected)


class Pages:
    """A source with every layer, ten bytes each."""

    def __init__(self) -> None:
        self.failed: list[FetchError] = []
        self.staging = SimpleNamespace(fail=self.failed.append)

    def wait(self, _step: Step) -> None:
        """Return at once: the layer has arrived."""

    def copy(self, _layer: int, _at: Span, _slots: torch.Tensor) -> int:
        return 10


def load_of(source: Any) -> Load:
    plan = loading_request().plan
    return Load(plan=plan, source=source, at=Span(48, 80), slots=torch.arange(32))


def test_a_load_counts_the_bytes_and_the_time_of_its_copies(monkeypatch):
    seconds = iter([1.0, 1.5, 2.0, 2.25])
    monkeypatch.setattr(load_of_a_request, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    load = load_of(Pages())
    for layer in range(4):  # Two of them are computed.
        load.copy(layer)
    assert (load.copied_bytes, load.copied_s) == (20, 0.75)


def test_what_is_given_up_ends_its_fetch_and_says_so():
    source, error = Pages(), FetchError("a test")
    load = load_of(source)
    load.abandon(error)
    assert source.failed == [error]
    assert load.wait_staged(Deadline.after(5)) is error


def test_waiting_for_layers_is_bounded_and_ends_only_that_wait():
    load = loading_request().load
    started_s = time.monotonic()
    error = load.wait_staged(Deadline.after(0.05))
    assert isinstance(error, ForwardWaitExceeded)
    assert "e of layer 1" in str(error)
    assert time.monotonic() - started_s < 1
    assert load.source.staging.error is None
    for step in load.plan.steps:
        load.source.staging.write(step, 0, memoryview(bytes(40)))
    assert load.wait_staged(Deadline.after(0.05)) is None


def test_layers_that_came_after_the_loader_gave_up_are_not_taken_for_loaded():
    load = loading_request(deadline_s=0.05).load
    with pytest.raises(DeadlineExceeded):
        load.source.staging.wait(load.plan.steps[0])
    for step in load.plan.steps:
        load.source.staging.write(step, 0, memoryview(bytes(40)))
    assert isinstance(load.wait_staged(Deadline.after(1.0)), DeadlineExceeded)


def test_overlap_is_the_share_of_the_shorter_that_ran_beside_the_other():
    request = loading_request()
    start_s = request.source.staging.started_s
    request.source.staging.completed_s = start_s + 1.0
    cases = {(0.5, 2.5): 0.5, (0.0, 0.2): 1.0, (1.0, 2.0): 0.0, (0.25, 0.75): 1.0}
    for (begin, end), overlap in cases.items():
        provenance = provenance_of(request, (start_s + begin, start_s + end), 0.0)
        assert provenance.overlap == pytest.approx(overlap)
    assert provenance.block == (1, 3)
    assert (provenance.recomputed_layers, provenance.loaded_layers) == (2, 2)


@pytest.mark.parametrize(
    ("sender", "location", "outcome"),
    [("r", LOCAL, "own"), ("r", DISK, "own"), ("r", "tcp://far", "reused"), ("s", LOCAL, "reused")],
)
def test_what_a_model_reads_of_its_own_here_is_called_own(sender, location, outcome):
    request = loading_request()
    plan = replace(request.load.plan, sender=ModelId(sender), location=Location(location))
    assert outcome_of(plan) == outcome


def test_a_fallback_after_admission_says_how_long_it_was_held_back():
    request = loading_request()
    request.queued_s, request.load.error = 1.25, DeadlineExceeded("a test")
    request.source.staging.write(request.plan.steps[0], 0, memoryview(bytes(40)))
    provenance = provenance_of(request, (0.0, 0.0), 0.0)
    assert (provenance.outcome, provenance.queued_ms) == ("fallback: DeadlineExceeded", 1250.0)
    assert provenance.fetched_bytes == 40


def test_a_caches_metrics_are_copied_and_counters_only_rise():
    registry = CollectorRegistry()
    with Cache(FAMILY, CacheConfig(serves=False, host_bytes=1 << 20)) as cache:
        metrics = CacheMetrics(cache.status, registry, beside=lambda: None)
        metrics.close()
        pages = [PageHash(bytes([number] * 16)) for number in range(4)]
        reservation = cache.tree.reserve(ModelId("m"), None, pages)
        assert reservation is not None
        reservation.commit()
        cache.tree.evict()
        for _ in range(2):
            metrics._copy()
            labels = {"tier": "memory"}
            assert registry.get_sample_value("cachetree:evictions_total", labels) == 1
            assert registry.get_sample_value("cachetree:pages", labels) == 0
            budget = registry.get_sample_value("cachetree:budget_bytes", labels)
            assert budget == cache.tree.host_bytes


def test_a_peer_that_leaves_and_is_back_stops_no_metric_and_is_no_alarm():
    registry, at = CollectorRegistry(), Location("tcp://10.0.0.2:30010")
    with Cache(FAMILY, CacheConfig(serves=False, host_bytes=1 << 20)) as cache:
        alone = cache.status()
    ready = PeerStatus(address=at, num_retries=1, num_pages=8, state=PeerState.READY)
    fetches = (FetchCounts(location=at, num_bytes=10, outcomes={"ok": 5}),)
    back = msgspec.structs.replace(alone, peers=(ready,), fetches=fetches)
    lost = msgspec.structs.replace(ready, num_retries=5, state=PeerState.CONNECTING)
    now = [msgspec.structs.replace(back, peers=(lost,))]
    metrics = CacheMetrics(lambda: now[-1], registry, beside=lambda: None)
    metrics.close()

    def told(*names: str) -> list[float | None]:
        metrics._copy()
        labels = [{"location": at} | ({"outcome": "ok"} if "fetches" in it else {}) for it in names]
        return [
            registry.get_sample_value(f"cachetree:{name}", of)
            for name, of in zip(names, labels, strict=True)
        ]

    names = ("retries_total", "fetches_total", "peer_ready", "noted_pages")
    assert told(*names) == [5, 5, 0, 8]
    now.append(alone)
    assert told(*names) == [5, 5, pytest.approx(nan, nan_ok=True), pytest.approx(nan, nan_ok=True)]
    now.append(back)  # Counted from 0 again.
    assert told(*names) == [6, 10, 1, 8]
    now.append(msgspec.structs.replace(back, peers=(msgspec.structs.replace(lost, num_retries=0),)))
    assert told(*names) == [6, 10, 0, 8]


def test_each_model_of_a_pair_has_one_name_at_a_time():
    metrics, sender, receiver = Metrics(enabled=False), "a" * 32, "b" * 32
    metrics.tell_pairs({(sender, receiver): SimpleNamespace(is_usable=True)})  # type: ignore[dict-item]
    for names in ({}, {sender: "base"}, {sender: "base", receiver: "expert"}):
        metrics.tell_names(names)
    (provenance,) = metrics.model_info.collect()
    assert {(it.labels["model"][0], it.labels["name"]): it.value for it in provenance.samples} == {
        ("a", "aaaaaaaa"): 0,
        ("a", "base"): 1,
        ("b", "bbbbbbbb"): 0,
        ("b", "expert"): 1,
    }


def test_a_hook_goes_on_top_of_another_plugins():
    target = "sglang_droidspeak.hooked_in_tests.answer"
    module = sys.modules.setdefault(
        "sglang_droidspeak.hooked_in_tests", types.ModuleType("hooked_in_tests")
    )
    module.answer = lambda: 1
    place_hooks({target: (lambda original: original() + 10, HookType.AROUND)})
    place_hooks({target: (lambda original: original() * 2, HookType.AROUND)})
    assert module.answer() == 22


class Pieces:
    """A store without encoding. It notes how many rows each piece has."""

    codec, length = Codec.NONE, 2

    def __init__(self) -> None:
        self.gathered: list[int] = []

    def store(self, values: torch.Tensor, target: memoryview) -> None:
        self.gathered.append(len(values))
        Coding(Codec.NONE, 2).store(values, target)


def test_what_is_stored_is_gathered_in_pieces():
    """Without pieces, a copy of a long node would take as much device memory as the node itself."""
    slots, coding = torch.randperm(3000), Pieces()
    e = torch.arange(6000, dtype=torch.float32).view(3000, 2)
    kv: Any = SimpleNamespace(k_buffer=[e[:, None]], v_buffer=[-e[:, None]])
    rows: Any = DeviceRows(kv, coding)  # type: ignore[arg-type]
    pool: Any = ServerPool(rows, SimpleNamespace(e={1: e}), coding, PAGE)  # type: ignore[arg-type]
    both = torch.stack([e, -e], 1)
    for step, expected in ((Step(Kind.KV, 0), both), (Step(Kind.E, 1), e)):
        row_bytes = expected[0].nbytes
        runs = [memoryview(bytearray(num * row_bytes)) for num in (1008, 1992)]
        pool.store({step: runs}, slots)
        values = torch.frombuffer(bytearray(b"".join(runs)), dtype=torch.float32)
        assert torch.equal(values, expected[slots].flatten())
    assert coding.gathered == [1008, 1024, 968] * 2
