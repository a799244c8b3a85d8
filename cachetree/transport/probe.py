"""One question to a worker, for a command line: how are you?"""

from __future__ import annotations

from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.clock import Deadline
from cachetree.errors import AuthenticationError, DeadlineExceeded, ProtocolError
from cachetree.transport import wire
from cachetree.transport.address import parse_remote
from cachetree.transport.handshake import FAILURES, Credentials, Plain


def ask_status(
    address: str, *, timeout_s: float, credentials: Credentials | None = None
) -> wire.Status:
    """Ask the worker at `address`, until one comes up or the time is over.

    Raises ConfigError, AuthenticationError, DeadlineExceeded or ProtocolError.
    """
    remote = parse_remote(address, field="address")
    credentials = credentials or Plain()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, int(remote.is_ipv6))
        credentials.secure(socket, wire.MAX_HEADER_BYTES)
        monitor = socket.get_monitor_socket(FAILURES)
        socket.connect(remote.url)
        with suppress(zmq.Again):  # A handshake that has failed already; the monitor says why.
            socket.send(wire.encode(wire.StatusRequest()), zmq.NOBLOCK)
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
    if not isinstance(answer, wire.Status):
        raise ProtocolError(f"{address} answered with a {type(answer).__name__}")
    return answer
