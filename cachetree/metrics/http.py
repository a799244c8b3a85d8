"""HTTP server for monitors: /metrics has the metrics. /health says whether the cache is alive, can
serve, and has problems."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from http.server import ThreadingHTTPServer
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, MetricsHandler

from cachetree.clock import Deadline
from cachetree.metrics.metrics import StatusCollector
from cachetree.status import CacheStatus
from cachetree.transport import Address, open_port

log = logging.getLogger(__name__)

_STUCK_S: Final = 5.0
"""A worker's thread counts as stuck if its loop makes no pass for this many seconds. An idle loop
makes four passes a second."""
_NEARLY_ALL: Final = 0.95
_PATIENCE_S: Final = 5.0
"""Seconds to wait for the next bytes of a request."""
_MOST_S: Final = 10.0
"""Longest life of a connection in seconds, even if bytes of its request still arrive."""
_MAX_AT_ONCE: Final = 32
"""Largest number of connections with a thread. If one more comes, the oldest is closed: it must be
stuck, because a normal request takes milliseconds."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/health`."""

    live: bool
    """True if the worker's thread still runs its loop. Otherwise only a restart helps."""
    ready: bool
    """True if `live`, and the start-up copy of entries from disk to memory has ended."""
    degraded: tuple[str, ...]
    """Problems of a cache that still serves; empty if there are none."""


def health_of(status: CacheStatus) -> Health:
    live = status.worker_turn_age_s < _STUCK_S
    complaints = []
    if status.disk is not None and status.disk.is_failing:
        complaints.append("the disk cannot be written")
    complaints += [
        f"{location} does not answer, and is not read until it does"
        for location, is_paused in status.paused_tiers.items()
        if is_paused
    ]
    if status.held_bytes > _NEARLY_ALL * status.host_bytes:
        complaints.append(
            f"{status.held_bytes} of {status.host_bytes} bytes of memory cannot be evicted"
        )
    complaints += [
        f"worker {it.address} is {it.state}: {it.reason or 'not reached yet'}"
        for it in (peer.source for peer in status.peers if not peer.is_ready)
    ]
    return Health(
        live=live,
        ready=live and (status.disk is None or status.disk.is_warm),
        degraded=tuple(complaints),
    )


class StatusPage(ThreadingHTTPServer):
    """Serves GET /metrics, /health, /health/live and /health/ready, in threads of its own.

    It shows numbers, model ids and addresses, but no content of the cache. It asks for no key, so
    use an address that only monitors reach. Raises ConfigError if the address cannot be bound.
    """

    request_queue_size = 128
    """Largest number of connections that wait in the kernel. A client beyond it tries again after a
    second."""

    def __init__(self, address: Address, status: Callable[[], CacheStatus]) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()  # This socket speaks only IPv4.
        self.socket = open_port(address, field="http", backlog=self.request_queue_size)
        self.url: Final = replace(address, port=self.socket.getsockname()[1]).url
        self.status: Final = status
        self._open: dict[socket.socket, Deadline] = {}
        """Connections with a thread, oldest first, and the time at which each has to end."""
        self._free_threads = threading.BoundedSemaphore(_MAX_AT_ONCE)
        self.registry: Final = CollectorRegistry()
        self.registry.register(StatusCollector(status))
        self._thread = threading.Thread(
            target=self.serve_forever, name="cachetree-http", daemon=True
        )
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection. If `_MAX_AT_ONCE` threads run, first end the oldest
        connection."""
        self._hang_up(tuple(self._open)[: max(0, len(self._open) - _MAX_AT_ONCE + 1)])
        if not self._free_threads.acquire(timeout=_PATIENCE_S):
            self.shutdown_request(request)
            return
        self._open[request] = Deadline.after(_MOST_S)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        threading.current_thread().name = "cachetree-http-answer"
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection after its thread has ended, or could not be started."""
        super().shutdown_request(request)
        if self._open.pop(request, None) is not None:
            self._free_threads.release()

    def service_actions(self) -> None:
        """End connections that have taken too long. Runs twice a second, and after each request."""
        self._hang_up([it for it, until in tuple(self._open.items()) if until.has_passed])

    def _hang_up(self, connections: Iterable[socket.socket]) -> None:
        """Wake the threads that read from these connections or write to them. Each of these threads
        then closes its connection."""
        for connection in connections:
            with contextlib.suppress(OSError):  # Its thread has closed it.
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Log a failed answer; only at level DEBUG if the client closed its connection early."""
        is_theirs = isinstance(sys.exc_info()[1], OSError)
        log.log(logging.DEBUG if is_theirs else logging.ERROR, "no answer", exc_info=True)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(MetricsHandler):
    server: StatusPage
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self.registry = self.server.registry
            super().do_GET()
            return
        code, body = self._answer(path)
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body + b"\n")

    do_HEAD = do_GET

    def _answer(self, path: str) -> tuple[int, bytes]:
        if path not in ("/health", "/health/live", "/health/ready"):
            return 404, b'{"error": "try /metrics or /health"}'
        health = health_of(self.server.status())
        is_well = health.live if path == "/health/live" else health.ready
        return 200 if is_well else 503, msgspec.json.encode(health)
