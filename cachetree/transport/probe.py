"""One question or order to a worker, and its answer, for a command line."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.clock import Deadline
from cachetree.errors import (
    AuthenticationError,
    DeadlineExceeded,
    OrderDenied,
    ProtocolError,
)
from cachetree.transport import verbs, wire
from cachetree.transport.address import parse_remote
from cachetree.transport.handshake import FAILURES, Credentials, Plain

_RETRY_MS: Final = 10
"""A worker that wants a key and sees first that there is none just hangs up: try until we do."""

_Answer = TypeVar("_Answer", bound=verbs.ToPeer)


def ask(
    address: str,
    question: verbs.ToWorker,
    kind: type[_Answer],
    *,
    timeout_s: float,
    credentials: Credentials | None = None,
) -> _Answer:
    """Ask the worker at `address`, until one comes up or the time is over.

    Raises ConfigError, AuthenticationError, DeadlineExceeded, ProtocolError, or OrderDenied.
    """
    remote = parse_remote(address, field="address")
    credentials = credentials or Plain()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, _RETRY_MS)
        socket.set(zmq.IPV6, int(remote.is_ipv6))
        credentials.secure(socket, wire.MAX_HEADER_BYTES)
        monitor = socket.get_monitor_socket(FAILURES)
        socket.connect(remote.url)
        with suppress(zmq.Again):  # A handshake that has failed already; the monitor says why.
            socket.send(wire.encode(question), zmq.NOBLOCK)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        deadline = Deadline.after(timeout_s)
        while not socket.poll(0):
            if not poller.poll(round(deadline.remaining_s() * 1000)):
                raise DeadlineExceeded(f"no worker answered at {address} within {timeout_s} s")
            if monitor.poll(0):
                event = recv_monitor_message(monitor)
                failure = credentials.failure(event["event"], event["value"], f"worker {address}")
                if isinstance(failure, AuthenticationError):
                    raise failure
        answer = wire.decode_to_peer(socket.recv(copy=False).buffer)
    finally:
        context.destroy(linger=0)
    if isinstance(answer, verbs.Denied):
        raise OrderDenied(f"{address}: {answer.reason}")
    if not isinstance(answer, kind):
        raise ProtocolError(f"{address} answered with a {type(answer).__name__}")
    return answer


def ask_status(
    address: str, *, timeout_s: float, credentials: Credentials | None = None
) -> verbs.Status:
    """As `ask`: how are you?"""
    return ask(
        address,
        verbs.StatusRequest(),
        verbs.Status,
        timeout_s=timeout_s,
        credentials=credentials,
    )
