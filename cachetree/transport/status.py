"""State of a peer in numbers."""

from __future__ import annotations

import time
from enum import StrEnum

import msgspec

from cachetree.transport import verbs


class PeerState(StrEnum):
    """Whether a worker can be read from, and if not, why."""

    CONNECTING = "connecting"
    """No connection, or an incomplete snapshot; attempts continue."""
    READY = "ready"
    REFUSED = "refused"
    """The worker serves another family, speaks another version, or is this server's own; it is
    tried again each minute."""
    UNTRUSTED = "untrusted"
    """The handshake broke off, as if keys do not agree; attempts continue, and the error says what
    to change."""
    RESTING = "resting"
    """Its errors came too fast: no attempt is made before its cooldown is over."""
    CLOSED = "closed"


class PullStatus(msgspec.Struct, kw_only=True):
    """Copies of one peer's entries, in numbers; the peer's own thread counts in one of these."""

    num_fetched: int = 0
    """Fetches that completed; one entry may take several."""
    num_bytes: int = 0
    """Payload of these fetches."""
    num_gone: int = 0
    """Entries that had left the peer's memory before their turn."""
    num_failed: int = 0
    """Entries that were left out: there was no room, a fetch failed, or too many waited."""
    num_waiting: int = 0
    """Waiting entries, including the one that is being fetched."""
    error: str = ""
    """Error because of which the last entry was left out; empty once another one is here."""


class PeerStatus(msgspec.Struct, kw_only=True):
    """A peer in numbers; its own thread counts in one of these."""

    num_failed_fetches: int = 0
    num_retries: int = 0
    """Requests for the rest of an interrupted fetch."""
    num_landed_bytes: int = 0
    num_losses: int = 0
    num_resyncs: int = 0
    num_protocol_errors: int = 0
    address: str
    state: PeerState = PeerState.CONNECTING
    error: str = ""
    """Error because of which it is not ready, or last was not; empty if it always was."""
    probe_in_s: float | None = None
    """Seconds until one fetch may try a worker that failed too often; 0 from then on until that
    fetch has landed. None if all fetches may start."""
    unreachable_since: float | None = None
    """Seconds since 1970 at which its connection was lost; None while connected, and before the
    first."""
    epoch: int = 0
    """Epoch of the last connected worker; 0 before the first."""
    model: str = ""
    shares_memory: bool = False
    """True if pages are copied from the worker's memory; otherwise they arrive in frames."""
    bytes_per_s: float | None = None
    """Rate measured by recent fetches; None if there were none for a while."""
    num_pages: int = 0
    """Pages of the worker that are noted here, counted once per model."""
    num_dropped_pages: int = 0
    """Pages of the worker that are not noted here, or no longer: it has more pages or models than
    the limit for one worker.
    """
    pulls: PullStatus | None = None
    """Copies of its entries; None unless this cache keeps copies."""

    @property
    def is_ready(self) -> bool:
        """Return whether it can be read from."""
        return self.state is PeerState.READY

    @property
    def is_resting(self) -> bool:
        """Return whether it is left alone for a while."""
        return self.state is PeerState.RESTING

    @property
    def source(self) -> verbs.Source:
        """Describe it in a few words."""
        reason = "" if self.is_ready else self.error
        if self.is_ready and self.pulls is not None:
            reason = self.pulls.error
        if reason and self.unreachable_since is not None:
            since = time.strftime("%H:%M:%S", time.localtime(self.unreachable_since))
            reason = f"the peer is unreachable since {since}: {reason}"
        if self.probe_in_s:
            reason += f"; it is tried again in {self.probe_in_s:.0f} s"
        state = self.state.value
        return verbs.Source(address=self.address, state=state, reason=reason, model=self.model)
