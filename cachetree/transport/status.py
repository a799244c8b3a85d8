"""How a worker, and how a peer of one, is doing."""

from __future__ import annotations

import logging
from collections import Counter
from enum import Enum
from typing import Final

import msgspec

from cachetree.clock import Clock
from cachetree.disk import DiskTier
from cachetree.errors import CacheTreeError
from cachetree.ids import Location
from cachetree.transport import verbs, wire
from cachetree.transport.backoff import LogLimiter
from cachetree.tree import CacheTree

log = logging.getLogger("cachetree.peer")


class PeerState(str, Enum):
    CONNECTING = "connecting"
    """No connection, or its snapshot is not complete; attempts go on."""
    READY = "ready"
    REFUSED = "refused"
    """The worker serves another family, speaks another version, or is this server's own. Final."""
    UNTRUSTED = "untrusted"
    """The two sides' keys do not agree; attempts go on, and the error says what to change."""
    RESTING = "resting"
    """Its errors came too fast: no attempt is made before its cooldown is over."""
    CLOSED = "closed"


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A peer in numbers."""

    address: str
    state: str
    error: str
    """Why it is not ready, or why it last was not; empty if it always was."""
    probe_in_s: float | None
    """Seconds until one fetch may try a worker that failed too often; 0 from then on until that
    fetch has landed. None where all fetches may go."""
    epoch: int
    model: str
    shares_memory: bool
    """Whether pages are copied from the worker's memory; else they come in frames."""
    bytes_per_s: float | None
    num_fetches: int
    num_failed_fetches: int
    num_retries: int
    """Requests for the rest of a fetch that was interrupted."""
    num_landed_bytes: int
    num_losses: int
    num_resyncs: int
    num_pages: int
    """That it has and that are noted here, counted once per model."""
    num_dropped_pages: int
    """That were noted and given up, because it has more than `max_pages`."""
    num_protocol_errors: int

    @property
    def source(self) -> verbs.Source:
        """In a few words."""
        is_ready = self.state == PeerState.READY.value
        reason = "" if is_ready else self.error
        if self.probe_in_s:
            reason += f"; it is tried again in {self.probe_in_s:.0f} s"
        return verbs.Source(address=self.address, state=self.state, reason=reason)


class PeerLog:
    """Tells the reader's side why a peer is not ready, each cause once a minute.

    Lines go to the logger `cachetree.peer`, for a server to mark as its own. Used by the peer's
    thread.
    """

    def __init__(self, address: Location, clock: Clock) -> None:
        self._address: Final = address
        self._log_limiter = LogLimiter(clock)
        self._has_told = False

    def lose(self, state: PeerState, error: CacheTreeError, *, was_greeted: bool) -> None:
        """It is in `state` now, because of `error`."""
        cause = state.value
        if state is PeerState.CONNECTING:
            cause = "lost" if was_greeted else "not reached"
        if state is not PeerState.CLOSED and self._log_limiter.may(cause):
            log.warning("peer %s is %s: %s", self._address, cause, error)
            self._has_told = True

    def rise(self) -> None:
        """It is ready."""
        if self._has_told:
            log.info("peer %s is ready", self._address)
            self._has_told = False


def status_of(
    tree: CacheTree,
    disk: DiskTier | None,
    counts: Counter[str],
    *,
    epoch: int,
    model: str,
    num_peers: int,
    num_streams: int,
    num_open_stores: int,
    reads_from: tuple[verbs.Source, ...],
) -> verbs.Status:
    """Read from any thread; not an atomic picture."""
    return verbs.Status(
        epoch=epoch,
        model=model,
        num_peers=num_peers,
        num_streams=num_streams,
        num_open_stores=num_open_stores,
        reads_from=reads_from,
        version=wire.PROTOCOL_VERSION,
        num_bytes=tree.num_bytes,
        host_bytes=tree.host_bytes,
        num_pages=tree.num_pages,
        pages_by_model=tree.pages_by_model(),
        num_fetches=counts["fetches"],
        num_failed_fetches=counts["failed"],
        num_sent_bytes=counts["sent_bytes"],
        num_protocol_errors=counts["protocol_errors"],
        num_refused_peers=counts["refused"],
        num_failed_handshakes=counts["failed_handshakes"],
        num_stores=counts["stores"],
        num_refused_stores=counts["refused_stores"],
        num_received_bytes=counts["received_bytes"],
        fetches_by_outcome=_by(counts, "fetch "),
        stores_by_outcome=_by(counts, "store "),
        hits=_by(counts, "hit "),
        misses=_by(counts, "miss "),
        family=tree.family,
        disk=disk.status() if disk else None,
    )


def _by(counts: Counter[str], prefix: str) -> dict[str, int]:
    """Counts whose names begin so, by the rest of their names."""
    there = tuple(counts.items())
    return {name.removeprefix(prefix): num for name, num in there if name.startswith(prefix)}
