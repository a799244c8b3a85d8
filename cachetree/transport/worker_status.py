"""A worker in numbers."""

from __future__ import annotations

from collections import Counter

from cachetree.disk import DiskTier
from cachetree.transport import verbs, wire
from cachetree.tree.tree import CacheTree


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
