"""The state of a cache in numbers, and one log line for each fetch."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from cachetree.disk import DiskStatus
from cachetree.errors import Cancelled, printable
from cachetree.ids import Location
from cachetree.memory import Staging
from cachetree.names import ModelNames
from cachetree.planning import Plan
from cachetree.transport import PeerStatus, Status

log = logging.getLogger("cachetree.fetch")

OK: Final = "ok"


class FetchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the fetches from one location, since it was added as a peer or tier. A fetch counts
    when its reader releases it."""

    location: Location
    num_bytes: int
    outcomes: dict[str, int]
    """Number of fetches by outcome: `ok`, or the error's name."""


class CacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a cache in numbers, for metrics and for `status` of the command line."""

    num_bytes: int
    host_bytes: int
    held_bytes: int
    """Bytes among `num_bytes` that cannot be evicted now: they are in use or pinned."""
    num_pages: int
    """Number of pages in memory. A page counts once for each model."""
    num_evictions: int
    """Number of entries that were evicted from memory, for room or by an operator."""
    staging_bytes_in_use: int
    staging_bytes: int
    fetches: tuple[FetchCounts, ...]
    """Counts of this process's fetches: from its own memory, its tiers and its peers."""
    peers: tuple[PeerStatus, ...]
    worker: Status | None
    """State of the worker; None if this cache does not serve."""
    worker_turn_age_s: float
    """Seconds since the worker's loop began its last round. It normally begins several a second."""
    disk: DiskStatus | None
    """State of the disk; None without a disk."""
    tiers: Mapping[Location, msgspec.Struct]
    """State of each tier. The disk is one of them."""
    paused_tiers: Mapping[Location, bool]
    """Whether each tier is paused: it fails or hangs, and no fetch reads from it for now."""


class FetchLog:
    """Count fetches by location and outcome, and log each one. Thread-safe. Lines of key=value go
    to the logger `cachetree.fetch` at level INFO."""

    def __init__(self, page_tokens: int, names: ModelNames) -> None:
        self._page_tokens = page_tokens
        self._names = names
        self._lock = threading.Lock()
        self._outcomes: dict[Location, Counter[str]] = {}
        self._num_bytes: Counter[Location] = Counter()

    def note(self, plan: Plan, staging: Staging) -> None:
        """Count and log a fetch that its reader has released."""
        error = staging.error
        outcome = type(error).__name__ if error else OK
        with self._lock:
            self._outcomes.setdefault(plan.location, Counter())[outcome] += 1
            self._num_bytes[plan.location] += staging.num_landed_bytes
        if log.isEnabledFor(logging.INFO):
            log.info("%s", printable(self._line(plan, staging, outcome)))

    def counts(self, present: Collection[Location]) -> tuple[FetchCounts, ...]:
        """Return the counts of each location in `present`, and delete the counts of all other
        locations."""
        with self._lock:
            for gone in self._outcomes.keys() - present:
                del self._outcomes[gone], self._num_bytes[gone]
            return tuple(
                FetchCounts(
                    location=location, num_bytes=self._num_bytes[location], outcomes=dict(outcomes)
                )
                for location, outcomes in self._outcomes.items()
            )

    def _line(self, plan: Plan, staging: Staging, outcome: str) -> str:
        stopped_s = staging.completed_s or staging.deadline.clock()
        seconds = stopped_s - staging.started_s
        num_pages = len(plan.pages)
        fields = {
            "outcome": outcome,
            "model": plan.sender,
            "name": self._names.now.get(plan.sender, "-"),
            "location": plan.location,
            "tokens": num_pages * self._page_tokens,
            "pages": num_pages,
            "layers": len(plan.steps),
            "bytes": staging.num_landed_bytes,
            "seconds": f"{seconds:.6f}",
            "gb_s": f"{staging.num_landed_bytes / max(seconds, 1e-9) / 1e9:.3f}",
        }
        line = " ".join(f"{name}={value}" for name, value in fields.items())
        error = staging.error
        if error is None or isinstance(error, Cancelled):
            return line
        return f"{line} cause={json.dumps(str(error))}"
