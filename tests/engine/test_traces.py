"""Slices of a request's trace: what they say about the request, and that there are none without
tracing.

With real servers and a collector: test_faults.py.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from standins import (
    PLAN,
    STEP_BYTES,
    WANTED,
    Asked,
    begin_load,
    look,
    planner_of,
    planner_without,
    request,
    waiting_with,
)

from cachetree.errors import DeadlineExceeded
from cachetree.names import ModelNames
from sglang_droidspeak.engine import tracing
from sglang_droidspeak.request import report
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.request.waiting import WaitingRequests

ON = pytest.mark.usefixtures("is_on")
CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Stats:
    """Stands for SGLang's stats: holds the slices and marks that it got."""

    def __init__(self) -> None:
        self.slices: list[tuple[str, float, float, dict[str, Any]]] = []
        self.marks: dict[str, Any] = {}
        self.trace_ctx = SimpleNamespace(
            tracing_enable=False, trace_set_thread_attrs=self.marks.update
        )

    def trace_slice(self, stage, start, stop, attributes):
        self.slices.append((stage.stage_name, start, stop, attributes))

    def of(self, name: str) -> tuple[float, float, dict[str, Any]]:
        (slice_,) = (it[1:] for it in self.slices if it[0] == f"droidspeak.{name}")
        return slice_


@pytest.fixture
def is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "get_global_tracing_enabled", lambda: True)


def traced_request() -> Any:
    req = request()
    req.time_stats = Stats()
    return req


def waiting_and_traced(cache: Asked, **parts: Any) -> WaitingRequests:
    return waiting_with(cache, **parts)[0]


@ON
@pytest.mark.parametrize("e_map", ["", "digest"])
def test_what_was_fetched_copied_and_recomputed_is_told_once_it_has_run(e_map):
    cache, req = Asked(time.monotonic), traced_request()
    planner = planner_of(**WANTED, plan=replace(PLAN, e_map=e_map))
    waiting = waiting_and_traced(cache, planner=planner)
    look(waiting, req)
    (staging,) = cache.stagings
    staging.traceparent = CONTEXT
    taken, _ = begin_load(waiting, cache, req)
    taken.runnable_s = taken.seen_s + taken.queued_s - 1.5
    taken.load.copies_s = [(5.0, 6.0), (6.5, 7.5)]
    report.loaded(taken, (3.0, 4.0))
    stats = req.time_stats
    e_start, e_stop, e = stats.of("fetch_e")
    kv_start, kv_stop, kv = stats.of("fetch_kv")
    assert e_start == staging.started_s <= e_stop == kv_start <= kv_stop
    assert e == {"droidspeak.layers": 1, "droidspeak.bytes": STEP_BYTES}
    assert kv == {"droidspeak.layers": 2, "droidspeak.bytes": 2 * STEP_BYTES}
    _, admitted_s, wait = stats.of("wait")
    assert admitted_s == taken.seen_s + taken.queued_s
    assert wait == {"droidspeak.runnable_ms": 1500.0}
    tokens, layers = len(taken.load.at), len(PLAN.block)
    attributes = {"droidspeak.tokens": tokens, "droidspeak.layers": layers}
    attributes["droidspeak.e_corrected"] = bool(e_map)
    assert stats.of("recompute") == (3.0, 4.0, attributes)
    layers = len(PLAN.loaded_layers)
    attributes = {
        "droidspeak.tokens": tokens,
        "droidspeak.layers": layers,
        "droidspeak.busy_ms": 2000.0,
    }
    assert stats.of("load") == (5.0, 7.5, attributes)


@ON
def test_a_plan_and_how_long_it_waited_are_told_when_it_is_given_up():
    cache, req = Asked(), traced_request()
    waiting = waiting_and_traced(cache)
    assert look(waiting, req) == {req.rid}
    start, stop, match = req.time_stats.of("match")
    assert start <= stop
    assert match["droidspeak.sender"] == PLAN.sender
    assert match["droidspeak.block"] == f"[{PLAN.block.start}, {PLAN.block.stop})"
    (staging,) = cache.stagings
    staging.fail(DeadlineExceeded("late"))
    assert not look(waiting, req)
    assert req.time_stats.of("wait")[1] >= stop
    begun, ended, why = req.time_stats.of("fallback")
    assert (begun, why) == (ended, {"droidspeak.cause": "DeadlineExceeded"})


@ON
def test_why_there_is_no_plan_is_told_with_its_match():
    req = traced_request()
    assert not look(waiting_and_traced(Asked(), planner=planner_without("no_profile")), req)
    ((name, *_, attributes),) = req.time_stats.slices
    assert (name, attributes["droidspeak.outcome"]) == ("droidspeak.match", "no_profile")


@ON
def test_who_is_admitted_without_its_load_is_told_of():
    cache, req = Asked(), traced_request()
    waiting = waiting_and_traced(cache)
    look(waiting, req)
    cache.land()
    look(waiting, req)
    req.prefix_len = 0
    waiting.admitted([req])
    assert req.time_stats.of("fallback")[2] == {"droidspeak.cause": "no_slots"}


@ON
def test_what_is_known_of_a_request_marks_its_scheduler_span():
    labels, req = Labels(SimpleNamespace(), ModelNames()), traced_request()  # type: ignore[arg-type]
    labels.note(req, RequestProvenance(outcome="reused", reused_tokens=7, sender="s"))
    assert req.time_stats.marks == {
        "droidspeak.outcome": "reused",
        "droidspeak.reused_tokens": 7,
        "droidspeak.sender": "s",
    }


@ON
def test_the_context_is_that_of_the_requests_root():
    root = TraceContextTextMapPropagator().extract({"traceparent": CONTEXT})
    req = traced_request()
    req.time_stats.trace_ctx = SimpleNamespace(tracing_enable=True, root_span_context=root)
    assert tracing.context_of(req) == CONTEXT
    req.time_stats.trace_ctx.tracing_enable = False
    assert tracing.context_of(req) == ""


def test_without_tracing_nothing_is_done_nor_looked_at(monkeypatch):
    """The request here has no stats, so an attempt to look at them raises."""
    for name in ("add_slice", "mark"):
        monkeypatch.setattr(tracing, name, None)
    cache, req = Asked(), request()
    waiting, labels = waiting_with(cache)
    look(waiting, req)
    (staging,) = cache.stagings
    assert (staging.traceparent, staging.landed_s) == ("", {})
    staging.fail(DeadlineExceeded("late"))
    look(waiting, req)
    assert labels.by_rid[req.rid].outcome == "fallback: DeadlineExceeded"
    nothing: Any = object()
    report.loaded(nothing, (0.0, 1.0))
    report.fell_back(nothing, "", 0.0)
    report._trace(nothing, nothing)
