"""The operator's settings of a worker and of its peers."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from cachetree.errors import ConfigError
from cachetree.transport.frames import MAX_FRAME_BYTES, MIN_FRAME_BYTES
from cachetree.transport.wire import Model

_MAX_SILENCE_S: Final = 65_534
"""Largest `silence_s`. `channel` gives half of it to the kernel as TCP_KEEPIDLE: Linux takes at
most MAX_TCP_KEEPIDLE."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a worker that serves its tree."""

    listen: str = "tcp://127.0.0.1:0"
    """Address to bind; port 0 takes a free one."""
    key_file: str | None = None
    """Secret key file, made by `cachetree keygen`. With it, traffic is encrypted, and only
    `allowed_peers` may read. None: nothing is encrypted, and everyone who can connect may read."""
    allowed_peers: tuple[str, ...] = ()
    """Public keys, files of public keys, or folders of `.pub` files, all read at start. A peer with
    one of these keys may read the pages of all tenants."""
    admin: tuple[str, ...] | None = None
    """Public keys of the operators, in the form of `allowed_peers`. They may read, evict and pin.
    If this server has no key and `listen` is a loopback address, an empty list lets everyone on
    this machine evict and pin. None: no one may."""
    bulk_port: int = 0
    """Port for the transfer of pages, on the host of `listen`. After a greeting at `listen`, each
    peer opens a connection to this port. 0 takes a free port."""
    insecure: bool = False
    """Allow `listen` without a key at an address that other machines can reach. Nothing is then
    encrypted or authenticated."""
    model: Model = ""
    """Id of the model that this server runs; empty if it runs none."""
    max_bytes_per_s: float | None = None
    """Largest number of bytes per second that all fetches together may send. None: no limit."""
    max_streams: int = 256
    """Largest number of fetches served at once. Further fetches are refused. One peer gets at most
    three quarters of this number."""
    max_peers: int = 256
    """Largest number of sessions at once. Further peers are refused."""
    max_pending_changes: int = 4096
    """Largest number of changes of the tree queued for one peer. A peer with more changes to read
    gets a new list of all entries instead."""
    shared_memory: bool = True
    """Let peers on this host copy pages from this process's memory. They get the pages' positions
    in that memory instead of their bytes."""
    silence_s: float = 10.0
    """Seconds without a message after which a peer counts as gone. A closed connection is noticed
    at once."""

    def __post_init__(self) -> None:
        if self.key_file is None and self.allowed_peers:
            raise ConfigError(
                "allowed_peers is set, and a server without a key cannot check the keys of peers; "
                "set key_file (`cachetree keygen` makes one), or remove allowed_peers"
            )
        if self.key_file is None and self.admin:
            raise ConfigError(
                "admin lists keys, and a server without a key cannot check the keys of operators; "
                "set key_file, or make admin an empty list, which lets in everyone on this machine"
            )
        if self.key_file is not None and not self.allowed_peers:
            raise ConfigError(
                f"key_file is {self.key_file} and allowed_peers is empty, so no peer could read "
                "from this server; list the public keys of the peers that may"
            )
        if not 0 <= self.bulk_port <= 65535:
            raise ConfigError(
                f"bulk_port is {self.bulk_port}; give a port from 1 to 65535 or 0 for a free one"
            )
        _check_positive(self, "max_streams max_peers max_pending_changes silence_s max_bytes_per_s")
        if self.silence_s > _MAX_SILENCE_S:
            raise ConfigError(
                f"silence_s is {self.silence_s}; the kernel watches a silent connection for "
                f"at most {_MAX_SILENCE_S} s: give that or less"
            )


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for reading from one remote worker."""

    key_file: str | None = None
    """Secret key file made by `cachetree keygen`; its public key has to be in the worker's
    `allowed_peers`."""
    server_key: str | None = None
    """Public key of the worker, or a file with the key. Traffic is then encrypted, and the worker
    has to prove this key. None: nothing is encrypted, and any worker that answers is trusted."""
    frame_bytes: int = 4 << 20
    """Largest payload that the worker may send in one frame."""
    connect_s: float = 2.0
    """Largest number of seconds for connection and handshake together."""
    reconnect_s: float = 0.1
    """Longest pause in seconds before the second attempt to connect. It doubles with each attempt,
    up to ten times this value. The real pause is a random share of it, so that not all peers of a
    worker return at once."""
    max_retries: int = 2
    """Number of times that a fetch asks for its missing bytes, after a lost connection or a damaged
    frame."""
    resume_s: float = 1.0
    """Seconds that an interrupted fetch waits for a new connection. Then it fails, so that its
    request can prefill before the deadline. A look-up of the worker's name may prolong the wait."""
    breaker_errors: int = 3
    """Number of errors within `breaker_window_s` after which nothing is read from the worker for
    `cooldown_s`, and its entries are forgotten. Afterwards one fetch tries the worker again."""
    breaker_window_s: float = 10.0
    cooldown_s: float = 30.0
    """Seconds without a fetch from a worker with too many errors. If the fetch after the pause
    fails as well, the pause doubles, up to ten times this value."""
    heartbeat_s: float = 1.0
    """Seconds between two pings to the worker."""
    shared_memory: bool = True
    """Copy pages directly from the memory of a worker on this host, if the worker allows that and
    its memory can be opened."""
    silence_s: float = 5.0
    """Seconds without a message after which a worker counts as lost. A closed connection is noticed
    at once."""

    def __post_init__(self) -> None:
        if not MIN_FRAME_BYTES <= self.frame_bytes <= MAX_FRAME_BYTES:
            raise ConfigError(
                f"frame_bytes is {self.frame_bytes}; choose from {MIN_FRAME_BYTES} to "
                f"{MAX_FRAME_BYTES}"
            )
        if self.server_key is not None and self.key_file is None:
            raise ConfigError(
                f"server_key is {self.server_key}, and a worker with a key also asks for a key of "
                "this server; set key_file (`cachetree keygen` makes one)"
            )
        _check_positive(
            self,
            "connect_s reconnect_s resume_s breaker_errors breaker_window_s "
            "cooldown_s heartbeat_s silence_s",
        )
        if self.max_retries < 0:
            raise ConfigError(f"max_retries is {self.max_retries}; it must be 0 or more")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"silence_s is {self.silence_s}, less than two heartbeats of {self.heartbeat_s} s; "
                "raise silence_s or lower heartbeat_s"
            )


def _check_positive(config: msgspec.Struct, fields: str) -> None:
    for field in fields.split():
        value = getattr(config, field)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{field} is {value}; give a finite number above 0")
