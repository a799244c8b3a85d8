"""Whether a cache lives, can serve, and is as well as it should be: three questions apart."""

from __future__ import annotations

from typing import Final

import msgspec

from cachetree.status import CacheStatus

_STUCK_S: Final = 5.0
"""A worker's thread turns four times a second also where nothing happens."""
_NEARLY_ALL: Final = 0.95


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What `/health` says."""

    live: bool
    """The worker's thread turns; otherwise only a restart helps."""
    ready: bool
    """It listens, and has read into memory what it wanted to of its disk."""
    degraded: tuple[str, ...]
    """What is wrong, though it serves; empty where nothing is."""


def health_of(status: CacheStatus) -> Health:
    live = status.worker_turn_age_s < _STUCK_S
    return Health(
        live=live,
        ready=live and (status.disk is None or status.disk.is_warm),
        degraded=tuple(_complaints(status)),
    )


def _complaints(status: CacheStatus) -> list[str]:
    complaints = []
    if status.disk is not None and status.disk.is_failing:
        complaints.append("the disk cannot be written")
    if status.held_bytes > _NEARLY_ALL * status.host_bytes:
        complaints.append(
            f"{status.held_bytes} of {status.host_bytes} bytes of memory cannot be evicted"
        )
    complaints += [
        f"worker {peer.address} failed too often and is left alone for a while"
        for peer in status.peers
        if peer.is_resting
    ]
    return complaints
