"""How a peer is doing."""

from __future__ import annotations

import logging
from enum import Enum
from typing import Final

import msgspec

from cachetree.clock import Clock
from cachetree.errors import CacheTreeError
from cachetree.ids import Location
from cachetree.transport import verbs
from cachetree.transport.handshake import Sparingly

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
        self._sparingly = Sparingly(clock)
        self._has_told = False

    def lose(self, state: PeerState, error: CacheTreeError, *, was_greeted: bool) -> None:
        """It is in `state` now, because of `error`."""
        cause = state.value
        if state is PeerState.CONNECTING:
            cause = "lost" if was_greeted else "not reached"
        if state is not PeerState.CLOSED and self._sparingly.may(cause):
            log.warning("peer %s is %s: %s", self._address, cause, error)
            self._has_told = True

    def rise(self) -> None:
        """It is ready."""
        if self._has_told:
            log.info("peer %s is ready", self._address)
            self._has_told = False
