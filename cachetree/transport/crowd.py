"""Connections that strangers may hold: how many, of which source, and within which limit."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from math import inf
from typing import Final

log = logging.getLogger(__name__)

LEAST_DESCRIPTORS: Final = 4096
"""Those of a worker's process. Strangers can have 2,300: 1,000 connections of which libzmq has not
told yet, four for each of 256 that it has told of, and 256 on the data port."""
MOST_DESCRIPTORS: Final = 1 << 20
"""More than any worker uses, and as many as Linux allows by default."""


class Crowd:
    """Connections by descriptor, oldest first: at most so many.

    For one more the source with the most makes room, with its oldest. So a crowd from one address
    keeps no other address out.
    """

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self._sources: dict[int, str] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._sources))

    def add(self, descriptor: int, source: str) -> int | None:
        """Note a connection; returns the one that has to go, which is noted no more."""
        self._sources[descriptor] = source
        if len(self._sources) <= self._most:
            return None
        ((crowded, _),) = Counter(self._sources.values()).most_common(1)
        oldest = next(it for it, of in self._sources.items() if of == crowded)
        del self._sources[oldest]
        return oldest

    def discard(self, descriptor: int) -> str | None:
        """Its source; None if it is not noted."""
        return self._sources.pop(descriptor, None)


def source_of(host: str) -> str:
    """The part of an IP address that its owner cannot choose: of IPv6 the first half."""
    address = ip_address(host)
    if not isinstance(address, IPv6Address):
        return host
    return str(address.ipv4_mapped or IPv6Address(address.packed[:8] + bytes(8)))


class Connections:
    """The TCP connections of a ZMQ socket that listens, as its monitor reports them.

    libzmq bounds neither how many it keeps nor of which source. Each has a second descriptor here,
    by which it is ended. There are at most so many that never sent a message, and as many that did.
    """

    def __init__(self, most: int) -> None:
        self._copies: dict[int, socket.socket] = {}
        """By libzmq's descriptor."""
        self._silent = Crowd(most)
        self._heard = Crowd(most)

    def came(self, descriptor: int, port: int) -> str:
        """libzmq accepted a connection at `port`; returns the source of a silent one that was ended
        for it, or nothing."""
        self.went(descriptor)
        try:
            copy = _copy(descriptor)
        except OSError as exc:
            if exc.errno == errno.EMFILE:
                self.close()
            return ""
        self._copies[descriptor] = copy
        try:
            source = source_of(copy.getpeername()[0])
            is_ours = copy.getsockname()[1] == port  # And not what has its number by now.
        except OSError:
            is_ours = False
        if not is_ours:
            self.went(descriptor)
            return ""
        crowding = self._silent.add(descriptor, source)
        self._end(crowding)
        return source if crowding is not None else ""

    def heard(self, descriptor: int) -> None:
        """A message has come over it."""
        if (source := self._silent.discard(descriptor)) is not None:
            self._end(self._heard.add(descriptor, source))

    def went(self, descriptor: int) -> None:
        """libzmq has closed it. The other side hears of that when the copy is closed, too."""
        for crowd in (self._silent, self._heard):
            crowd.discard(descriptor)
        if (copy := self._copies.pop(descriptor, None)) is not None:
            copy.close()

    def close(self) -> None:
        """End all of them."""
        for descriptor in tuple(self._copies):
            self._end(descriptor)

    def _end(self, descriptor: int | None) -> None:
        if descriptor is not None:
            with contextlib.suppress(OSError):  # The other side has ended it.
                self._copies[descriptor].shutdown(socket.SHUT_RDWR)
            self.went(descriptor)


def _copy(descriptor: int) -> socket.socket:
    """Raises OSError."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def raise_descriptor_limit(wanted: int) -> None:
    """Have this process allowed so many descriptors, or as many as its hard limit permits; logs
    what it changes, and warns if that is too little for a worker."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (inf if it == resource.RLIM_INFINITY else it for it in limits)
    if soft < (target := min(wanted, most)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(target), hard))
        log.info("this process may now open %d files; it was %d", target, soft)
    if most < LEAST_DESCRIPTORS:
        log.warning(
            "this process may open no more than %d files, and strangers who connect to its worker "
            "can use them up; raise its hard limit to %d (ulimit -Hn, LimitNOFILE)",
            most,
            LEAST_DESCRIPTORS,
        )
