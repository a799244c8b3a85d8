"""The page on which a cache answers monitors: /metrics and /health."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from cachetree.errors import ConfigError
from cachetree.metrics.health import health_of
from cachetree.metrics.metrics import StatusCollector
from cachetree.status import CacheStatus

log = logging.getLogger(__name__)

_LOOPBACK: Final = "127.0.0.1"
_PATIENCE_S: Final = 5.0
"""For a request to come whole."""


def parse_http(value: str, *, field: str) -> tuple[str, int]:
    """`HOST:PORT`, or `PORT` for this machine alone; raises ConfigError."""
    host, _, port = value.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{field} is {value!r}; write HOST:PORT, for example {_LOOPBACK}:9464, which only this "
            "machine can reach"
        )
    return host.strip("[]") or _LOOPBACK, int(port)


class StatusPage:
    """Serves GET /metrics, /health, /health/live and /health/ready, in threads of its own.

    It shows numbers, model ids and addresses, no content, and asks for no key: give it an address
    that only monitors reach. Raises ConfigError where it cannot be bound.
    """

    def __init__(self, host: str, port: int, status: Callable[[], CacheStatus]) -> None:
        registry = CollectorRegistry()
        registry.register(StatusCollector(status))
        handler = type(
            "Handler", (_Handler,), {"registry": registry, "status": staticmethod(status)}
        )
        try:
            self._server = http.server.ThreadingHTTPServer((host, port), handler)
        except OSError as exc:
            raise ConfigError(
                f"http is {host}:{port}, which cannot be bound ({exc.strerror}); choose another "
                "port, or port 0 for a free one"
            ) from exc
        self._server.daemon_threads = True
        self.url: Final = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="cachetree-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> StatusPage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    registry: CollectorRegistry
    status: Callable[[], CacheStatus]
    timeout = _PATIENCE_S
    server_version = "cachetree"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self.registry))
            return
        health = health_of(type(self).status()) if path.startswith("/health") else None
        is_well = {
            "/health": health and health.live and health.ready,
            "/health/live": health and health.live,
            "/health/ready": health and health.ready,
        }.get(path)
        if health is None or is_well is None:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"try /metrics or /health\n")
            return
        code = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(code, "application/json", msgspec.json.encode(health) + b"\n")

    def _answer(self, code: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
