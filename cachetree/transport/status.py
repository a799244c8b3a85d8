"""State of each peer that a server reads from, in numbers."""

from __future__ import annotations

import time
from enum import StrEnum

import msgspec

from cachetree.transport import verbs


class PeerState(StrEnum):
    """State of a peer: whether its worker can be read, and the reason if not."""

    CONNECTING = "connecting"
    """There is no connection yet, or the snapshot is incomplete. Attempts continue."""
    READY = "ready"
    REFUSED = "refused"
    """The worker serves another family, has another version, or is this server's own. The peer
    tries again each minute."""
    UNTRUSTED = "untrusted"
    """The handshake failed, probably because keys do not agree. Attempts continue, and the error
    says what to change."""
    RESTING = "resting"
    """Too many errors in a short time: the peer waits for the cooldown."""
    CLOSED = "closed"


class PullStatus(msgspec.Struct, kw_only=True):
    """Numbers of one peer's entries that this cache copies. The peer's thread changes them."""

    num_fetched: int = 0
    """Completed fetches. One entry may take several."""
    num_bytes: int = 0
    """Bytes of completed fetches."""
    num_gone: int = 0
    """Number of entries that the peer no longer had in memory when their turn came."""
    num_failed: int = 0
    """Number of entries that were not copied: no room, a failed fetch, or too many waited."""
    num_waiting: int = 0
    """Number of entries that wait to be copied. The entry that is being fetched counts, too."""
    error: str = ""
    """Reason why the last entry was not copied. Empty after a later success."""


class PeerStatus(msgspec.Struct, kw_only=True):
    """State of a peer in numbers. The peer's thread changes them."""

    num_failed_fetches: int = 0
    num_retries: int = 0
    """Number of requests for the missing bytes of interrupted fetches."""
    num_landed_bytes: int = 0
    num_losses: int = 0
    num_resyncs: int = 0
    num_protocol_errors: int = 0
    address: str
    state: PeerState = PeerState.CONNECTING
    error: str = ""
    """Last error that kept the peer from being ready. Empty if there was none."""
    probe_in_s: float | None = None
    """After too many errors: seconds until one fetch may try the worker, then 0 until that fetch
    has succeeded. None if all fetches may start."""
    unreachable_since: float | None = None
    """Time at which the connection was lost, in seconds since 1970. None while connected, and
    before the first connection."""
    epoch: int = 0
    """Random number of the worker's last start (`Worker.epoch`). 0 before the first connection."""
    model: str = ""
    shares_memory: bool = False
    """True if pages are copied from the worker's memory. Otherwise they arrive in frames."""
    bytes_per_s: float | None = None
    """Rate of recent fetches in bytes per second. None if there were no recent fetches."""
    num_pages: int = 0
    """Pages of the worker that this server's tree lists. A page counts once for each model."""
    num_dropped_pages: int = 0
    """Pages of the worker that this server's tree dropped or never listed: the worker has more
    pages or models than the tree lists for one worker."""
    pulls: PullStatus | None = None
    """Copies of the worker's entries. None if this cache keeps no copies."""

    @property
    def is_ready(self) -> bool:
        """Whether the worker can be read."""
        return self.state is PeerState.READY

    @property
    def is_resting(self) -> bool:
        """Whether the peer waits for the cooldown after too many errors."""
        return self.state is PeerState.RESTING

    @property
    def source(self) -> verbs.Source:
        """Description of the peer for operators, with its state in a few words."""
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
