"""What an operator may set on a worker and on its peers."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from cachetree.errors import ConfigError
from cachetree.transport.frames import MAX_FRAME_BYTES, MIN_FRAME_BYTES
from cachetree.transport.wire import Model

_MAX_SILENCE_S: Final = 65_534
"""Half of it, which `channel` tells the kernel, is Linux's MAX_TCP_KEEPIDLE."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker serves its tree."""

    listen: str = "tcp://127.0.0.1:0"
    """Address to bind; port 0 takes a free one."""
    key_file: str | None = None
    """Secret key file made by `cachetree keygen`: traffic is encrypted, and only `allowed_peers`
    may read. None encrypts nothing and lets in everyone who can connect."""
    allowed_peers: tuple[str, ...] = ()
    """Public keys, files of them, or folders of `.pub` files. They are read at start. Whoever is
    let in is trusted with the pages of all tenants: there are no lists per namespace."""
    admin: tuple[str, ...] | None = None
    """Who may evict and pin: public keys as in `allowed_peers`, who are let in too. Without a key
    of this server it is empty, and means everyone on this machine where `listen` is a loopback
    address. None: nobody."""
    bulk_port: int = 0
    """Where sessions go, over a connection that each peer opens after its hello, on the host of
    `listen`; 0 takes a free one."""
    insecure: bool = False
    """Allow an address that other machines can reach without a key. Nothing is encrypted or
    authenticated then."""
    model: Model = ""
    """Id of the model this server runs; empty where it runs none."""
    max_bytes_per_s: float | None = None
    """Cap on what all streams together send; None for no cap."""
    max_streams: int = 256
    """Fetches served at once; more are refused. One peer has three times as many as stay free, at
    most."""
    max_peers: int = 256
    """Sessions held at once; more are turned away."""
    max_pending_changes: int = 4096
    """Changes kept for a peer that does not read; beyond it that peer gets a new snapshot."""
    shared_memory: bool = True
    """Let peers on this host copy pages from this process's memory themselves, and tell them only
    where they are. Others get frames."""
    silence_s: float = 10.0
    """A peer that says nothing for this long is gone. A closed connection is noticed at once."""

    def __post_init__(self) -> None:
        if self.key_file is None and self.allowed_peers:
            raise ConfigError(
                "allowed_peers is set, and without a key of this server nobody can be told from "
                "anybody else; set key_file (`cachetree keygen` makes one), or remove "
                "allowed_peers"
            )
        if self.key_file is None and self.admin:
            raise ConfigError(
                "admin lists keys, and without a key of this server nobody can be told from "
                "anybody else; set key_file, or make admin an empty list, which is everyone on "
                "this machine"
            )
        if self.key_file is not None and not self.allowed_peers:
            raise ConfigError(
                f"key_file is {self.key_file} and allowed_peers is empty, so that nobody could "
                "read from this server; list the public keys of those who may"
            )
        if not 0 <= self.bulk_port <= 65535:
            raise ConfigError(
                f"bulk_port is {self.bulk_port}; give a port from 1 to 65535 or 0 for a free one"
            )
        _check_positive(self, "max_streams max_peers max_pending_changes silence_s max_bytes_per_s")
        if self.silence_s > _MAX_SILENCE_S:
            raise ConfigError(
                f"silence_s is {self.silence_s}; the kernel looks after a silent connection for "
                f"{_MAX_SILENCE_S} s at most: give that or less"
            )


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this server talks to one remote worker."""

    key_file: str | None = None
    """Secret key file made by `cachetree keygen`; its public key stands in the worker's
    `allowed_peers`."""
    server_key: str | None = None
    """Public key of the worker, or the file that holds it: traffic is encrypted, and with anyone
    else there is none. None encrypts nothing and believes whoever answers."""
    frame_bytes: int = 4 << 20
    """Largest payload that it is to send in one frame."""
    connect_s: float = 2.0
    """Time for connection and handshake together."""
    reconnect_s: float = 0.1
    """Longest first pause before another attempt; it doubles up to ten times this. Each pause is
    drawn anew between 0 and that, so that many peers of one worker do not come at once."""
    max_retries: int = 2
    """How often a fetch asks for the rest, after a lost connection or a damaged frame."""
    resume_s: float = 1.0
    """A fetch that lost its worker is given up when there is no connection for so long: where the
    worker is gone, a full prefill should not wait for the whole deadline. A look-up of the
    worker's name is not broken off by it."""
    breaker_errors: int = 3
    """So many errors within `breaker_window_s`, and the worker is left alone for `cooldown_s`: its
    entries are forgotten, and then one fetch tries whether it is well again."""
    breaker_window_s: float = 10.0
    cooldown_s: float = 30.0
    """It doubles, up to ten times this, each time that fetch fails."""
    heartbeat_s: float = 1.0
    """A ping is sent this often."""
    shared_memory: bool = True
    """Copy pages from the memory of a worker on this host, if it lets and this process can."""
    silence_s: float = 5.0
    """A worker that says nothing for this long is lost. A closed connection is noticed at once."""

    def __post_init__(self) -> None:
        if not MIN_FRAME_BYTES <= self.frame_bytes <= MAX_FRAME_BYTES:
            raise ConfigError(
                f"frame_bytes is {self.frame_bytes}; choose from {MIN_FRAME_BYTES} to "
                f"{MAX_FRAME_BYTES}"
            )
        if self.server_key is not None and self.key_file is None:
            raise ConfigError(
                f"server_key is {self.server_key}, and a worker with a key asks for this server's "
                "too; set key_file (`cachetree keygen` makes one)"
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
