"""Limit the connections to a worker's ports: how many may be open, and which one ends first."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address
from math import inf
from typing import Any, Final

log = logging.getLogger(__name__)

_LEAST_DESCRIPTORS: Final = 4096
"""Number of file descriptors that a worker's process needs. Strangers can take 1,800: 1,000
connections that libzmq has not reported yet, 512 that it has reported, and 256 on the data port."""
_WANTED_DESCRIPTORS: Final = 65_536


def crowding(sources: Mapping[int, str]) -> int:
    """Return the descriptor of a connection to end: the oldest one of the source with the most
    connections.

    In this way, many connections from one address do not keep another address out. `sources` has
    the source of each connection (see `source_of`), by descriptor, oldest first.
    """
    ((most, _),) = Counter(sources.values()).most_common(1)
    return next(descriptor for descriptor, source in sources.items() if source == most)


def source_of(host: str) -> str:
    """Return the part of an IP address that its owner cannot choose; for IPv6 the first half."""
    address = ip_address(host)
    if not isinstance(address, IPv6Address):
        return host
    return str(address.ipv4_mapped or IPv6Address(address.packed[:8] + bytes(8)))


class Connections:
    """The TCP connections of a listening ZMQ socket, as its monitor reports them.

    libzmq does not bound their number. This object keeps at most `most` connections that never sent
    a message, and at most `most` that did.
    """

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self._ends: dict[int, tuple[Any, Any]] = {}
        """Own and remote address of each connection. Keys are libzmq's descriptors. If an address
        has changed, the descriptor belongs to another socket now."""
        self._silent: dict[int, str] = {}
        """Sources of connections that never sent a message, oldest first. Keys are descriptors."""
        self._heard: dict[int, str] = {}
        """Sources of connections that have sent a message, oldest first. Keys are descriptors."""
        self._ending: set[int] = set()
        """Connections that this object has ended, while libzmq has not yet reported them as
        closed."""

    @property
    def are_ending(self) -> bool:
        """Whether this object has ended connections that libzmq has not yet reported as closed."""
        return bool(self._ending)

    def came(self, descriptor: int, port: int) -> str:
        """Note that libzmq accepted a connection at `port`. If another connection had to end for
        it, return that connection's source, else an empty string."""
        self.went(descriptor)
        with contextlib.suppress(OSError), _copy(descriptor) as copy:
            own, other = copy.getsockname(), copy.getpeername()
            if own[1] == port:
                self._ends[descriptor] = own, other
                self._silent[descriptor] = source_of(other[0])
                return self._bound(self._silent)
        return ""

    def heard(self, descriptor: int) -> None:
        """Note that a message has arrived over this connection."""
        if (source := self._silent.pop(descriptor, None)) is not None:
            self._heard[descriptor] = source
            self._bound(self._heard)

    def went(self, descriptor: int) -> None:
        """Note that libzmq has closed this connection."""
        self._ending.discard(descriptor)
        for known in (self._ends, self._silent, self._heard):
            known.pop(descriptor, None)

    def _bound(self, sources: dict[int, str]) -> str:
        """End one connection of `sources` if there are too many, and return its source. Else return
        an empty string."""
        if len(sources) <= self._most:
            return ""
        source = sources[descriptor := crowding(sources)]
        with contextlib.suppress(OSError), _copy(descriptor) as copy:
            if (copy.getsockname(), copy.getpeername()) == self._ends[descriptor]:
                copy.shutdown(socket.SHUT_RDWR)
        self.went(descriptor)
        self._ending.add(descriptor)
        return source


def _copy(descriptor: int) -> socket.socket:
    """Duplicate a descriptor as a socket that can report IPv4 and IPv6 addresses. Raises OSError.

    `socket.fromfd` would leak its copy if the descriptor is no longer a socket.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(socket.AF_INET6, socket.SOCK_STREAM, fileno=copy)
    except OSError:
        os.close(copy)
        raise


def raise_descriptor_limit() -> None:
    """Let this process open more files, up to its hard limit. Logs the change, and warns if a
    worker needs more."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (inf if it == resource.RLIM_INFINITY else it for it in limits)
    if soft < (target := min(_WANTED_DESCRIPTORS, most)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(target), hard))
        log.info("this process may now open %d files; it was %d", target, soft)
    if most < _LEAST_DESCRIPTORS:
        log.warning(
            "this process may open no more than %d files, and strangers who connect to its worker "
            "can use them up; raise its hard limit to %d (ulimit -Hn, LimitNOFILE)",
            most,
            _LEAST_DESCRIPTORS,
        )
