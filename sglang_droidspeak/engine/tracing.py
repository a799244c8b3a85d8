"""Add slices (stages with a start and an end) and attributes to SGLang's trace of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang.srt.observability.req_time_stats import RequestStageConfig
from sglang.srt.observability.trace import get_global_tracing_enabled

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import Req

Attributes = Mapping[str, str | int | float]

_LEVEL = 2
"""Lowest SGLANG_TRACE_LEVEL at which a trace contains slices of this package."""


def is_on() -> bool:
    """Whether this process was started with `--enable-trace`."""
    return bool(get_global_tracing_enabled())


def context_of(req: Req) -> str:
    """Return the request's W3C traceparent. Empty if it is not traced."""
    if not is_on() or not req.time_stats.trace_ctx.tracing_enable:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, req.time_stats.trace_ctx.root_span_context)
    return carrier.get("traceparent", "")


def add_slice(req: Req, name: str, start_s: float, stop_s: float, attributes: Attributes) -> None:
    """Add a slice that is already over to the request's trace. Times are of `time.monotonic`, which
    on Linux is the clock of SGLang's traces."""
    stage = RequestStageConfig(f"droidspeak.{name}", level=_LEVEL)
    req.time_stats.trace_slice(stage, start_s, stop_s, _ours(attributes))


def mark(req: Req, attributes: Attributes) -> None:
    """Set attributes on the span that covers all of this scheduler's work on the request."""
    req.time_stats.trace_ctx.trace_set_thread_attrs(_ours(attributes))


def event(name: str, attributes: Attributes) -> None:
    """Record an event that belongs to no request, as a trace of its own without duration."""
    if is_on():
        from opentelemetry import trace

        span = trace.get_tracer("droidspeak").start_span(f"droidspeak.{name}")
        span.set_attributes(_ours(attributes))
        span.end()


def _ours(attributes: Attributes) -> dict[str, str | int | float]:
    return {f"droidspeak.{key}": value for key, value in attributes.items()}
