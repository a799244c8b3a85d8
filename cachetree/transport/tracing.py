"""Trace spans of the fetches that a worker serves. Each is in the trace of the peer's request.

OpenTelemetry is imported only if tracing was turned on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from cachetree.errors import ConfigError
from cachetree.ids import PAGE_HASH_BYTES
from cachetree.transport import wire

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_MAX_MODEL_CHARS: Final = 64
_EXPORT_S: Final = 5
"""Longest wait for a collector, in seconds."""


NoteServed = Callable[[wire.Fetch, float, int, str], None]
"""Function that records a served fetch. The worker's thread calls it; it must not block or raise.

Arguments: the fetch, seconds from its request until its pages were no longer read, bytes sent, and
the reason if it was not fully served (otherwise an empty text).
"""


def untraced(*_: object) -> None:
    """Record nothing. Used while tracing is off."""


def serve_spans(provider: TracerProvider | None = None) -> NoteServed:
    """Return a function that makes a span for each served fetch. Without a `provider`, it uses that
    of the process."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = trace.get_tracer("cachetree", tracer_provider=provider)
    propagator = TraceContextTextMapPropagator()

    def note(fetch: wire.Fetch, seconds: float, num_bytes: int, error: str) -> None:
        parent = propagator.extract({"traceparent": fetch.traceparent})
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return  # A peer may send any text.
        stop_ns = time.time_ns()
        span = tracer.start_span(
            "cachetree.serve",
            parent,
            trace.SpanKind.SERVER,
            {
                "cachetree.model": fetch.model[:_MAX_MODEL_CHARS],
                "cachetree.pages": len(fetch.pages) // PAGE_HASH_BYTES,
                "cachetree.steps": len(fetch.steps),
                "cachetree.bytes": num_bytes,
            },
            start_time=stop_ns - int(1e9 * seconds),
        )
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(stop_ns)

    return note


@contextmanager
def exported(endpoint: str) -> Iterator[NoteServed]:
    """Yield a function that sends spans to a collector at `HOST:PORT`, by OTLP over gRPC. With an
    empty `endpoint` it sends none. Raises ConfigError if OpenTelemetry is not installed."""
    if not endpoint:
        yield untraced
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise ConfigError(
            f"traces needs OpenTelemetry, and {exc}; pip install 'sglang[tracing]'"
        ) from exc
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "cachetree"}))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True, timeout=_EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield serve_spans(provider)
    finally:
        provider.shutdown()
