"""The page on which a cache answers monitors: /metrics, and whether it lives, can serve, and is as
well as it should be, three questions apart, at /health; and, where that is wanted, routers, at
/query."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from cachetree.errors import ConfigError
from cachetree.metrics.metrics import StatusCollector
from cachetree.metrics.query import MAX_BODY_BYTES, Queries
from cachetree.status import CacheStatus

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

_STUCK_S: Final = 5.0
"""A worker's thread turns four times a second also where nothing happens."""
_NEARLY_ALL: Final = 0.95
_PATIENCE_S: Final = 5.0
"""For a request to come whole."""
_MAX_DIGITS: Final = 20
"""Of a request's size."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What `/health` says."""

    live: bool
    """The worker's thread turns; otherwise only a restart helps."""
    ready: bool
    """It listens, and has read into memory what it wanted to of its disk."""
    degraded: tuple[str, ...]
    """What is wrong, though it serves; empty where nothing is."""


def health_of(status: CacheStatus) -> Health:
    live = status.worker_turn_age_s < _STUCK_S
    return Health(
        live=live,
        ready=live and (status.disk is None or status.disk.is_warm),
        degraded=tuple(_complaints(status)),
    )


def _complaints(status: CacheStatus) -> list[str]:
    complaints = []
    if status.disk is not None and status.disk.is_failing:
        complaints.append("the disk cannot be written")
    if status.held_bytes > _NEARLY_ALL * status.host_bytes:
        complaints.append(
            f"{status.held_bytes} of {status.host_bytes} bytes of memory cannot be evicted"
        )
    complaints += [
        f"worker {peer.address} failed too often and is left alone for a while"
        for peer in status.peers
        if peer.is_resting
    ]
    return complaints


class StatusPage:
    """Serves GET /metrics, /health, /health/live and /health/ready, in threads of its own, and with
    `queries` POST /query.

    It shows numbers, model ids and addresses, no content, and asks for no key: give it an address
    that only monitors reach. Whoever reaches /query can find out which prompts are cached. Raises
    ConfigError where it cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        status: Callable[[], CacheStatus],
        queries: Queries | None = None,
    ) -> None:
        self._is_retired = threading.Event()
        pages = _pages(status, queries, self._is_retired)
        try:
            self._server = make_server(
                host, port, pages, ThreadingWSGIServer, handler_class=_Handler
            )
        except OSError as exc:
            raise ConfigError(
                f"http is {host}:{port}, which cannot be bound ({exc.strerror}); choose another "
                "port, or port 0 for a free one"
            ) from exc
        self.url: Final = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="cachetree-http", daemon=True
        )
        self._thread.start()

    def retire_queries(self) -> None:
        """Answer 503 to those, for good; monitors see what they saw."""
        self._is_retired.set()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> StatusPage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pages(
    status: Callable[[], CacheStatus], queries: Queries | None, is_retired: threading.Event
) -> WSGIApplication:
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    metrics: WSGIApplication = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        if path == "/query" and queries is not None:
            code, told = _answered(environ, queries, is_retired)
            start_response(code, [("Content-Type", "application/json")])
            return [told + b"\n"]
        if path not in ("/health", "/health/live", "/health/ready"):
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"try /metrics or /health\n"]
        health = health_of(status())
        is_well = health.live if path == "/health/live" else health.ready
        code = "200 OK" if is_well else "503 Service Unavailable"
        start_response(code, [("Content-Type", "application/json")])
        return [msgspec.json.encode(health) + b"\n"]

    return answer


def _answered(
    environ: WSGIEnvironment, queries: Queries, is_retired: threading.Event
) -> tuple[str, bytes]:
    """The status and the body; a question that is too long is not read."""
    length = environ.get("CONTENT_LENGTH") or ""
    try:
        if environ["REQUEST_METHOD"] != "POST":
            raise ConfigError(f"the method is {environ['REQUEST_METHOD']}; give POST")
        # Python converts no number of thousands of digits.
        is_size = length.isdecimal() and len(length) <= _MAX_DIGITS
        if not is_size or int(length) > MAX_BODY_BYTES:
            raise ConfigError(
                f"Content-Length is {length[: 2 * _MAX_DIGITS]!r}; give one of at most "
                f"{MAX_BODY_BYTES} bytes"
            )
        body = environ["wsgi.input"].read(int(length))
        if is_retired.is_set():
            told = b'{"error": "nothing is read from this cache until its server restarts"}'
            return "503 Service Unavailable", told
        return "200 OK", queries.answer(body)
    except (ConfigError, TimeoutError) as exc:
        return "400 Bad Request", msgspec.json.encode({"error": str(exc)})


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE_S

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
