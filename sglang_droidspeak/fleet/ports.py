"""Find and check ports of this machine for servers."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from sglang_droidspeak.fleet import ServerFailed

_PORTS = range(10_000, 22_000)
_given_out: list[contextlib.ExitStack] = []
"""Abstract sockets that mark ports as taken on this machine, until this process ends."""


def free_port(num_ranks: int = 1) -> int:
    """Return the first of `num_ranks` free ports in a row, one for each rank of a server. While
    this process lives, no other process gets these ports from this function. Raises ServerFailed.

    Another program could take some ports before the server binds them. So we leave out the ports of
    outgoing connections (32768 and above on Linux) and SGLang's own (22000 to 29999).
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), contextlib.ExitStack() as names:
            for each in range(port, port + num_ranks):
                name = names.enter_context(socket.socket(socket.AF_UNIX))
                name.bind(f"\0droidspeak-port-{each}")
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
            _given_out.append(names.pop_all())
            return port
    raise ServerFailed(f"no port between {_PORTS.start} and {_PORTS.stop} is free")


def check_port(name: str, host: str, port: int) -> None:
    """Raise ServerFailed if a process listens on the port already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ServerFailed(
                f"{name} has port {port} of {host}, and another program listens there; stop it, "
                "or give another port"
            ) from exc
