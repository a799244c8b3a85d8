"""Messages between an operator and a worker, outside of any session. Each question or order has one
answer."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Final

import msgspec

from cachetree.checkpoint import Family
from cachetree.disk import DiskStatus
from cachetree.planning import Match

MAX_MODELS: Final = 1 << 16
MAX_COUNTS: Final = 256
MAX_SOURCES: Final = 4096
MAX_REASON_CHARS: Final = 500

ReasonText = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
ByModel = Annotated[dict[str, int], msgspec.Meta(max_length=MAX_MODELS)]
ByName = Annotated[dict[str, int], msgspec.Meta(max_length=MAX_COUNTS)]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, or a directory of workers, from which the answering server reads."""

    address: str
    state: str
    reason: str
    """Reason why the source is not ready, or why copies of its entries fail. Empty without a
    problem."""
    model: str = ""
    """Id of the model that the worker runs. Empty if it runs none, or was never reached."""


class StatusRequest(msgspec.Struct, frozen=True, tag="status_request"):
    """Ask for the worker's state in numbers."""


class Status(msgspec.Struct, kw_only=True, tag="status"):
    """State of a worker in numbers. The worker's thread changes them."""

    version: int
    epoch: int
    model: str
    num_bytes: int = 0
    host_bytes: int = 0
    held_bytes: int = 0
    """Bytes among `num_bytes` that cannot be evicted now because of pins or readers."""
    num_pinned_bytes: int = 0
    """Bytes among `held_bytes` that are pinned."""
    num_pages: int = 0
    pages_by_model: ByModel = {}
    num_peers: int = 0
    num_streams: int = 0
    num_sent_bytes: int = 0
    num_protocol_errors: int = 0
    num_refused_peers: int = 0
    num_failed_handshakes: int = 0
    """Connections that ended before the first message: no key, an unknown key, or the key of
    another server."""
    fetches_by_outcome: ByName = msgspec.field(default_factory=Counter)
    """Ended fetches by outcome: `ok`, a value of `wire.Why`, or `lost` (the peer was lost)."""
    hits: ByName = msgspec.field(default_factory=Counter)
    """Fetches of peers for which a tier had all pages, for each tier (`memory`, `disk`)."""
    misses: ByName = msgspec.field(default_factory=Counter)
    """Fetches of peers for which a tier did not have all pages, for each tier."""
    family: Family | None = None
    disk: DiskStatus | None = None
    """State of the disk; None without a disk."""
    reads_from: Annotated[tuple[Source, ...], msgspec.Meta(max_length=MAX_SOURCES)] = ()
    """The workers and directories from which this server reads."""


class Find(msgspec.Struct, frozen=True, kw_only=True, tag="find"):
    """Ask for each model how much of a prompt is stored."""

    pages: bytes


class Found(msgspec.Struct, frozen=True, kw_only=True, tag="found"):
    holdings: Annotated[tuple[Match, ...], msgspec.Meta(max_length=MAX_MODELS)]


class Evict(msgspec.Struct, frozen=True, kw_only=True, tag="evict"):
    """Order to drop all stored prompts that begin with `pages`. Empty `pages`: drop everything."""

    model: str
    """Id of the model; empty means all models."""
    pages: bytes


class Evicted(msgspec.Struct, frozen=True, kw_only=True, tag="evicted"):
    """Answer to Evict. Entries in use and pinned entries have stayed."""

    num_bytes: int
    """Bytes of memory that were freed."""
    num_disk_bytes: int


class Pin(msgspec.Struct, frozen=True, kw_only=True, tag="pin"):
    """Order to keep the stored pages of a prefix in memory (a pin)."""

    model: str
    """Id of the model; empty means all models."""
    pages: bytes
    ttl_s: float | None
    """Seconds that the pin lasts. None: until Unpin."""


class Pinned(msgspec.Struct, frozen=True, kw_only=True, tag="pinned"):
    pages_by_model: ByModel


class Unpin(msgspec.Struct, frozen=True, kw_only=True, tag="unpin"):
    """Order to end the pin that was made with the same model and pages."""

    model: str
    pages: bytes


class Unpinned(msgspec.Struct, frozen=True, kw_only=True, tag="unpinned"):
    was_pinned: bool


class Denied(msgspec.Struct, frozen=True, kw_only=True, tag="denied"):
    """Answer to an order that was not carried out."""

    reason: ReasonText


Order = Evict | Pin | Unpin
"""Orders that only an administrator may give."""

ToWorker = StatusRequest | Find | Evict | Pin | Unpin
ToPeer = Status | Found | Evicted | Pinned | Unpinned | Denied
