"""One question to a worker, for a command line: how are you?"""

from __future__ import annotations

import zmq

from cachetree.errors import DeadlineExceeded, ProtocolError
from cachetree.transport import wire
from cachetree.transport.address import parse_remote


def ask_status(address: str, *, timeout_s: float) -> wire.Status:
    """Ask the worker at `address`; raises ConfigError, DeadlineExceeded or ProtocolError."""
    remote = parse_remote(address, field="address")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, wire.MAX_HEADER_BYTES)
        socket.set(zmq.IPV6, int(remote.is_ipv6))
        socket.connect(remote.url)
        socket.send(wire.encode(wire.StatusRequest()))
        if not socket.poll(round(timeout_s * 1000)):
            raise DeadlineExceeded(f"no worker answered at {address} within {timeout_s} s")
        answer = wire.decode_to_peer(socket.recv(copy=False).buffer)
    finally:
        context.destroy(linger=0)
    if not isinstance(answer, wire.Status):
        raise ProtocolError(f"{address} answered with a {type(answer).__name__}")
    return answer
