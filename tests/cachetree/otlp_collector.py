"""An OpenTelemetry collector on loopback: OTLP over gRPC, and all spans in a list."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Collected(NamedTuple):
    service: str
    name: str
    trace_id: bytes
    start_ns: int
    stop_ns: int
    attributes: dict[str, Any]
    error: str


class Collector:
    def __init__(self) -> None:
        self.spans: list[Collected] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        export = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=ExportTraceServiceRequest.FromString,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        handlers = grpc.method_handlers_generic_handler(service, {"Export": export})
        self._server.add_generic_rpc_handlers((handlers,))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def _export(self, request: Any, _context: object) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = _plain(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [
                    Collected(
                        service,
                        it.name,
                        it.trace_id,
                        it.start_time_unix_nano,
                        it.end_time_unix_nano,
                        _plain(it.attributes),
                        it.status.message,
                    )
                    for it in scope.spans
                ]
        return ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


def _plain(attributes: Any) -> dict[str, Any]:
    return {it.key: _value(it.value) for it in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    content = getattr(value, kind) if kind else None
    return [_value(it) for it in content.values] if kind == "array_value" else content
