"""Spans of fetches that a worker serves: with tracing on, with any trace context that peers may
send, and with tracing off.

Every trace context here is made up.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_collector import collecting
from serve_parts import serving
from test_cache import ALL, PAGES, cache_of, fill, plan_at
from transport_parts import FAMILY, MODEL, eventually, wait_all

from cachetree import Cache, CacheConfig, ConfigError, Deadline, Location, ProtocolError, StaleEntry
from cachetree.transport import tracing, wire

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
PARENT_ID = 0xB7AD6B7169203331
CONTEXT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"


@contextlib.contextmanager
def traced_sender() -> Iterator[tuple[Cache, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = CacheConfig(host_bytes=64 << 20)
    with Cache(FAMILY, config, note_served=tracing.serve_spans(provider)) as sender:
        assert fill(sender, PAGES)
        yield sender, exporter


def fetch(address: Location | None, traceparent: str) -> None:
    with cache_of(peers=(address,), serves=False) as receiver:
        assert receiver.wait_ready(20)
        staging = receiver.fetch(plan_at(address), PAGES, Deadline.after(20), traceparent)
        with staging:
            wait_all(staging)
            times = list(staging.landed_s.values())
            assert list(staging.landed_s) == (list(staging.steps) if traceparent else [])
            assert times == sorted(times)


def ended(exporter: InMemorySpanExporter) -> ReadableSpan:
    eventually(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    return span


def test_a_served_fetch_is_a_child_span_of_its_request():
    with traced_sender() as (sender, exporter):
        fetch(sender.address, CONTEXT)
        span = ended(exporter)
    assert span.name == "cachetree.serve"
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, PARENT_ID)
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time < span.end_time
    plan = plan_at(Location(""))
    num_bytes = sum(len(ALL) * FAMILY.page_bytes(step.kind) for step in plan.steps)
    assert span.attributes == {
        "cachetree.model": MODEL,
        "cachetree.pages": len(ALL),
        "cachetree.steps": len(plan.steps),
        "cachetree.bytes": num_bytes,
    }


def test_a_fetch_of_pages_that_are_gone_says_so():
    with traced_sender() as (sender, exporter):
        with cache_of(peers=(sender.address,), serves=False) as receiver:
            assert receiver.wait_ready(20)
            gone = [*PAGES[:-1], PAGES[-1][::-1]]
            staging = receiver.fetch(plan_at(sender.address), gone, Deadline.after(20), CONTEXT)
            with staging, pytest.raises(StaleEntry):
                wait_all(staging)
        span = ended(exporter)
    assert "no longer here" in (span.status.description or "")


@pytest.mark.parametrize("said", ["", "x", "00-" + 52 * "0", CONTEXT[:-3], "ff" + CONTEXT[2:]])
def test_invalid_trace_context_makes_no_span(said):
    with traced_sender() as (sender, exporter):
        fetch(sender.address, said)
        fetch(sender.address, CONTEXT)  # So that one would have been there.
        ended(exporter)


def test_a_context_that_is_too_long_is_not_read():
    asked = wire.Fetch(
        id=1,
        model=MODEL,
        pages=PAGES[0],
        steps=(("kv", 0),),
        frame_bytes=1,
        timeout_ms=1,
        traceparent=CONTEXT + "0",
    )
    with pytest.raises(ProtocolError, match=r"length <= 55 - at `\$\.traceparent`"):
        wire.decode_to_worker(memoryview(wire.encode(asked)))


@contextlib.contextmanager
def serving_with(tmp_path: Path, **settings: object) -> Iterator[Location]:
    """Run `cachetree serve`. At its end, the process prints whether it loaded OpenTelemetry."""
    program = (
        "import sys; from cachetree.cli import main; main(); "
        "print('opentelemetry' in sys.modules, flush=True)"
    )
    with serving(tmp_path, ("-c", program), **settings) as process:
        yield Location(process.stdout.readline().split()[-1])
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().split()[-1] == str("traces" in settings)


def test_a_worker_of_its_own_sends_its_spans_to_the_collector_that_its_file_names(tmp_path):
    with collecting() as collector:
        with kept_by(tmp_path, traces=collector.endpoint) as address:
            fetch(address, CONTEXT)
        (span,) = collector.spans
    assert (span.service, span.name) == ("cachetree", "cachetree.serve")
    assert span.trace_id == TRACE_ID.to_bytes(16, "big")
    assert span.attributes["cachetree.bytes"] > 0
    assert not span.error


def test_without_tracing_opentelemetry_is_not_loaded(tmp_path):
    with kept_by(tmp_path) as address:
        fetch(address, CONTEXT)


@contextlib.contextmanager
def kept_by(tmp_path: Path, **settings: object) -> Iterator[Location]:
    """Run a worker that has a copy of a sender's entries."""
    with cache_of() as sender:
        assert fill(sender, PAGES)
        cache = {"host_bytes": 64 << 20, "keeps": [sender.address]}
        with serving_with(tmp_path, cache=cache, **settings) as address:
            with cache_of(peers=(address,), serves=False) as reader:
                eventually(lambda: reader.match(PAGES))
            yield address


def test_a_worker_says_what_it_needs_for_traces(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'sglang\[tracing\]'"),
        tracing.exported("127.0.0.1:1"),
    ):
        pass
