"""All workers that a cache reads from: the settings list them, or a directory names them."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import Final

import msgspec

from cachetree.clock import Clock, Deadline
from cachetree.errors import ConfigError, printable
from cachetree.ids import Location
from cachetree.transport import keys, verbs
from cachetree.transport.address import parse_address, parse_remote
from cachetree.transport.backoff import LogLimiter
from cachetree.transport.config import PeerConfig
from cachetree.transport.directory import (
    Look,
    PeriodicTask,
    addresses_of,
    is_directory,
    parse_directory,
)
from cachetree.transport.handshake import credentials_of
from cachetree.transport.peer import NO_WORKER, Peer
from cachetree.transport.pulls import Keeper
from cachetree.transport.status import PeerState
from cachetree.transport.wakeup import CLOSE_S
from cachetree.transport.worker import Worker
from cachetree.tree import CacheTree

log = logging.getLogger("cachetree.directory")

GONE_S: Final = 10.0
"""Seconds after which an unreachable worker is removed, if no directory names it any more."""


class Peers:
    """All peers of a cache. `now` has the present peers by address. Each change makes a new
    mapping, so requests read it without a lock.

    Each directory has a thread that asks it repeatedly. The last answer of a directory is valid
    until the next one. A worker that no directory names any more stays a peer while it answers.
    """

    def __init__(
        self, tree: CacheTree, own: Worker | None, clock: Clock, keeper: Keeper | None = None
    ) -> None:
        """`own` is this server's worker, which cannot be a peer. With a `keeper`, the entries of
        all peers are copied."""
        self._tree = tree
        self._clock = clock
        self._own = own
        self._keeper = keeper
        self._own_epoch: Final = own.epoch if own else NO_WORKER
        self._lock = threading.Lock()
        """Held by the thread of a directory while it adds or removes peers."""
        self._named: dict[str, Mapping[Location, PeerConfig]] = {}
        """Last answer of each directory: its workers, with the settings for reading them."""
        self._gone_at_s: dict[Location, float] = {}
        """Time since which each peer from a directory is gone; infinity while it is present."""
        self._tasks: list[PeriodicTask] = []
        self._limiter = LogLimiter(clock)
        self._is_closed = False
        self.now: Mapping[Location, Peer] = {}

    def add(self, address: Location, config: PeerConfig) -> None:
        """Add the worker at `address` as a peer. Raises ConfigError. Only peers from directories
        leave before `close`."""
        peer = Peer(
            self._tree,
            address,
            config,
            own_epoch=self._own_epoch,
            keeper=self._keeper,
            clock=self._clock,
        )
        self.now = {**self.now, address: peer}

    def watch(self, url: str, config: PeerConfig) -> None:
        """Start a thread that asks the directory at `url` repeatedly, and adds its workers as
        peers. Raises ConfigError."""
        config = check_found(url, config)
        look = partial(addresses_of, parse_directory(url, field="peers"))
        self._tasks.append(PeriodicTask(url, partial(self.look, url, look, config)))

    def sources(self) -> tuple[verbs.Source, ...]:
        """Return the states of all peers and directories, for operators. Never blocks.
        Thread-safe."""
        return (*(it.status.source for it in self.now.values()), *map(_source, self._tasks))

    def wait_ready(self, deadline: Deadline) -> bool:
        """Block until every directory has answered and every peer is ready. Returns False if the
        deadline is reached first."""
        have = [it.has_gone_well.wait(deadline.remaining_s()) for it in self._tasks]
        return all(have) and all(it.wait_ready(deadline.remaining_s()) for it in self.now.values())

    def close(self) -> None:
        """Close all directories and peers at once, and wait at most `CLOSE_S` for their threads.
        Idempotent."""
        self._is_closed = True
        for task in self._tasks:
            task.close(0.0)
        for peer in self.now.values():
            peer.close(0.0)
        until = Deadline.after(CLOSE_S)
        for task in self._tasks:
            task.close(until.remaining_s())
        for peer in self.now.values():  # This includes peers that a directory has added meanwhile.
            peer.close(until.remaining_s())

    def look(self, url: str, look: Look, config: PeerConfig) -> None:
        """Ask the directory at `url`, and add the workers that it names as peers, with settings
        `config`. Remove peers that were gone for `GONE_S` seconds, or that now have other settings.
        If the directory fails, add and remove by its last answer, then raise its error."""
        try:
            self._named[url] = dict.fromkeys(look(), config)
        finally:
            with self._lock:
                named = {at: how for it in tuple(self._named.values()) for at, how in it.items()}
                self._take_out(named)
                self._bring_in({} if self._is_closed else named)

    def _take_out(self, named: Mapping[Location, PeerConfig]) -> None:
        now_s = self._clock()
        for address, gone_at_s in tuple(self._gone_at_s.items()):
            peer = self.now[address]
            has_other_key = named.get(address, peer.config) != peer.config
            is_there = peer.state is PeerState.READY or address in named
            self._gone_at_s[address] = gone_at_s = inf if is_there else min(gone_at_s, now_s)
            if has_other_key or now_s - gone_at_s >= GONE_S:
                self.now = {at: it for at, it in self.now.items() if at != address}
                del self._gone_at_s[address]
                peer.close()
                self._tree.remote.leave(address)

    def _bring_in(self, named: Mapping[Location, PeerConfig]) -> None:
        for address in sorted(named.keys() - self.now.keys()):
            try:
                if not self._is_own(address):
                    self.add(address, named[address])
                    self._gone_at_s[address] = inf
            except ConfigError as exc:
                self._skip(address, str(exc))

    def _is_own(self, address: Location) -> bool:
        """Whether `address` is this server's own worker. Raises ConfigError if `address` is not
        `tcp://IP:PORT` in the usual spelling: two spellings would make two sessions with one
        worker."""
        remote = parse_remote(address, field="an address of a directory")
        if remote.url != address or not _is_plain(remote.host):
            raise ConfigError(f"an address of a directory is {address!r}, not tcp://IP:PORT")
        own = parse_address(self._own.address, field="listen") if self._own else None
        if own is None or remote.port != own.port:
            return False
        return remote == own or (own.is_everywhere and _is_here(remote.host))

    def _skip(self, address: str, why: str) -> None:
        if self._limiter.may(address):
            log.warning("a worker that was found is skipped: %s", printable(why))


def check_peer(address: str, config: PeerConfig) -> None:
    """Check the keys of a peer, or of a directory of peers. Raises ConfigError."""
    if is_directory(address):
        check_found(address, config)
    else:
        credentials_of(config.key_file, config.server_key)


def check_found(url: str, config: PeerConfig) -> PeerConfig:
    """Return the settings for workers from a directory, with the key that these workers have to
    prove. Raises ConfigError."""
    if config.server_key is None:
        return config
    allowed = sorted(keys.read_public_keys([config.server_key], field="peer_keys"))
    if len(allowed) > 1:
        raise ConfigError(
            f"peer_keys of {url} names {len(allowed)} keys, and DNS does not say which worker has "
            "which; give one key that all of its workers have"
        )
    credentials_of(config.key_file, allowed[0])
    return msgspec.structs.replace(config, server_key=allowed[0])


def _source(task: PeriodicTask) -> verbs.Source:
    is_well = task.has_gone_well.is_set() and not task.error
    state = PeerState.READY if is_well else PeerState.CONNECTING
    return verbs.Source(address=task.name, state=state.value, reason=task.error)


def _is_plain(host: str) -> bool:
    """Return whether `host` is an IP address in its usual form, not a name."""
    try:
        return "%" not in host and str(ipaddress.ip_address(host)) == host
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    """Return whether `host` is an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
